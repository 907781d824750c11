"""Attention over context parallel ranks as one layer's part of autograd's graph.

Two nodes: ``_Save`` saves queries and keys, which are then sent; ``_Finish`` waits for keys and attends. Backward,
``_Finish`` computes all gradients, and ``_Save`` waits for the last of those that return. Where micro-batches are
split, the other half computes between the two, forward and backward: all stages are then in flight at once, and keys
are sent again as soon as the backward pass reaches the block. What is recomputed ends where they are saved.

If the outputs of offloaded tasks come back as latents, a third node, ``_Returned``, puts these among the latents of the
rank's own outputs; backward, it sends their gradients.

Each rank attends to its own keys while the first stage's are in flight, then to each stage's while the next stage's
are, and combines the parts by their log-sum-exps. The forward pass saves only the inputs, the output and its
log-sum-exps: in the backward pass, the keys, or the latents they are computed from, come again in the same stages, and
their gradients go back to their owners while the next stage's are computed. The queries of offloaded tasks, or latents
that they are made from, arrive while a rank attends with its own queries to its own keys. They attend to all the keys
that it has or receives, and their outputs go back at the end.

Shape suffixes: T tokens of the rank, n tokens received in a stage; h heads, j heads of keys and values, e head size; r
latents; s = 2, keys and values.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple, cast

import torch

from boost_core.context.exchange import (
    Arrivals,
    AttentionSum,
    GradientSum,
    KeyMaker,
    LatentRoute,
    LocalGradients,
    LocalKeys,
    QueryLatents,
    Stage,
    StageAttention,
    StageAttentions,
    TaskMaker,
)
from boost_core.context.plan import ContextPlan, rank_work
from boost_core.context.task_offload import (
    Attended,
    MovedLatents,
    MovedQueries,
    MovedRows,
    OutputGradients,
    RemoteGradients,
    RemoteQueries,
    Returning,
    TaskGradients,
)
from boost_core.kernels.rotary import rotary
from boost_core.model.attention import Attended as BlockAttended
from boost_core.model.attention import Heads, Rotation, normed_heads
from boost_core.model.low_rank import Bottleneck
from boost_core.parallel.btp import Exchanged
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.recompute import Crossing, Segments, end_turn


class Keys(NamedTuple):
    """What a rank sends in the forward pass, without their gradients' history.

    Attributes:
        keys: Keys and values, ``[T, s, j, e]``.
        maker: Makes them from latents, if these are sent.
        task_maker: Makes queries from latents, if these are sent.
        latents: The latents that are sent, ``[T, r]`` each, those of queries last.
    """

    keys: torch.Tensor
    maker: KeyMaker | None
    task_maker: TaskMaker | None
    latents: Sequence[torch.Tensor]


@dataclass(eq=False)
class LayerAttention:
    """Context-parallel attention of one layer, as ``model.attention.Attention`` says.

    Attributes:
        attention: That of all layers.
        in_flight: What has been sent, for one ``finish``.
        returning: Latents of outputs that other ranks compute, for one ``with_returned``.
        exchanges_keys: As in ``model.attention.Attention``.
    """

    attention: "ContextAttention"
    in_flight: "InFlight | None" = None
    returning: Returning | None = None
    exchanges_keys: bool = True

    def for_layer(self) -> "LayerAttention":
        """Return one for another layer, which has its own exchange in flight."""
        return self.attention.for_layer()

    async def __call__(
        self, block: Heads, segments: Segments, exchanged: list[Exchanged], carried: Crossing, rotation: Rotation
    ) -> BlockAttended:
        """As in ``Attention``: keys are exchanged behind a segment, and attention is not recomputed."""

        def saved(exchanged: list[Exchanged], carried: Crossing) -> tuple[torch.Tensor, Keys, list[torch.Tensor]]:
            heads, latents = block.heads(exchanged, carried)
            turned = rotary(heads, *rotation.angles(heads[0].dtype))
            query, key, value = (x_Td.view(len(x_Td), -1, block.head_size) for x_Td in turned)

            # What keys and values are made from, and queries, as far as other ranks make them themselves.
            maker, task_maker, sent_Tr = None, None, list[torch.Tensor]()
            bottleneck = block.query_key_value
            scales = [[bottleneck.declared(f"{of}_scale")] if block.qk_norm else [] for of in ("query", "key")]
            if self.attention.sends_latents:
                of = cast(Bottleneck, bottleneck)
                _, *sent_Tr = (z_Tr for z_gTr in latents for z_Tr in z_gTr)
                weights = [of.up_of(1), of.up_of(2), *scales[1]]
                maker = KeyMaker(weights, partial(_heads_of, block), block.sinks)
            if self.attention.moves_latents:
                weights = [cast(Bottleneck, bottleneck).up_of(0), *scales[0]]
                down_dr = block.output.declared("down").flatten(1)
                task_maker = TaskMaker(
                    weights, lambda z_nr, *others: _heads_of(block, [z_nr], *others)[0], down_dr, block.sinks
                )
                sent_Tr.append(latents[0][0])
            return *self.save(query, key, value, maker, task_maker, *sent_Tr), latents

        query_The, keys, latents = segments(saved, exchanged, carried)
        with torch.no_grad():
            self.in_flight = self.attention.send(query_The, keys, backward=False)
        del keys  # which are in flight
        if segments.lookahead.overlapped:
            await end_turn()
        attended_The = self.finish(query_The)
        partials = block.output.down_project(attended_The.flatten(1))
        if self.attention.moves_latents:
            partials = [
                part._replace(compute=partial(lambda part: self.with_returned(query_The, part.compute()), part))
                for part in partials
            ]

        def send_ahead_of(stream_Td: torch.Tensor) -> None:
            """Let the backward pass of a half send keys again once it has the gradient of ``stream_Td``."""
            saved_node = query_The.grad_fn
            if self.attention.of_a_half and saved_node is not None:
                stream_Td.register_hook(lambda _: _send_again(saved_node))  # type: ignore[no-untyped-call]

        return partials, latents, send_ahead_of

    def save(
        self, query_The: torch.Tensor, key_Tje: torch.Tensor, value_Tje: torch.Tensor, maker: KeyMaker | None,
        task_maker: TaskMaker | None, *latents_Tr: torch.Tensor,
    ) -> tuple[torch.Tensor, Keys]:  # fmt: skip
        """Save for the backward pass what is sent in the forward pass, and again in the backward pass.

        Args:
            query_The: Queries of this rank's tokens, turned by their positions, as keys are; h is a multiple of j.
            key_Tje: Their keys.
            value_Tje: Their values.
            maker: Makes keys and values from latents, if these are sent.
            task_maker: Makes queries from latents, if those of offloaded tasks are sent.
            latents_Tr: The latents that are sent, those of queries last.

        Returns:
            The queries, and what ``ContextAttention.send`` sends.

        Raises:
            ValueError: The number of tokens is not the plan's.
        """
        if len(query_The) != self.attention.tokens:
            raise ValueError(f"{len(query_The)} tokens are not the {self.attention.tokens} that the plan has here")
        inputs = query_The, key_Tje, value_Tje, self.attention, maker, task_maker, *latents_Tr
        query_The, keys_Tsje = _Save.apply(*inputs)  # type: ignore[no-untyped-call]
        return query_The, Keys(keys_Tsje, maker, task_maker, [latent_Tr.detach() for latent_Tr in latents_Tr])

    def finish(self, query_The: torch.Tensor) -> torch.Tensor:
        """Attention, ``[T, h, e]``, of the queries that ``save`` has returned. All ranks of the group call it.

        Raises:
            ValueError: torch has no kernel for them.
        """
        return _Finish.apply(query_The, self)  # type: ignore[no-any-return, no-untyped-call]

    def with_returned(self, query_The: torch.Tensor, latent_Tr: torch.Tensor) -> torch.Tensor:
        """Put latents of outputs that other ranks have computed into this rank's part, in place, after ``finish``.

        Args:
            query_The: The queries that ``save`` has returned.
            latent_Tr: This rank's part of the output's latents.
        """
        returning, self.returning = self.returning, None
        if returning is None:
            return latent_Tr
        return _Returned.apply(latent_Tr, query_The, returning)  # type: ignore[no-any-return, no-untyped-call]


def _heads_of(
    block: Heads, latents: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of other ranks' tokens, or queries and no values, computed as a block computes its own."""
    ups, scale = weights[: len(latents)], weights[len(latents) :]
    first_nd, *values = (latent_nr @ up_rd for latent_nr, up_rd in zip(latents, ups, strict=True))
    for scale_e in scale:
        first_nd = normed_heads(first_nd, scale_e, block.query_key_value.norm_epsilon)
    value_nd = values[0] if values else first_nd.new_empty(len(first_nd), 0)
    turned = rotary([first_nd.unsqueeze(0), value_nd.unsqueeze(0)], *rotation.angles(first_nd.dtype))
    first_nhe, value_nje = (x_nd.view(len(x_nd), -1, block.head_size) if x_nd.numel() else x_nd for x_nd in turned)
    return first_nhe, value_nje


class _Save(torch.autograd.Function):
    """Forward, what keys leave from is saved; backward, their gradients have come back."""

    @staticmethod
    def forward(
        ctx: Any, query_The: torch.Tensor, key_Tje: torch.Tensor, value_Tje: torch.Tensor,
        attention: "ContextAttention", maker: KeyMaker | None, task_maker: TaskMaker | None, *latents_Tr: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        keys_Tsje = torch.stack((key_Tje, value_Tje), dim=1)
        # Kernels take a head's elements side by side; and a view would keep the keys' and values' memory, too.
        query_The = query_The.clone(memory_format=torch.contiguous_format)
        ctx.save_for_backward(query_The, keys_Tsje, *latents_Tr)
        ctx.mark_non_differentiable(keys_Tsje)
        ctx.set_materialize_grads(False)
        ctx.attention, ctx.maker, ctx.task_maker = attention, maker, task_maker
        ctx.again, ctx.dlatent, ctx.returning = None, None, None
        return query_The, keys_Tsje

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        returning: ReturningGradients = ctx.returning
        local, of_tasks, dtype = returning.gradients, returning.of_tasks, gradients[0].dtype
        for add in returning.adds:
            add()
        ctx.returning = None
        maker, task_maker, route = ctx.maker, ctx.task_maker, ctx.attention.route
        of_latents = list[torch.Tensor | None]()
        if route is not None and maker is not None and local.share is not None:
            for weight, gradient in zip(maker.weights, local.weights, strict=True):
                maker.sinks.add(weight, gradient)
            of_latents += route.in_place(local.share.to(dtype), 2)
        if task_maker is not None:  # the queries' latents travel
            its_weights = *task_maker.weights, task_maker.down
            of_weights = of_tasks.of_weights if of_tasks else [torch.zeros_like(weight) for weight in its_weights]
            for weight, gradient in zip(its_weights, of_weights, strict=True):
                task_maker.sinks.add(weight, gradient)
            of_latents.append(of_tasks.of_latents() if of_tasks else None)
        return gradients[0], *local.keys.to(dtype).unbind(1), None, None, None, *of_latents


class _Finish(torch.autograd.Function):
    """Attention, forward and backward, between the two."""

    @staticmethod
    def forward(ctx: Any, query_The: torch.Tensor, layer: LayerAttention) -> torch.Tensor:
        in_flight, layer.in_flight = layer.in_flight, None
        if in_flight is None:
            raise AssertionError("start comes before finish")
        attended, layer.returning = layer.attention.forward(query_The, in_flight)
        ctx.save_for_backward(attended.out, attended.lse, *attended.remote)
        return attended.out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        out_The, lse_Th, *remote = ctx.saved_tensors
        saved_node = ctx.next_functions[0][0]
        _send_again(saved_node)
        (query_The, keys), saved_node.again = saved_node.again, None
        dlatent, saved_node.dlatent = saved_node.dlatent, None
        of_outputs = OutputGradients(gradients[0].contiguous(), dlatent)
        attended = Attended(out_The, lse_Th, remote)
        dquery_The, saved_node.returning = saved_node.attention.backward(of_outputs, query_The, keys, attended)
        return dquery_The, None


class _Returned(torch.autograd.Function):
    """Forward, latents of outputs come back; backward, their gradients leave before attention's are computed."""

    @staticmethod
    def forward(ctx: Any, latent_Tr: torch.Tensor, query_The: torch.Tensor, returning: Returning) -> torch.Tensor:
        ctx.mark_dirty(latent_Tr)
        returning.put(latent_Tr)
        ctx.start_gradients = returning.start_gradients
        return latent_Tr

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        saved_node = ctx.next_functions[1][0]
        saved_node.dlatent = ctx.start_gradients(gradients[0])
        return gradients[0], None, None


def _send_again(saved_node: Any) -> None:
    """Send what ``_Save`` has sent once more, for the backward pass, unless that is done; keeps it with its queries.

    Args:
        saved_node: The node of ``_Save``, which alone has the queries and keys, or has them recomputed.
    """
    if saved_node.again is None:
        query_The, keys_Tsje, *latents_Tr = saved_node.saved_tensors
        keys = Keys(keys_Tsje, saved_node.maker, saved_node.task_maker, latents_Tr)
        saved_node.again = query_The, saved_node.attention.send(query_The, keys, backward=True).keys


# Attention of a window whose tokens are partitioned over the ranks of a context parallel group.


class InFlight(NamedTuple):
    """What a rank has started to send and receive for one layer's forward pass.

    Attributes:
        queries: Waits for the queries of offloaded tasks; ``None`` if none move.
        keys: Keys.
    """

    queries: Callable[[], RemoteQueries] | None
    keys: Arrivals


class ReturningGradients(NamedTuple):
    """Gradients of what a rank sent to others, of which those of the last stage may be under way.

    Attributes:
        gradients: The gradients so far.
        adds: Wait for the rest, and add it.
        of_tasks: Gradients of what offloaded tasks were computed from, if they travelled as latents.
    """

    gradients: LocalGradients
    adds: Sequence[Callable[[], None]]
    of_tasks: TaskGradients | None = None


class ContextAttention:
    """Causal attention of documents whose tokens a plan partitions over ranks; a model's layers share it.

    Args:
        plan: The plan for all sequences of a micro-batch, or of a half, the same on all ranks.
        communicator: The context parallel group.
        device: Where this rank's tokens are.
        route: How latents travel; ``None`` if none do.
        of_a_half: Whether the other half of the micro-batch computes meanwhile, so that all stages are sent at once.

    Attributes:
        plan: As given.
        chunks: The window's chunks on this rank; its tokens are theirs, chunk by chunk.
        tokens: Number of its tokens.
        of_a_half: As given.
        route: As given.
        sends_latents: Whether a call has to pass the latents of keys and values.
        moves_latents: Whether a call has to pass the latents of queries, whether or not this plan moves tasks.
        moved: The attention that ranks compute for each other; ``None`` if no task moves.

    Raises:
        ValueError: The plan is for another number of ranks.
    """

    def __init__(
        self, plan: ContextPlan, communicator: Communicator, device: torch.device, route: LatentRoute | None = None,
        of_a_half: bool = False,
    ) -> None:  # fmt: skip
        if plan.ranks != communicator.size:
            raise ValueError(
                f"the plan deals tokens to {plan.ranks} ranks and the group has {communicator.size}; plan for the group"
            )
        work, window = rank_work(plan, communicator.rank, route.nodes if route else None), plan.window
        self.plan, self.chunks, self.route, self.of_a_half = plan, work.chunks, route, of_a_half
        self.sends_latents = route is not None and route.nodes is not None
        self.moves_latents = route is not None and route.moves
        self.tokens = len(work.chunks) * window.chunk_tokens
        both = (StageAttention(pieces, window.sees, device) for pieces in (work.pieces, work.remote_pieces))
        self._local = StageAttentions(*both)
        self.moved: MovedQueries | MovedLatents | None = None
        if work.queries is not None:
            rows = MovedRows(work.queries, window.chunk_tokens, communicator, device)
            if route and route.moves:
                self.moved = MovedLatents(rows, route, route.at(work.remote) if work.remote else None)
            else:
                self.moved = MovedQueries(rows)
        self._stages = [Stage(stage, window, communicator, route, device) for stage in work.stages]

    def for_layer(self) -> LayerAttention:
        """Return what a layer calls, in its forward pass and its recomputation."""
        return LayerAttention(self)

    def send(self, query_The: torch.Tensor, keys: Keys, backward: bool) -> InFlight:
        """Start to send what a rank has, and to receive what the others have. All ranks of the group call it.

        Args:
            query_The: The queries, of which those of offloaded tasks are sent in the forward pass.
            keys: What ``LayerAttention.save`` has returned.
            backward: Whether this is for the backward pass, so that gradients come back.
        """
        share_Tc = None
        if self.route and keys.maker:
            share_Tc = torch.cat([self.route.columns(x_Tr) for x_Tr in keys.latents[:2]], 1)
        of_queries = QueryLatents(keys.latents[-1], keys.task_maker) if keys.task_maker else None
        requested = None
        if self.moved and not backward:
            requested = self.moved.request(query_The.detach(), of_queries)
        local = LocalKeys(keys.keys, share_Tc, keys.maker, backward, of_queries)
        ahead = len(self._stages) if self.of_a_half else 1
        return InFlight(requested, Arrivals(local, self._local, self._stages, ahead))

    def forward(self, query_The: torch.Tensor, in_flight: InFlight) -> tuple[Attended, Returning | None]:
        """The output, ``[T, h, e]``, with log-sum-exps, ``[T, h]`` in fp32 at least; and its latents on their way."""
        come, local = in_flight.queries, AttentionSum(query_The)
        remote: RemoteQueries | None = None
        for _, attention, stage_keys in in_flight.keys:
            local.attend(attention.local, stage_keys.keys)
            if come:
                remote = remote or come()
                remote.attention.attend(attention.remote, stage_keys.keys)
        out_The, lse_Th = local.out.to(query_The.dtype), local.lse
        saved, returning = remote.respond(out_The, lse_Th) if remote else ((), None)
        return Attended(out_The, lse_Th, saved), returning

    def backward(
        self, of_outputs: OutputGradients, query_The: torch.Tensor, keys: Arrivals, attended: Attended
    ) -> tuple[torch.Tensor, ReturningGradients]:
        """Gradients of the queries, and of what the rank sent to others.

        Args:
            of_outputs: Gradients of the output.
            query_The: The queries.
            keys: The keys, on their way again.
            attended: What the forward pass has saved.
        """
        dtype, made_of = attended.lse.dtype, keys.local.of_queries
        come = self.moved.request_gradients(query_The, made_of, attended, of_outputs) if self.moved else None
        local = GradientSum(query_The, of_outputs.dout, attended.out, attended.lse)
        remote: RemoteGradients | None = None
        sent, weights = keys.local, keys.local.maker.weights if keys.local.maker else ()
        share_Tc = None if sent.share is None else torch.zeros_like(sent.share, dtype=dtype)
        dweights = [torch.zeros_like(weight, dtype=dtype) for weight in weights]
        gradients = LocalGradients(torch.zeros_like(sent.keys, dtype=dtype), share_Tc, dweights)
        adds: Sequence[Callable[[], None]] = ()
        for stage, attention, stage_keys in keys:
            dkeys_nsje = torch.zeros_like(stage_keys.keys, dtype=dtype) if stage else gradients.keys
            local.add(attention.local, stage_keys.keys, dkeys_nsje)
            if come:
                remote = remote or come()
                remote.gradients.add(attention.remote, stage_keys.keys, dkeys_nsje)
            for add in adds:
                add()
            if stage:
                adds = stage.start_back(stage_keys, dkeys_nsje, gradients)
        dquery_The = local.dquery.to(query_The.dtype)
        of_tasks = remote.respond(dquery_The) if remote else None
        return dquery_The, ReturningGradients(gradients, adds, of_tasks)
