"""Moved tasks: their queries go to where their attention is computed, and the outputs come back.

A moved task has all keys of its queries, so what comes back is final and takes its place among the rank's own outputs.
Nothing is kept where it was computed: in the backward pass the queries go again, with the output, its log-sum-exps and
its gradient, and the gradient of the queries comes back. Those of keys go to their owners like any others.

``moved_latents`` does the same with latents in place of queries and outputs.

Shape suffixes: T tokens of the rank, n that go, m that come; h heads, e head size; x any values of a token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch

from boost_core.context.exchange import (
    AttentionSum,
    GradientSum,
    LatentRoute,
    QueryLatents,
    TaskMaker,
    start_rows,
)
from boost_core.context.partition import integers
from boost_core.context.plan import Traffic
from boost_core.model.attention import Rotation
from boost_core.parallel.communicator import Communicator


@dataclass(frozen=True)
class OwnQueries:
    """A rank's queries.

    Attributes:
        query: The queries, ``[T, h, e]``.
        made_of: What they are made from; ``None`` unless latents travel.
    """

    query: torch.Tensor
    made_of: QueryLatents | None = None


@dataclass(frozen=True)
class Attended:
    """What a layer keeps of its attention for the backward pass.

    Attributes:
        out: The output of the rank's own queries, ``[T, h, e]``; zeros where another rank keeps it.
        lse: Its log-sum-exps, ``[T, h]``.
        foreign: What is kept of other ranks' tasks.
    """

    out: torch.Tensor
    lse: torch.Tensor
    foreign: Sequence[torch.Tensor] = ()


@dataclass(frozen=True)
class OutputGradients:
    """Gradients of attention's output.

    Attributes:
        dout: Those of this rank's own, ``[T, h, e]``.
        of_latents: Waits for those of the latents of other ranks' outputs, ``[m, c]``; ``None`` unless latents travel.
    """

    dout: torch.Tensor
    of_latents: Callable[[], torch.Tensor] | None = None


@dataclass(frozen=True)
class Returning:
    """Latents of outputs that come back.

    Attributes:
        put: Waits for them, and puts them among those of this rank's tokens, ``[T, r]``.
        start_gradients: Starts to send these latents' gradients to where the outputs were computed; what it returns
            waits for those that come, ``[m, c]``.
    """

    put: Callable[[torch.Tensor], None]
    start_gradients: Callable[[torch.Tensor], Callable[[], torch.Tensor]]


@dataclass(frozen=True)
class Foreign:
    """Other ranks' queries.

    Attributes:
        attention: Their attention so far.
        answer: Sends back what was computed, given this rank's own output and log-sum-exps, and puts into these what
            comes back, or starts to return latents; returns what to keep.
    """

    attention: AttentionSum
    answer: Callable[[torch.Tensor, torch.Tensor], tuple[Sequence[torch.Tensor], Returning | None]]


@dataclass(frozen=True)
class TaskGradients:
    """Gradients of what moved tasks are computed from, if latents travel.

    Attributes:
        of_latents: Waits for those of the latents of this rank's own queries, and returns them, ``[T, r]``.
        of_weights: Those of a ``TaskMaker``'s weights, ``down`` last, from other ranks' tasks.
    """

    of_latents: Callable[[], torch.Tensor]
    of_weights: Sequence[torch.Tensor]


@dataclass(frozen=True)
class ForeignGradients:
    """Other ranks' queries in the backward pass.

    Attributes:
        gradients: Their gradients so far.
        answer: Sends them back, and puts what comes back into the gradients of this rank's own queries, or starts to
            return those of latents.
    """

    gradients: GradientSum
    answer: Callable[[torch.Tensor], TaskGradients | None]


class MovedTasks(Protocol):
    """The tasks that ranks compute for each other by one plan."""

    def ask(self, own: OwnQueries) -> Callable[[], Foreign]:
        """Start to send queries, or their latents; the returned function waits for those that come."""

    def ask_for_gradients(
        self, own: OwnQueries, attended: Attended, gradients: OutputGradients
    ) -> Callable[[], ForeignGradients]:
        """Start to send what gradients take, unless it is under way; the returned function waits for what comes."""


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
        first_n = integers([chunk for chunks in traffic.sends for chunk in chunks], torch.int64, device) * chunk_tokens
        self._places_n = (first_n.unsqueeze(1) + torch.arange(chunk_tokens, device=device)).flatten()

    def start(self, purpose: str, *own_Tx: torch.Tensor) -> Callable[[], Sequence[torch.Tensor]]:
        """Start to send values of moved tokens; the returned function waits, and returns those of tokens that come.

        Args:
            purpose: The purpose, for the ledger.
            own_Tx: Values of this rank's tokens, of any types; they are sent as the first one's type.
        """
        payload = _packed([x.index_select(0, self._places_n) for x in own_Tx])
        wait = start_rows(self._communicator, payload, self._goes, self._comes, purpose)
        return lambda: _unpacked(wait(), own_Tx)

    def start_back(self, purpose: str, *came_mx: torch.Tensor) -> Callable[..., None]:
        """Start to return what was computed for others; the returned function waits, and puts in place what comes back.

        Args:
            purpose: The purpose, for the ledger.
            came_mx: Results for the tokens that have come. What the returned function is called with are tensors of the
                same types for this rank's own tokens.
        """
        wait = start_rows(self._communicator, _packed(came_mx), self._comes, self._goes, purpose)

        def put(*own_Tx: torch.Tensor) -> None:
            for own, part_nx in zip(own_Tx, _unpacked(wait(), own_Tx), strict=True):
                own.index_copy_(0, self._places_n, part_nx)

        return put


class MovedQueries:
    """The ``MovedTasks`` whose queries and outputs travel as they are.

    Args:
        rows: Their exchange.
    """

    def __init__(self, rows: MovedRows) -> None:
        self._rows = rows

    def ask(self, own: OwnQueries) -> Callable[[], Foreign]:
        """As in ``MovedTasks``."""
        wait = self._rows.start("queries", own.query)

        def come() -> Foreign:
            attention = AttentionSum.begin(*wait())

            def answer(out_The: torch.Tensor, lse_Th: torch.Tensor) -> tuple[Sequence[torch.Tensor], None]:
                self._rows.start_back("outputs", attention.out.to(out_The.dtype), attention.lse)(out_The, lse_Th)
                return (), None

            return Foreign(attention, answer)

        return come

    def ask_for_gradients(
        self, own: OwnQueries, attended: Attended, gradients: OutputGradients
    ) -> Callable[[], ForeignGradients]:
        """As in ``MovedTasks``."""
        sent = own.query, gradients.dout, attended.out, attended.lse
        wait = self._rows.start("queries and output gradients", *sent)

        def come() -> ForeignGradients:
            gradient_sum = GradientSum.begin(*wait())

            def answer(dquery_The: torch.Tensor) -> None:
                self._rows.start_back("query gradients", gradient_sum.dquery.to(dquery_The.dtype))(dquery_The)

            return ForeignGradients(gradient_sum, answer)

        return come


def _packed(parts_nx: Sequence[torch.Tensor]) -> torch.Tensor:
    """One row per token, viewed as the first one's type, bit for bit."""
    return torch.cat([x.reshape(len(x), prod(x.shape[1:])).view(parts_nx[0].dtype) for x in parts_nx], dim=1)


def _unpacked(rows: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    widths = [prod(x.shape[1:]) * x.element_size() // rows.element_size() for x in like]
    parts = zip(rows.split_with_sizes(widths, dim=1), like, strict=True)
    return [part.contiguous().view(x.dtype).view(len(rows), *x.shape[1:]) for part, x in parts]


# Moved tasks whose queries and outputs travel as latents: r wide both ways, forward and backward.
#
# A task has all keys of its queries, so its output o is final where it is computed, and all ranks of the group have the
# layer's weights. So queries go as the latents that they are made from, and o A comes back, A being the weight that
# turns the heads of one tensor parallel rank into its part of the output's latents. These parts are summed over the
# node's tensor parallel ranks, a share per rank, and the owner puts its share into its own part, which its tensor
# parallel group sums in any case. Backward, the gradients of the output's latents go and those of the queries' latents
# come back, likewise as shares; the gathering and summing is as for keys' latents (``latents``).
#
# Outputs, log-sum-exps and the shares of latents that came are kept where they were computed, which spares sending them
# for the backward pass. The gradients of the weights are part of the sum over all ranks with these weights; there is
# one
# per micro-batch even if no task moves: code that counts gradients finds the same number in each.
#
# Shape suffixes: T tokens of the rank, m that come; r latents, p tensor parallel ranks, c = r/p; h heads, e head size.


class MovedLatents:
    """The ``MovedTasks`` whose queries and outputs travel as latents.

    Args:
        rows: Their exchange.
        route: How latents travel.
        chunks: The chunks whose queries come to this rank, in order of arrival.
    """

    def __init__(self, rows: MovedRows, route: LatentRoute, chunks: Sequence[int]) -> None:
        self._rows, self._route = rows, route
        self._rotation = route.at(chunks) if chunks else None

    def ask(self, own: OwnQueries) -> Callable[[], Foreign]:
        """As in ``MovedTasks``."""
        made_of = _given(own.made_of)
        wait = self._rows.start("query latents", self._route.share(made_of.of_queries))

        def come() -> Foreign:
            (share_mc,) = wait()
            maker, rotation, route = made_of.maker, self._rotation, self._route
            query_mhe = own.query.new_empty(0, *own.query.shape[1:])
            if rotation is not None:
                (latent_mr,) = route.gathered(share_mc, 1, "query latents")
                query_mhe = maker.make(latent_mr, [weight.detach() for weight in maker.weights], rotation)
            attention = AttentionSum.begin(query_mhe)

            def answer(out_The: torch.Tensor, _: torch.Tensor) -> tuple[Sequence[torch.Tensor], Returning]:
                out_mhe = attention.out.to(out_The.dtype)
                out_share_mc = share_mc.new_empty(share_mc.shape)  # of no tokens
                if rotation is not None:
                    out_share_mc = route.scattered([out_mhe.flatten(1) @ maker.down.detach()], "output latents")
                put = self._rows.start_back("output latents", out_share_mc)

                def start_gradients(dlatent_Tr: torch.Tensor) -> Callable[[], torch.Tensor]:
                    wait = self._rows.start("output latent gradients", route.columns(dlatent_Tr))
                    return lambda: wait()[0]

                returning = Returning(lambda latent_Tr: put(route.columns(latent_Tr)), start_gradients)
                return (share_mc, out_mhe, attention.lse), returning

            return Foreign(attention, answer)

        return come

    def ask_for_gradients(
        self, own: OwnQueries, attended: Attended, gradients: OutputGradients
    ) -> Callable[[], ForeignGradients]:
        """As in ``MovedTasks``."""
        made_of, (share_mc, out_mhe, lse_mh) = _given(own.made_of), attended.foreign
        wait, tokens = gradients.of_latents, len(own.query)
        if wait is None:
            raise AssertionError("with_returned comes between finish and the loss")

        def come() -> ForeignGradients:
            task = _Task(self._route, made_of.maker, self._rotation, share_mc, wait(), out_mhe)
            gradient_sum = GradientSum.begin(task.query, task.dout, out_mhe, lse_mh)

            def answer(_: torch.Tensor) -> TaskGradients:
                dshare_mc, of_weights = task.gradients(gradient_sum.dquery.to(out_mhe.dtype))
                put = self._rows.start_back("query latent gradients", dshare_mc)

                def of_latents() -> torch.Tensor:
                    share_Tc = dshare_mc.new_zeros(tokens, dshare_mc.shape[1])
                    put(share_Tc)
                    return self._route.in_place(share_Tc, 1)[0]

                return TaskGradients(of_latents, of_weights)

            return ForeignGradients(gradient_sum, answer)

        return come


class _Task:
    """Queries that have come, and the gradient of their output, from latents and their gradients.

    Args:
        route: How latents travel.
        maker: What to make of them.
        rotation: The rotation of the queries' tokens; ``None`` if none have come.
        share_mc: This rank's share of the queries' latents.
        dshare_mc: That of the gradients of the output's.
        out_mhe: The output.

    Attributes:
        query: The queries, ``[m, h, e]``.
        dout: The gradient of the output.
    """

    def __init__(
        self, route: LatentRoute, maker: TaskMaker, rotation: Rotation | None, share_mc: torch.Tensor,
        dshare_mc: torch.Tensor, out_mhe: torch.Tensor,
    ) -> None:  # fmt: skip
        self._route, self._maker, self._share, self._has_come = route, maker, share_mc, rotation is not None
        if rotation is None:
            self.query = self.dout = out_mhe
            return
        both_mc = torch.cat((share_mc, dshare_mc), dim=1)
        latent_mr, dlatent_mr = route.gathered(both_mc, 2, "query latents and output latent gradients")
        self._inputs = [x.detach().requires_grad_() for x in (latent_mr, *maker.weights)]
        with torch.enable_grad():
            self._made = maker.make(self._inputs[0], self._inputs[1:], rotation)
        self.query = self._made.detach()
        self.dout = (dlatent_mr @ maker.down.detach().mT).view(out_mhe.shape)
        self._ddown = out_mhe.flatten(1).mT @ dlatent_mr

    def gradients(self, dquery_mhe: torch.Tensor) -> tuple[torch.Tensor, Sequence[torch.Tensor]]:
        """This rank's share of the gradients of the queries' latents, and the weights' gradients; to be called once."""
        if not self._has_come:
            return self._share, no_gradients(self._maker)
        dlatent_mr, *of_weights = torch.autograd.grad(self._made, self._inputs, dquery_mhe)
        return self._route.scattered([dlatent_mr], "query latent gradients"), [*of_weights, self._ddown]


def no_gradients(maker: TaskMaker) -> Sequence[torch.Tensor]:
    """Zeros for its weights, ``down`` last."""
    return [torch.zeros_like(weight) for weight in (*maker.weights, maker.down)]


def give_weights(gradients: Sequence[torch.Tensor], maker: TaskMaker) -> None:
    """Pass on the gradients of a maker's weights, ``down`` last."""
    for weight, gradient in zip((*maker.weights, maker.down), gradients, strict=True):
        maker.sinks.add(weight, gradient)


def _given(of_queries: QueryLatents | None) -> QueryLatents:
    if of_queries is None:
        raise AssertionError("start gets what queries are made from where moves_latents says so")
    return of_queries
