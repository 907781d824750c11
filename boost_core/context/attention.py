"""Attention over context parallel ranks as one layer's part of autograd's graph.

Two nodes: ``_Save`` saves queries and keys, which are then sent; ``_Finish`` waits for keys and attends. Backward,
``_Finish`` computes all gradients, and ``_Save`` waits for the last of those that return. Where micro-batches are
split, the other half computes between the two, forward and backward: all stages are then in flight at once, and keys
are sent again as soon as the backward pass reaches the block. What is recomputed ends where they are saved.

If the outputs of moved tasks come back as latents, a third node, ``_Returned``, puts these among the latents of the
rank's own outputs; backward, it sends their gradients.

Shape suffixes: T tokens of the rank, h heads, j heads of keys and values, e head size; r latents.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, cast

import torch

from boost_core.context.exchange import (
    Arrivals,
    AttentionSum,
    BothAttentions,
    GradientSum,
    KeyLatents,
    KeyMaker,
    LatentRoute,
    Own,
    OwnGradients,
    QueryLatents,
    Stage,
    TaskMaker,
)
from boost_core.context.offload import (
    Attended,
    Foreign,
    ForeignGradients,
    MovedLatents,
    MovedQueries,
    MovedRows,
    MovedTasks,
    OutputGradients,
    OwnQueries,
    Returning,
    TaskGradients,
    give_weights,
    no_gradients,
)
from boost_core.context.plan import ContextPlan, rank_work
from boost_core.kernels.rotary import rotary
from boost_core.model.attention import Attended as BlockAttended
from boost_core.model.attention import Heads, Rotation, normed_heads
from boost_core.model.low_rank import Bottleneck
from boost_core.model.strategy import Exchanged, PartialLatents
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.recompute import Crossing, Segments


@dataclass(frozen=True)
class Keys:
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


class LayerAttention:
    """Context-parallel attention of one layer, as ``model.attention.Attention`` says.

    Args:
        attention: That of all layers.

    Attributes:
        attention: As given.
        in_flight: What ``send`` has started, for one ``finish``.
        returning: Latents of outputs that other ranks compute, for one ``with_returned``.
    """

    exchanges_keys = True

    def __init__(self, attention: "ContextAttention") -> None:
        self.attention = attention
        self.in_flight: InFlight | None = None
        self.returning: Returning | None = None

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
            return *self.save(query, key, value, *self._latents_sent(block, latents)), latents

        query_The, keys, latents = segments(saved, exchanged, carried)
        self.send(query_The, keys)
        del keys  # which are in flight
        attended_The = await segments.keys(partial(self.finish, query_The))
        partials = block.output.down_project(attended_The.flatten(1))
        if self.attention.moves_latents:
            partials = [replace(own, compute=partial(self._with_returned, query_The, own)) for own in partials]
        return partials, latents, partial(self.send_ahead_of, query_The)

    def _latents_sent(
        self, block: Heads, latents: list[torch.Tensor]
    ) -> tuple[KeyLatents | None, QueryLatents | None]:  # fmt: skip
        """What keys and values are made from, and queries, as far as other ranks make them themselves."""
        keys, queries = None, None
        if self.attention.sends_latents:
            of, scale = cast(Bottleneck, block.query_key_value), _scale(block, "key_scale")
            _, key_Tr, value_Tr = (z_Tr for z_gTr in latents for z_Tr in z_gTr)
            maker = KeyMaker([of.up_of(1), of.up_of(2), *scale], partial(_keys_of, block), block.sinks)
            keys = KeyLatents(key_Tr, value_Tr, maker)
        if self.attention.moves_latents:
            of, scale = cast(Bottleneck, block.query_key_value), _scale(block, "query_scale")
            down_dr = block.output.declared("down").flatten(1)
            task_maker = TaskMaker([of.up_of(0), *scale], partial(_queries_of, block), down_dr, block.sinks)
            queries = QueryLatents(latents[0][0], task_maker)
        return keys, queries

    def start(
        self,
        query_The: torch.Tensor,
        key_Tje: torch.Tensor,
        value_Tje: torch.Tensor,
        latents: KeyLatents | None = None,
        of_queries: QueryLatents | None = None,
    ) -> torch.Tensor:
        """Start to exchange keys; returns the queries for ``finish``. All ranks of the group call it; see ``save``."""
        query_The, keys = self.save(query_The, key_Tje, value_Tje, latents, of_queries)
        self.send(query_The, keys)
        return query_The

    def save(
        self,
        query_The: torch.Tensor,
        key_Tje: torch.Tensor,
        value_Tje: torch.Tensor,
        latents: KeyLatents | None,
        of_queries: QueryLatents | None,
    ) -> tuple[torch.Tensor, Keys]:
        """Save for the backward pass what is sent in the forward pass, and again in the backward pass.

        Args:
            query_The: Queries of this rank's tokens, turned by their positions, as keys are; h is a multiple of j.
            key_Tje: Their keys.
            value_Tje: Their values.
            latents: The latents of keys and values, if latents are sent.
            of_queries: The latents of queries, if those of moved tasks are sent.

        Returns:
            The queries, and what ``send`` sends.

        Raises:
            ValueError: The number of tokens is not the plan's.
        """
        if len(query_The) != self.attention.tokens:
            raise ValueError(
                f"{len(query_The)} tokens are not the {self.attention.tokens} that the plan has on this rank"
            )
        maker, sent = (latents.maker, [latents.of_keys, latents.of_values]) if latents else (None, [])
        task_maker, moved = (of_queries.maker, [of_queries.of_queries]) if of_queries else (None, [])
        query_The, keys_Tsje = _Save.apply(  # type: ignore[no-untyped-call]
            query_The, key_Tje, value_Tje, self.attention, maker, task_maker, *sent, *moved
        )
        return query_The, Keys(keys_Tsje, maker, task_maker, [each.detach() for each in (*sent, *moved)])

    @torch.no_grad()
    def send(self, query_The: torch.Tensor, keys: Keys) -> None:
        """Start to exchange what ``save`` has returned. All ranks of the group call it."""
        own = self.attention.own(keys.keys, keys.maker, keys.task_maker, keys.latents, backward=False)
        self.in_flight = self.attention.start(query_The.detach(), own)

    def finish(self, query_The: torch.Tensor) -> torch.Tensor:
        """Attention, ``[T, h, e]``, of the queries that ``start`` has returned. All ranks of the group call it.

        Raises:
            ValueError: torch has no kernel for them.
        """
        return _Finish.apply(query_The, self)  # type: ignore[no-any-return, no-untyped-call]

    def with_returned(self, query_The: torch.Tensor, latent_Tr: torch.Tensor) -> torch.Tensor:
        """Put latents of outputs that other ranks have computed into this rank's part, in place, after ``finish``.

        Args:
            query_The: What ``start`` has returned.
            latent_Tr: This rank's part of the output's latents.
        """
        returning, self.returning = self.returning, None
        if returning is None:
            return latent_Tr
        return _Returned.apply(latent_Tr, query_The, returning)  # type: ignore[no-any-return, no-untyped-call]

    def _with_returned(self, query_The: torch.Tensor, own: PartialLatents) -> torch.Tensor:
        return self.with_returned(query_The, own.compute())

    def send_ahead_of(self, query_The: torch.Tensor, stream_Td: torch.Tensor) -> None:
        """Let the backward pass of a half send keys again once it has the gradient of ``stream_Td``."""
        started = query_The.grad_fn
        if self.attention.of_a_half and started is not None:
            stream_Td.register_hook(lambda _: _send_again(started))  # type: ignore[no-untyped-call]


def _scale(block: Heads, name: str) -> list[torch.Tensor]:
    return [block.query_key_value.declared(name)] if block.qk_norm else []


def _keys_of(
    block: Heads, latents: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], rotation: Rotation
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of other ranks' tokens, computed as a block computes this rank's own."""
    (key_nr, value_nr), (up_key_rd, up_value_rd, *scale) = latents, weights
    key_nd, value_nd = key_nr @ up_key_rd, value_nr @ up_value_rd
    for scale_e in scale:
        key_nd = normed_heads(key_nd, scale_e, block.query_key_value.norm_epsilon)
    turned = rotary([key_nd.unsqueeze(0), value_nd.unsqueeze(0)], *rotation.angles(key_nd.dtype))
    key_nje, value_nje = (x_nd.view(len(x_nd), -1, block.head_size) for x_nd in turned)
    return key_nje, value_nje


def _queries_of(
    block: Heads, latent_nr: torch.Tensor, weights: Sequence[torch.Tensor], rotation: Rotation
) -> torch.Tensor:  # fmt: skip
    """Queries of other ranks' tokens, likewise."""
    up_rd, *scale = weights
    query_nd = latent_nr @ up_rd
    for scale_e in scale:
        query_nd = normed_heads(query_nd, scale_e, block.query_key_value.norm_epsilon)
    no_values_1n0 = query_nd.new_empty(1, len(query_nd), 0)
    query_nd, _ = rotary([query_nd.unsqueeze(0), no_values_1n0], *rotation.angles(query_nd.dtype))
    return query_nd.view(len(query_nd), -1, block.head_size)


class _Save(torch.autograd.Function):
    """Forward, what keys leave from is saved; backward, their gradients have come back."""

    @staticmethod
    def forward(
        ctx: Any,
        query_The: torch.Tensor,
        key_Tje: torch.Tensor,
        value_Tje: torch.Tensor,
        attention: "ContextAttention",
        maker: KeyMaker | None,
        task_maker: TaskMaker | None,
        *latents_Tr: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
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
        of_own, of_tasks, dtype = ctx.returning.whole(), ctx.returning.of_tasks, gradients[0].dtype
        ctx.returning = None
        of_latents = ctx.attention.gradients_of_latents(of_own, ctx.maker, dtype)
        of_queries: tuple[torch.Tensor | None, ...] = ()
        if ctx.task_maker is not None:  # the queries' latents travel
            give_weights(of_tasks.of_weights if of_tasks else no_gradients(ctx.task_maker), ctx.task_maker)
            of_queries = (of_tasks.of_latents() if of_tasks else None,)
        return gradients[0], *of_own.keys.to(dtype).unbind(1), None, None, None, *of_latents, *of_queries


class _Finish(torch.autograd.Function):
    """Attention, forward and backward, between the two."""

    @staticmethod
    def forward(ctx: Any, query_The: torch.Tensor, layer: LayerAttention) -> torch.Tensor:
        in_flight, layer.in_flight = layer.in_flight, None
        if in_flight is None:
            raise AssertionError("start comes before finish")
        attended, layer.returning = layer.attention.forward(query_The, in_flight)
        ctx.save_for_backward(attended.out, attended.lse, *attended.foreign)
        return attended.out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        out_The, lse_Th, *foreign = ctx.saved_tensors
        started = ctx.next_functions[0][0]
        _send_again(started)
        (query_The, keys), started.again = started.again, None
        dlatent, started.dlatent = started.dlatent, None
        of_outputs = OutputGradients(gradients[0].contiguous(), dlatent)
        attended = Attended(out_The, lse_Th, foreign)
        dquery_The, started.returning = started.attention.backward(of_outputs, query_The, keys, attended)
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
        started = ctx.next_functions[1][0]
        started.dlatent = ctx.start_gradients(gradients[0])
        return gradients[0], None, None


def _send_again(started: Any) -> None:
    """Send what ``_Save`` has sent once more, for the backward pass, unless that is done; keeps it with its queries.

    Args:
        started: The node of ``_Save``, which alone has the queries and keys, or has them recomputed.
    """
    if started.again is None:
        query_The, keys_Tsje, *latents_Tr = started.saved_tensors
        own = started.attention.own(keys_Tsje, started.maker, started.task_maker, latents_Tr, backward=True)
        started.again = query_The, started.attention.send(own)


# Attention of a window whose tokens are spread over the ranks of a context parallel group.
#
# Each rank attends to its own keys while the first stage's are in flight, then to each stage's while the next stage's
# are, and combines the parts by their log-sum-exps (``sums``). The forward pass keeps only the inputs, the output and
# its
# log-sum-exps: in the backward pass, the keys, or the latents they are computed from, come again in the same stages,
# and
# their gradients go back to their owners while the next stage's are computed.
#
# The queries of moved tasks, or the latents that they are made from, arrive while a rank attends with its own queries
# to
# its own keys. They attend to all the keys that it has or receives, and their outputs go back at the end.
#
# Shape suffixes: T tokens of the rank, h heads, j heads of keys and values, e head size; n tokens that come in a stage,
# m of a piece or of queries that have come; s = 2, keys and values.


@dataclass(frozen=True)
class InFlight:
    """What a rank has started to send and receive for one layer's forward pass.

    Attributes:
        queries: Waits for the queries of moved tasks; ``None`` if none move.
        keys: Keys.
    """

    queries: Callable[[], Foreign] | None
    keys: Arrivals


@dataclass(frozen=True)
class ReturningGradients:
    """Gradients of what a rank sent to others, of which those of the last stage may be under way.

    Attributes:
        gradients: The gradients so far.
        add: Waits for the rest, and adds it; ``None`` if all are there.
        of_tasks: Gradients of what moved tasks were computed from, if they travelled as latents.
    """

    gradients: OwnGradients
    add: Callable[[], None] | None
    of_tasks: TaskGradients | None = None

    def whole(self) -> OwnGradients:
        """All gradients; to be called once."""
        if self.add:
            self.add()
        return self.gradients


class ContextAttention:
    """Causal attention of documents whose tokens are dealt to ranks by a plan; a model's layers share it.

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
        self.plan, self.chunks, self._route, self.of_a_half = plan, work.chunks, route, of_a_half
        self.tokens = len(work.chunks) * window.chunk_tokens
        self._own = BothAttentions.of(work, window.sees, device)
        self._moved: MovedTasks | None = None  # ``None`` if none move
        if work.queries is not None:
            rows = MovedRows(work.queries, window.chunk_tokens, communicator, device)
            self._moved = MovedLatents(rows, route, work.foreign) if route and route.moves else MovedQueries(rows)
        self._stages = [Stage(stage, window, communicator, route, device) for stage in work.stages]

    @property
    def sends_latents(self) -> bool:
        """Whether a call has to pass the latents of keys and values."""
        return self._route is not None and self._route.nodes is not None

    @property
    def moves_latents(self) -> bool:
        """Whether a call has to pass the latents of queries, whether or not this plan moves tasks."""
        return self._route is not None and self._route.moves

    def for_layer(self) -> LayerAttention:
        """Return what a layer calls, in its forward pass and its recomputation."""
        return LayerAttention(self)

    def own(
        self, keys_Tsje: torch.Tensor, maker: KeyMaker | None, task_maker: TaskMaker | None,
        latents_Tr: Sequence[torch.Tensor], backward: bool,
    ) -> Own:  # fmt: skip
        """What this rank has to send: keys and values, its share of both their latents, and the queries' latents.

        Args:
            keys_Tsje: The keys and values.
            maker: Makes them from latents, if these are sent.
            task_maker: Makes queries from latents, if these are sent.
            latents_Tr: The latents that are sent, those of queries last.
            backward: Whether gradients come back.
        """
        share_Tc = self._route.share(*latents_Tr[:2]) if self._route and maker else None
        of_queries = QueryLatents(latents_Tr[-1], task_maker) if task_maker else None
        return Own(keys_Tsje, share_Tc, maker, backward, of_queries)

    def send(self, own: Own) -> Arrivals:
        """Start to send what a rank has, and to receive what the others have."""
        return Arrivals(own, self._own, self._stages, len(self._stages) if self.of_a_half else 1)

    def start(self, query_The: torch.Tensor, own: Own) -> InFlight:
        """Start what ``forward`` needs."""
        return InFlight(self._moved.ask(OwnQueries(query_The, own.of_queries)) if self._moved else None, self.send(own))

    def forward(self, query_The: torch.Tensor, in_flight: InFlight) -> tuple[Attended, Returning | None]:
        """The output, ``[T, h, e]``, with log-sum-exps, ``[T, h]`` in fp32 at least; and its latents on their way."""
        come, mine = in_flight.queries, AttentionSum.begin(query_The)
        foreign: Foreign | None = None
        for _, attention, came in in_flight.keys:
            mine.attend(attention.own, came)
            if come:
                foreign = foreign or come()
                foreign.attention.attend(attention.foreign, came)
        out_The, lse_Th = mine.out.to(query_The.dtype), mine.lse
        kept, returning = foreign.answer(out_The, lse_Th) if foreign else ((), None)
        return Attended(out_The, lse_Th, kept), returning

    def backward(
        self, of_outputs: OutputGradients, query_The: torch.Tensor, keys: Arrivals, attended: Attended
    ) -> tuple[torch.Tensor, ReturningGradients]:
        """Gradients of the queries, and of what the rank sent to others.

        Args:
            of_outputs: Gradients of the output.
            query_The: The queries.
            keys: The keys, on their way again.
            attended: What the forward pass has kept.
        """
        own, dtype = keys.own, attended.lse.dtype
        queries = OwnQueries(query_The, own.of_queries)
        come = self._moved.ask_for_gradients(queries, attended, of_outputs) if self._moved else None
        mine = GradientSum.begin(query_The, of_outputs.dout, attended.out, attended.lse)
        foreign: ForeignGradients | None = None
        gradients = OwnGradients.none_yet(own, dtype)
        add_returned: Callable[[], None] | None = None
        for stage, attention, came in keys:
            dkeys_nsje = torch.zeros_like(came.keys, dtype=dtype) if stage else gradients.keys
            mine.add(attention.own, came, dkeys_nsje)
            if come:
                foreign = foreign or come()
                foreign.gradients.add(attention.foreign, came, dkeys_nsje)
            if add_returned:
                add_returned()
            if stage:
                add_returned = stage.start_back(came, dkeys_nsje, gradients)
        dquery_The = mine.dquery.to(query_The.dtype)
        of_tasks = foreign.answer(dquery_The) if foreign else None
        return dquery_The, ReturningGradients(gradients, add_returned, of_tasks)

    def gradients_of_latents(
        self, gradients: OwnGradients, maker: KeyMaker | None, dtype: torch.dtype
    ) -> Sequence[torch.Tensor]:
        """Gradients of both latents, ``[T, r]``, if there are any; those of the weights are passed on."""
        if self._route is None or maker is None or gradients.latents is None:
            return ()
        gradients.latents.give_weights(maker)
        return self._route.in_place(gradients.latents.share.to(dtype), 2)
