"""Latents of which each tensor parallel rank keeps a slice until backward, when the ranks gather them again.

After its exchange a latent is the same on every rank of the group. With ``recompute: shared`` each keeps 1/p of it: of
what one segment of a block is given, its own latents and, under LaX, those that cross into it. The gathers of a segment
start as the backward pass comes to the segment one block after it, so that what is computed meanwhile hides them; the
first of a backward pass has nothing before it. A norm's statistics, one element a token, stay whole. What is gathered
has the bits that were kept, in memory that is laid out alike, so that all that is made of it is the same.

Shape suffixes: T tokens, r latents; g projections.
"""

from dataclasses import dataclass

import torch

from boost_core.nn.strategy import GatheredLatents, Latents
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.ledger import Pending

PURPOSE = "kept latent"
_AHEAD = 4  # segments of a block that are given latents


@dataclass
class Lookahead:
    """The segments of one forward pass, of which the backward pass gathers some ahead.

    Attributes:
        last: The newest.
    """

    last: "SlicedLatents | None" = None


class SlicedLatents:
    """The ``SharedLatents`` of one segment.

    Args:
        communicator: The tensor parallel group, of several ranks.
        lookahead: Of the forward pass; this is its newest from now on.
    """

    def __init__(self, communicator: Communicator, lookahead: Lookahead) -> None:
        self._communicator = communicator
        self._before, lookahead.last = lookahead.last, self
        self._exchanges: list[GatheredLatents] = []
        self._given: tuple[list[Latents], list[torch.Tensor] | None] | None = None
        self._latents: list[tuple[_Slice, torch.Tensor | None]] = []
        self._carried: list[_Slice] | None = None

    def of_exchange(self) -> GatheredLatents:
        """Where one more exchange in front of the segment finds its latents in backward."""
        self._exchanges.append(GatheredLatents())
        return self._exchanges[-1]

    def keep(self, latents: list[Latents], carried: list[torch.Tensor] | None) -> None:
        """Keep a slice of what the exchanges gave, in their order, and of what crosses into the segment."""
        self._given = latents, carried
        self._latents = [
            (self._slice(h_Tr), None if squares_T is None else squares_T.detach().clone())
            for h_Tr, squares_T in latents
        ]
        self._carried = None if carried is None else [self._slice(z_gTr) for z_gTr in carried]

    def give(self) -> tuple[list[Latents], list[torch.Tensor] | None]:
        """What was kept: first as it came, for the forward pass, and then as it is gathered, once."""
        if self._given is not None:
            given, self._given = self._given, None
            return given
        self._start_ahead()
        latents: list[Latents] = [(kept.whole(), squares_T) for kept, squares_T in self._latents]
        carried = None if self._carried is None else [kept.whole() for kept in self._carried]
        for exchange, gathered in zip(self._exchanges, latents, strict=True):
            exchange.latents = gathered if gathered[1] is not None else None  # read by the statistic's gradient alone
        self._latents, self._carried, self._exchanges = [], None, []
        return (
            [(_leaf(h_Tr), None if squares_T is None else _leaf(squares_T)) for h_Tr, squares_T in latents],
            None if carried is None else [_leaf(z_gTr) for z_gTr in carried],
        )

    def _slice(self, whole: torch.Tensor) -> "_Slice":
        return _Slice(whole.detach(), self._communicator)

    def _start_ahead(self) -> None:
        segment: SlicedLatents | None = self
        for _ in range(1 + _AHEAD):
            if segment is None:
                return
            segment._start()
            segment = segment._before

    def _start(self) -> None:
        for kept, _ in self._latents:
            kept.start()
        for kept in self._carried or ():
            kept.start()


class _Slice:
    """This rank's slice of a tensor that all ranks have."""

    def __init__(self, whole: torch.Tensor, communicator: Communicator) -> None:
        self._communicator = communicator
        # Projections may stand side by side, ``[T, g, r]``, and be seen as ``[g, T, r]``.
        self._turned = not whole.is_contiguous()
        ordered = whole.transpose(0, 1) if self._turned else whole
        if not ordered.is_contiguous():
            raise AssertionError(f"latents of shape {tuple(whole.shape)} have gaps between them")
        self._shape = ordered.shape
        self._own = ordered.flatten().chunk(communicator.size)[communicator.rank].clone()
        self._gather: tuple[Pending, torch.Tensor] | None = None

    def start(self) -> None:
        """Start to gather the tensor, if that is not under way."""
        if self._gather is None:
            gathered = self._own.new_empty(self._shape)
            self._gather = self._communicator.start_all_gather(gathered.view(-1), self._own, PURPOSE), gathered

    def whole(self) -> torch.Tensor:
        """The tensor, laid out in memory as it was."""
        if self._gather is None:
            raise AssertionError("its gather was not started")
        (pending, gathered), self._gather = self._gather, None
        pending.wait()
        return gathered.transpose(0, 1) if self._turned else gathered


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """What autograd takes for an input, as the recomputation has to keep for its nodes what the forward pass kept."""
    return tensor.detach().requires_grad_()
