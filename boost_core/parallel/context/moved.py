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

from boost_core.nn.attention import QueryLatents
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.context.exchange import start_rows
from boost_core.parallel.context.pieces import integers
from boost_core.parallel.context.sums import AttentionSum, GradientSum
from boost_core.plan.context.pieces import Traffic


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
            found = GradientSum.begin(*wait())

            def answer(dquery_The: torch.Tensor) -> None:
                self._rows.start_back("query gradients", found.dquery.to(dquery_The.dtype))(dquery_The)

            return ForeignGradients(found, answer)

        return come


def _packed(parts_nx: Sequence[torch.Tensor]) -> torch.Tensor:
    """One row per token, viewed as the first one's type, bit for bit."""
    return torch.cat([x.reshape(len(x), prod(x.shape[1:])).view(parts_nx[0].dtype) for x in parts_nx], dim=1)


def _unpacked(rows: torch.Tensor, like: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    widths = [prod(x.shape[1:]) * x.element_size() // rows.element_size() for x in like]
    parts = zip(rows.split_with_sizes(widths, dim=1), like, strict=True)
    return [part.contiguous().view(x.dtype).view(len(rows), *x.shape[1:]) for part, x in parts]
