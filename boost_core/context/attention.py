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

Shape suffixes: T tokens of the rank, n tokens received in a stage, or sent of offloaded tasks, and m received of these;
h heads, j heads of keys and values, e head size; x any values of a token; r latents, p tensor parallel ranks, c = r/p;
s = 2, keys and values.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from math import prod
from typing import Any, NamedTuple, cast

import torch

from boost_core.context.exchange import (
    AttentionSum,
    GradientSum,
    HeadMaker,
    LatentRoute,
    LocalGradients,
    LocalKeys,
    Stage,
    StageKeys,
    start_rows,
    token_places,
)
from boost_core.context.plan import ContextPlan, Traffic, rank_work
from boost_core.kernels.rotary import rotary
from boost_core.model.attention import Attended as BlockAttended
from boost_core.model.attention import Heads, Rotation, normed_heads
from boost_core.model.low_rank import Bottleneck
from boost_core.parallel.btp import Exchanged
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.recompute import Crossing, Segments, end_turn

# Attention task offloading: queries go to where their attention is computed, and the outputs come back.
#
# A task has all keys of its queries, so what comes back is final and takes its place among the rank's own outputs. In
# ``MovedQueries`` nothing is saved where it was computed: in the backward pass the queries go again, with the output,
# its log-sum-exps and its gradient, and the gradient of the queries comes back. Those of keys go to their owners like
# any others.
#
# In ``MovedLatents`` queries and outputs travel as latents: r wide both ways, forward and backward. An output o is
# final where it is computed, and all ranks of the group have the layer's weights. So queries go as the latents that
# they are made from, and o A comes back, A being the weight that turns the heads of one tensor parallel rank into its
# part of the output's latents. These parts are summed over the node's tensor parallel ranks, a share per rank, and the
# owner puts its share into its own part, which its tensor parallel group sums in any case. Backward, the gradients of
# the output's latents go and those of the queries' latents come back, likewise as shares; the gathering and summing is
# as for keys' latents (``exchange``).
#
# Outputs, log-sum-exps and the shares of latents received are then saved where they were computed, which spares sending
# them for the backward pass. The gradients of the weights are part of the sum over all ranks with these weights; there
# is one per micro-batch even if no task moves: code that counts gradients finds the same number in each.


Pending = Callable[[], Sequence[torch.Tensor]]  # waits for what is on its way, and returns it


class Returning(NamedTuple):
    """Latents of outputs that come back.

    Attributes:
        put: Waits for them, and puts them among those of this rank's tokens, ``[T, r]``.
        start_gradients: Starts to send these latents' gradients to where the outputs were computed; what it returns
            waits for those that come, ``[m, c]``, alone in a sequence.
    """

    put: Callable[[torch.Tensor], None]
    start_gradients: Callable[[torch.Tensor], Pending]


class Attended(NamedTuple):
    """The attention of one layer, as far as it is saved for the backward pass.

    Attributes:
        out: The output of the rank's own queries, ``[T, h, e]``; zeros where another rank has it.
        lse: Its log-sum-exps, ``[T, h]``.
        remote: What is saved of other ranks' tasks.
        returning: The latents of other ranks' outputs, if they travel; not saved.
    """

    out: torch.Tensor
    lse: torch.Tensor
    remote: Sequence[torch.Tensor] = ()
    returning: Returning | None = None


class RemoteQueries(NamedTuple):
    """Other ranks' queries.

    Attributes:
        attention: Their attention so far.
        respond: Sends back what was computed, given this rank's own output and log-sum-exps, and puts into these what
            comes back, or starts to return latents; returns what to save.
    """

    attention: AttentionSum
    respond: Callable[[torch.Tensor, torch.Tensor], tuple[Sequence[torch.Tensor], Returning | None]]


class TaskGradients(NamedTuple):
    """Gradients of what offloaded tasks are computed from, if latents travel.

    Attributes:
        of_latents: Waits for those of the latents of this rank's own queries, and returns them, ``[T, r]``.
        of_weights: Those of the weights of the queries' ``HeadMaker``, from other ranks' tasks.
    """

    of_latents: Callable[[], torch.Tensor]
    of_weights: Sequence[torch.Tensor]


class RemoteGradients(NamedTuple):
    """Other ranks' queries in the backward pass.

    Attributes:
        gradients: Their gradients so far.
        respond: Sends them back, and puts what comes back into the gradients of this rank's own queries, or starts to
            return those of latents.
    """

    gradients: GradientSum
    respond: Callable[[torch.Tensor], TaskGradients | None]


class MovedRows:
    """The exchange of tokens' values between those who have them and those who compute their attention.

    Args:
        traffic: What goes where; what comes stays in its order of arrival.
        chunk_tokens: Tokens of a chunk.
        communicator: The context parallel group.
        device: Where the tokens are.
    """

    def __init__(self, traffic: Traffic, chunk_tokens: int, communicator: Communicator, device: torch.device) -> None:
        self._communicator = communicator
        self._goes = [len(chunks) * chunk_tokens for chunks in traffic.sends]
        self._comes = [count * chunk_tokens for count in traffic.receives]
        self._places_n = token_places([chunk for chunks in traffic.sends for chunk in chunks], chunk_tokens, device)

    def start(self, purpose: str, *local_Tx: torch.Tensor) -> Pending:
        """Start to send values of moved tokens; the returned function waits, and returns those of tokens that come.

        Args:
            purpose: The purpose, for the ledger.
            local_Tx: Values of this rank's tokens, of any types; they are sent as the first one's type.
        """
        payload = _packed([x.index_select(0, self._places_n) for x in local_Tx])
        wait = start_rows(self._communicator, payload, self._goes, self._comes, purpose)
        return lambda: _unpacked(wait(), local_Tx)

    def start_back(self, purpose: str, *came_mx: torch.Tensor) -> Callable[..., None]:
        """Start to return what was computed for others; the returned function waits, and puts in place what comes back.

        Args:
            purpose: The purpose, for the ledger.
            came_mx: Results for the tokens that have come. What the returned function is called with are tensors of the
                same types for this rank's own tokens.
        """
        wait = start_rows(self._communicator, _packed(came_mx), self._comes, self._goes, purpose)

        def put(*local_Tx: torch.Tensor) -> None:
            for local, part_nx in zip(local_Tx, _unpacked(wait(), local_Tx), strict=True):
                local.index_copy_(0, self._places_n, part_nx)

        return put


@dataclass(frozen=True)
class MovedQueries:
    """The tasks that ranks compute for each other by one plan; queries and outputs travel as they are.

    Attributes:
        rows: Their exchange.
    """

    rows: MovedRows

    def request(self, local: LocalKeys) -> Callable[[], RemoteQueries]:
        """Start to send queries, or latents that they are made from; the returned function waits for other ranks'."""
        wait = self.rows.start("queries", local.query)

        def come() -> RemoteQueries:
            attention = AttentionSum(*wait())

            def respond(out_The: torch.Tensor, lse_Th: torch.Tensor) -> tuple[Sequence[torch.Tensor], None]:
                self.rows.start_back("outputs", attention.out.to(out_The.dtype), attention.lse)(out_The, lse_Th)
                return (), None

            return RemoteQueries(attention, respond)

        return come

    def request_gradients(
        self, local: LocalKeys, attended: Attended, dout_The: torch.Tensor, _wait: Pending | None
    ) -> Callable[[], RemoteGradients]:
        """Start to send what gradients take; the returned function waits for what other ranks send."""
        wait = self.rows.start("queries and output gradients", local.query, dout_The, attended.out, attended.lse)
        start_back = partial(self.rows.start_back, "query gradients")

        def come() -> RemoteGradients:
            sums = GradientSum(*wait())
            return RemoteGradients(sums, lambda dq_The: start_back(sums.dquery.to(dq_The.dtype))(dq_The))

        return come


def _packed(parts_nx: Sequence[torch.Tensor]) -> torch.Tensor:
    """One row per token, viewed as the first one's type, bit for bit."""
    return torch.cat([x.reshape(len(x), prod(x.shape[1:])).view(parts_nx[0].dtype) for x in parts_nx], dim=1)


def _unpacked(rows: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    widths = [prod(x.shape[1:]) * x.element_size() // rows.element_size() for x in like]
    parts = zip(rows.split_with_sizes(widths, dim=1), like, strict=True)
    return [part.contiguous().view(x.dtype).view(len(rows), *x.shape[1:]) for part, x in parts]


@dataclass(frozen=True)
class MovedLatents:
    """The same, but queries and outputs travel as latents.

    Attributes:
        rows: Their exchange.
        route: How latents travel.
        rotation: Of the tokens whose queries come to this rank, in order of arrival; ``None`` if none do.
    """

    rows: MovedRows
    route: LatentRoute
    rotation: Rotation | None

    def request(self, local: LocalKeys) -> Callable[[], RemoteQueries]:
        """As in ``MovedQueries``."""
        maker = local.task_maker
        assert maker is not None, "start gets what queries are made from where moves_latents says so"
        wait = self.rows.start("query latents", self.route.columns(local.latents[-1]))

        def come() -> RemoteQueries:
            (share_mc,) = wait()
            rotation, route = self.rotation, self.route
            *weights, down = (weight.detach() for weight in maker.weights)
            query_mhe = local.query.new_empty(0, *local.query.shape[1:])
            if rotation is not None:
                query_mhe, _ = maker.make(route.gathered(share_mc, 1, "query latents"), weights, rotation)
            attention = AttentionSum(query_mhe)

            def respond(out_The: torch.Tensor, _: torch.Tensor) -> tuple[Sequence[torch.Tensor], Returning]:
                out_mhe = attention.out.to(out_The.dtype)
                out_share_mc = share_mc.new_empty(share_mc.shape)  # of no tokens
                if rotation is not None:
                    out_share_mc = route.scattered([out_mhe.flatten(1) @ down], "output latents")
                put = self.rows.start_back("output latents", out_share_mc)

                returning = Returning(
                    lambda latent_Tr: put(route.columns(latent_Tr)),
                    lambda dlatent_Tr: self.rows.start("output latent gradients", route.columns(dlatent_Tr)),
                )
                return (share_mc, out_mhe, attention.lse), returning

            return RemoteQueries(attention, respond)

        return come

    def request_gradients(
        self, local: LocalKeys, attended: Attended, _dout_The: torch.Tensor, wait: Pending | None
    ) -> Callable[[], RemoteGradients]:
        """As in ``MovedQueries``; what gradients take is in flight already, or saved where it was computed."""
        maker, (share_mc, out_mhe, lse_mh) = local.task_maker, attended.remote
        assert maker is not None, "start gets what queries are made from where moves_latents says so"
        tokens, route, rotation = len(local.query), self.route, self.rotation
        if wait is None:
            raise AssertionError("with_returned comes between finish and the loss")

        def come() -> RemoteGradients:
            (dshare_mc,) = wait()
            # Queries, and the gradient of their output, from latents and their gradients; or of no tokens.
            query_mhe = dout_mhe = out_mhe
            graph: tuple[torch.Tensor, Sequence[torch.Tensor], torch.Tensor] | None = None
            if rotation is not None:
                both_mc = torch.cat((share_mc, dshare_mc), dim=1)
                latent_mr, dlatent_mr = route.gathered(both_mc, 2, "query latents and output latent gradients")
                inputs = [x.detach().requires_grad_() for x in (latent_mr, *maker.weights[:-1])]
                with torch.enable_grad():
                    with_history_mhe, _ = maker.make(inputs[:1], inputs[1:], rotation)
                query_mhe = with_history_mhe.detach()
                dout_mhe = (dlatent_mr @ maker.weights[-1].detach().mT).view(out_mhe.shape)
                graph = with_history_mhe, inputs, out_mhe.flatten(1).mT @ dlatent_mr
            gradient_sum = GradientSum(query_mhe, dout_mhe, out_mhe, lse_mh)

            def respond(_: torch.Tensor) -> TaskGradients:
                if graph is None:
                    dquery_share_mc, of_weights = share_mc, [torch.zeros_like(weight) for weight in maker.weights]
                else:
                    with_history_mhe, inputs, ddown = graph
                    dquery_mhe = gradient_sum.dquery.to(out_mhe.dtype)
                    dquery_latent_mr, *dweights = torch.autograd.grad(with_history_mhe, inputs, dquery_mhe)
                    dquery_share_mc = route.scattered([dquery_latent_mr], "query latent gradients")
                    of_weights = [*dweights, ddown]
                put = self.rows.start_back("query latent gradients", dquery_share_mc)

                def of_latents() -> torch.Tensor:
                    share_Tc = dquery_share_mc.new_zeros(tokens, dquery_share_mc.shape[1])
                    put(share_Tc)
                    return route.in_place(share_Tc, 1)[0]

                return TaskGradients(of_latents, of_weights)

            return RemoteGradients(gradient_sum, respond)

        return come


# One layer's part of autograd's graph.


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
    in_flight: "Arrivals | None" = None
    returning: Returning | None = None
    exchanges_keys: bool = True

    def for_layer(self) -> "LayerAttention":
        """Return one for another layer, which has its own exchange in flight."""
        return self.attention.for_layer()

    async def __call__(
        self, block: Heads, segments: Segments, exchanged: list[Exchanged], carried: Crossing, rotation: Rotation
    ) -> BlockAttended:
        """As in ``Attention``: keys are exchanged behind a segment, and attention is not recomputed."""

        def saved(exchanged: list[Exchanged], carried: Crossing) -> tuple[torch.Tensor, LocalKeys, list[torch.Tensor]]:
            heads, latents = block.heads(exchanged, carried)
            turned = rotary(heads, *rotation.angles(heads[0].dtype))
            query, key, value = (x_Td.view(len(x_Td), -1, block.head_size) for x_Td in turned)

            # What keys and values are made from, and queries, as far as other ranks make them themselves.
            maker, task_maker, sent_Tr = None, None, list[torch.Tensor]()
            its = cast(Bottleneck, block.query_key_value)  # where latents are sent
            scales = [[its.declared(f"{of}_scale")] if block.qk_norm else [] for of in ("query", "key")]
            if self.attention.sends_latents:
                _, *sent_Tr = (z_Tr for z_gTr in latents for z_Tr in z_gTr)
                maker = HeadMaker([its.up_of(1), its.up_of(2), *scales[1]], partial(_heads_of, block), block.sinks)
            if self.attention.moves_latents:
                weights = [its.up_of(0), *scales[0], block.output.declared("down").flatten(1)]
                task_maker = HeadMaker(weights, partial(_heads_of, block), block.sinks)
                sent_Tr.append(latents[0][0])
            return *self.save(query, key, value, maker, task_maker, *sent_Tr), latents

        query_The, keys, latents = segments(saved, exchanged, carried)
        with torch.no_grad():
            self.in_flight = self.attention.send(keys, backward=False)
        del keys  # which are in flight
        if segments.lookahead.overlapped:
            await end_turn()
        partials = block.output.down_project(self.finish(query_The).flatten(1))
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
        self, query_The: torch.Tensor, key_Tje: torch.Tensor, value_Tje: torch.Tensor, maker: HeadMaker | None,
        task_maker: HeadMaker | None, *latents_Tr: torch.Tensor,
    ) -> tuple[torch.Tensor, LocalKeys]:  # fmt: skip
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
        latents = [latent_Tr.detach() for latent_Tr in latents_Tr]
        return query_The, LocalKeys(query_The.detach(), keys_Tsje, maker, task_maker, latents)

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
        attention: "ContextAttention", maker: HeadMaker | None, task_maker: HeadMaker | None, *latents_Tr: torch.Tensor,
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
        returning: SentGradients = ctx.returning
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
            of_weights = of_tasks.of_weights if of_tasks else map(torch.zeros_like, task_maker.weights)
            for weight, gradient in zip(task_maker.weights, of_weights, strict=True):
                task_maker.sinks.add(weight, gradient)
            of_latents.append(of_tasks.of_latents() if of_tasks else None)
        return gradients[0], *local.keys.to(dtype).unbind(1), None, None, None, *of_latents


class _Finish(torch.autograd.Function):
    """Attention, forward and backward, between the two."""

    @staticmethod
    def forward(ctx: Any, _query_The: torch.Tensor, layer: LayerAttention) -> torch.Tensor:
        in_flight, layer.in_flight = layer.in_flight, None
        if in_flight is None:
            raise AssertionError("start comes before finish")
        attended = layer.attention.forward(in_flight)
        layer.returning = attended.returning
        ctx.save_for_backward(attended.out, attended.lse, *attended.remote)
        return attended.out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        out_The, lse_Th, *remote = ctx.saved_tensors
        saved_node = ctx.next_functions[0][0]
        _send_again(saved_node)
        keys, saved_node.again = saved_node.again, None
        dlatent, saved_node.dlatent = saved_node.dlatent, None
        attended, dout_The = Attended(out_The, lse_Th, remote), gradients[0].contiguous()
        dquery_The, saved_node.returning = saved_node.attention.backward(keys, attended, dout_The, dlatent)
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
        ctx.next_functions[1][0].dlatent = ctx.start_gradients(gradients[0])  # of ``_Save``
        return gradients[0], None, None


def _send_again(saved_node: Any) -> None:
    """Send what ``_Save`` has sent once more, for the backward pass, unless that is done.

    Args:
        saved_node: The node of ``_Save``, which alone has the queries and keys, or has them recomputed.
    """
    if saved_node.again is None:
        query_The, keys_Tsje, *latents_Tr = saved_node.saved_tensors
        keys = LocalKeys(query_The, keys_Tsje, saved_node.maker, saved_node.task_maker, latents_Tr)
        saved_node.again = saved_node.attention.send(keys, backward=True)


# Attention of a window whose tokens are partitioned over the ranks of a context parallel group.


class Arrivals:
    """Keys in flight to a rank, stage by stage, forward or backward; some are in flight from the start.

    Args:
        local: What this rank sends.
        stages: The stages, that of its own keys first.
        ahead: How many are in flight at once.
        queries: Waits for the queries of offloaded tasks, forward; ``None`` if none move.

    Attributes:
        local: As given.
        queries: As given.
    """

    def __init__(
        self, local: LocalKeys, stages: Sequence[Stage], ahead: int, queries: Callable[[], RemoteQueries] | None
    ) -> None:
        self.local, self.queries = local, queries
        self._own, self._stages_left = stages[0], iter(stages[1:])
        self._in_flight = deque((stage, stage.start(local)) for stage in islice(self._stages_left, ahead))

    def __iter__(self) -> Iterator[tuple[Stage, StageKeys]]:
        """Each stage with what it brings, the rank's local keys first, while later stages are in flight; once."""
        yield self._own, StageKeys(self.local.keys)
        while self._in_flight:
            stage, waits = self._in_flight.popleft()
            keys_nc, shares_nc = (wait() if wait else None for wait in waits)
            self._in_flight.extend((each, each.start(self.local)) for each in islice(self._stages_left, 1))
            yield stage, stage.received(self.local, keys_nc, shares_nc)


class SentGradients(NamedTuple):
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
        self.chunks, self.route, self.of_a_half = work.own.chunks, route, of_a_half
        self.sends_latents = route is not None and route.nodes is not None
        self.moves_latents = route is not None and route.moves
        self.tokens = len(self.chunks) * window.chunk_tokens
        self.moved: MovedQueries | MovedLatents | None = None
        if work.queries is not None:
            rows = MovedRows(work.queries, window.chunk_tokens, communicator, device)
            self.moved = MovedQueries(rows)
            if route and route.moves:
                self.moved = MovedLatents(rows, route, route.at(work.remote) if work.remote else None)
        self._stages = [Stage(each, window, communicator, route, device) for each in (work.own, *work.stages)]

    def for_layer(self) -> LayerAttention:
        """Return what a layer calls, in its forward pass and its recomputation."""
        return LayerAttention(self)

    def send(self, keys: LocalKeys, backward: bool) -> Arrivals:
        """Start to send what a rank has, and to receive what the others have. All ranks of the group call it.

        Args:
            keys: What ``LayerAttention.save`` has returned.
            backward: Whether this is for the backward pass, so that gradients come back.
        """
        share_Tc = None
        if self.route and keys.maker:
            share_Tc = torch.cat([self.route.columns(x_Tr) for x_Tr in keys.latents[:2]], 1)
        requested = self.moved.request(keys) if self.moved and not backward else None
        local = keys._replace(share=share_Tc, backward=backward)
        return Arrivals(local, self._stages, len(self._stages) if self.of_a_half else 1, requested)

    def forward(self, keys: Arrivals) -> Attended:
        """The output, with log-sum-exps in fp32 at least, and its latents on their way."""
        local = AttentionSum(keys.local.query)
        remote: RemoteQueries | None = None
        for stage, stage_keys in keys:
            local.attend(stage.local, stage_keys.keys)
            if keys.queries:
                remote = remote or keys.queries()
                remote.attention.attend(stage.remote, stage_keys.keys)
        out_The, lse_Th = local.out.to(local.query.dtype), local.lse
        saved, returning = remote.respond(out_The, lse_Th) if remote else ((), None)
        return Attended(out_The, lse_Th, saved, returning)

    def backward(
        self, keys: Arrivals, attended: Attended, dout_The: torch.Tensor, dlatent: Pending | None
    ) -> tuple[torch.Tensor, SentGradients]:
        """Gradients of the queries, and of what the rank sent to others.

        Args:
            keys: The keys, on their way again.
            attended: What the forward pass has saved.
            dout_The: The gradient of the output.
            dlatent: Waits for those of the latents of other ranks' outputs, ``[m, c]``, alone in a sequence; ``None``
                unless latents travel.
        """
        sent, dtype = keys.local, attended.lse.dtype
        come = self.moved.request_gradients(sent, attended, dout_The, dlatent) if self.moved else None
        local = GradientSum(sent.query, dout_The, attended.out, attended.lse)
        remote: RemoteGradients | None = None
        weights = sent.maker.weights if sent.maker else ()
        share_Tc = None if sent.share is None else torch.zeros_like(sent.share, dtype=dtype)
        dweights = [torch.zeros_like(weight, dtype=dtype) for weight in weights]
        gradients = LocalGradients(torch.zeros_like(sent.keys, dtype=dtype), share_Tc, dweights)
        adds: Sequence[Callable[[], None]] = ()
        for number, (stage, stage_keys) in enumerate(keys):  # the rank's own first
            dkeys_nsje = torch.zeros_like(stage_keys.keys, dtype=dtype) if number else gradients.keys
            local.add(stage.local, stage_keys.keys, dkeys_nsje)
            if come:
                remote = remote or come()
                remote.gradients.add(stage.remote, stage_keys.keys, dkeys_nsje)
            for add in adds:
                add()
            adds = stage.start_back(stage_keys, dkeys_nsje, gradients)
        dquery_The = local.dquery.to(sent.query.dtype)
        return dquery_The, SentGradients(gradients, adds, remote.respond(dquery_The) if remote else None)
