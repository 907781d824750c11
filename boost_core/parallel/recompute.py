"""What a block's forward pass saves for its backward pass, and what is recomputed there (arXiv 1604.06174).

A block's work comes in segments between exchanges of latents. By the block's mode (``config.parallelism.TRAITS``)

============  =========================================================================================================
``none``      autograd saves what it needs;
``latent``    each segment's inputs are saved, and the segment is recomputed;
``shared``    so it is, but after its exchange a latent is the same on every rank of the group: each saves 1/p of a
              segment's latents, its own and, under LaX, those that cross into it, and they are gathered again;
``offload``   so it is, and the host's memory has these slices, or the whole latents on one rank, the statistics and the
              residual (``offload``);
``full``      the block's inputs are saved, and the whole block is recomputed, with its exchanges.
============  =========================================================================================================

A segment's gathers start when the backward pass reaches the segment one block after it, so that the computation in
between hides them; the first in a backward pass have nothing to hide behind. A norm's statistics, one element per
token, stay whole. What is gathered has the same bits and memory layout as what was saved, so everything computed from
it is the same. What the host has is fetched as far ahead as latents are gathered, and a block further ahead where they
are gathered.

Shape suffixes: T tokens, r latents; g projections.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from boost_core.model.low_rank import Bottleneck, Dense
from boost_core.model.strategy import Exchanged, GatheredLatents, Latents, PartialLatents
from boost_core.parallel.communicator import Communicator, Pending
from boost_core.parallel.offload import HostCopy, HostMemory
from boost_core.parallel.overlap import Turn

Result = TypeVar("Result")

PURPOSE = "kept latent"
_AHEAD = 4  # segments of a block that have latents as inputs

# The latents that cross into a segment from the previous block.
Crossing = list[torch.Tensor] | None


def recomputed(work: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function; autograd saves only its arguments, and calls it again for the rest."""
    result: Result = checkpoint(work, *arguments, use_reentrant=False, preserve_rng_state=False)
    return result


class Segments:
    """Runs the segments of one block's forward pass, and the exchanges between them.

    Args:
        recomputes: Whether segments are recomputed in the backward pass.
        saver: Returns what saves the inputs of another segment, or ``None`` where autograd does; ``None`` for always.
        crosses: Whether latents of the previous block cross into this one.
        overlapped: Whether another computation goes on at exchanges (``overlap``).
        exchanges_keys: Whether keys are exchanged. Only that then ends a turn: the keys have a whole block's
            computation of the other half to hide behind, of which each exchange of latents would end a part.
    """

    def __init__(
        self, recomputes: bool, saver: "Callable[[], SlicedLatents | None] | None", crosses: bool, overlapped: bool,
        exchanges_keys: bool,
    ) -> None:  # fmt: skip
        self._recomputes, self._saver, self._crosses = recomputes, saver, crosses
        self._overlapped, self._exchanges_keys = overlapped, exchanges_keys
        self._saved: SlicedLatents | None = None  # of the segment behind the next exchange

    def first(self, work: Callable[..., Result], *inputs: torch.Tensor | None) -> Result:
        """Run the segment in front of the first exchange."""
        self._saved = self._saver() if self._saver is not None else None
        if self._saved is not None:
            give = self._saved.hold(*inputs)
            return recomputed(lambda: work(*give()))
        return recomputed(work, *inputs) if self._recomputes else work(*inputs)

    def exchange(
        self, projections: Bottleneck | Dense, partials: list[PartialLatents]
    ) -> Turn[list[Exchanged]]:  # fmt: skip
        """Start the exchange of latents, which ends what is recomputed; to be awaited."""
        if self._saved is None and self._saver is not None:
            self._saved = self._saver()
        return Turn(projections.start(partials, self._saved), self._overlapped and not self._exchanges_keys)

    def keys(self, wait: Callable[[], Result]) -> Turn[Result]:
        """Wait for an exchange of keys; to be awaited."""
        return Turn(wait, self._overlapped)

    def __call__(
        self, work: Callable[..., Result], exchanged: list[Exchanged], carried: Crossing, *others: torch.Tensor
    ) -> Result:
        """Run the segment behind an exchange: ``work`` of its results, of what crosses into it, and of other inputs."""
        saved, self._saved = self._saved, None
        if saved is not None:
            saved.save(exchanged, carried if self._crosses else None)
            give = saved.hold(*others)
            return recomputed(lambda: work(*saved.give(), *give()))
        if self._recomputes:
            return recomputed(work, exchanged, carried, *others)
        return work(exchanged, carried, *others)


class _Copies:
    """Copies on the host, shared by all that save the same memory."""

    def __init__(self) -> None:
        self._copies: list[HostCopy] = []

    def of(self, tensor: torch.Tensor, host: HostMemory) -> HostCopy:
        """A tensor's copy, for one more owner; it is reused as long as the device still has the tensor."""
        self._copies = [copy for copy in self._copies if copy.leaves]
        copy = next((copy for copy in self._copies if copy.is_of(tensor)), None)
        if copy is None:
            copy = host.put(tensor)
            self._copies.append(copy)
        copy.keep()
        return copy


@dataclass
class Lookahead:
    """One forward pass through several blocks, whose segments the backward pass gathers ahead.

    Attributes:
        overlapped: Whether another forward pass goes on at its exchanges (``overlap``).
        last: The newest segment that saves its latents in slices.
        copies: Its copies on the host.
    """

    overlapped: bool = False
    last: "SlicedLatents | None" = None
    copies: _Copies = field(default_factory=_Copies)


class SlicedLatents:
    """The inputs of one segment, of which no rank's device has the latents whole (``SavedLatents``).

    Args:
        communicator: The tensor parallel group, of several ranks unless ``host`` is given.
        lookahead: The forward pass's; this becomes its newest segment.
        host: Where tensors are kept; ``None`` for the device.
    """

    def __init__(self, communicator: Communicator, lookahead: Lookahead, host: HostMemory | None = None) -> None:
        self._communicator, self._host, self._copies = communicator, host, lookahead.copies
        self._before, lookahead.last = lookahead.last, self
        self._exchanges: list[GatheredLatents] = []
        self._original: tuple[list[Exchanged], Crossing] | None = None
        self._latents: list[tuple[_Saved, _Saved | None]] = []
        self._carried: list[_Saved] | None = None
        self._others: list[_Saved] = []
        if host is not None:
            host.segment()

    def of_exchange(self) -> GatheredLatents:
        """Where another exchange before the segment finds its latents in the backward pass."""
        self._exchanges.append(GatheredLatents())
        return self._exchanges[-1]

    def save(self, exchanged: list[Exchanged], carried: Crossing) -> None:
        """Save a slice of the exchanges' results, in order, and of what crosses into the segment."""
        self._original = exchanged, carried
        for (h_Tr, squares_T), _ in exchanged:
            squares = None
            if squares_T is not None:  # among several ranks it came in one piece of memory with the latents
                squares_T = squares_T.detach()
                squares = self._store(squares_T if self._communicator.size == 1 else squares_T.clone())
            self._latents.append((self._slice(h_Tr), squares))
        self._carried = None if carried is None else [self._slice(z_gTr) for z_gTr in carried]

    def hold(self, *tensors: torch.Tensor | None) -> Callable[[], list[torch.Tensor | None]]:
        """Save other inputs of the segment, or of the one in front of its exchange.

        Returns:
            A function that returns them: for the forward pass as they came, and then, once, as they were saved.
        """
        if self._host is None:
            return partial(list, tensors)
        saved = [None if each is None else _OnHost(each.detach(), self._copies, self._host) for each in tensors]
        self._others += [each for each in saved if each is not None]
        return partial(_original_or_saved, [tensors], saved)

    def give(self) -> tuple[list[Exchanged], Crossing]:
        """What was saved: for the forward pass as it came, and then, once, as gathered."""
        if self._original is not None:
            original, self._original = self._original, None
            return original
        self._start_ahead()
        latents: list[Latents] = [
            (saved.whole(), None if squares is None else squares.whole()) for saved, squares in self._latents
        ]
        carried = None if self._carried is None else [saved.whole() for saved in self._carried]
        if self._communicator.size > 1:  # one rank exchanges nothing
            for exchange, gathered in zip(self._exchanges, latents, strict=True):
                exchange.latents = gathered if gathered[1] is not None else None  # the statistic's gradient reads it
        self._latents, self._carried, self._exchanges = [], None, []
        return (
            [((_leaf(h_Tr), None if squares_T is None else _leaf(squares_T)), None) for h_Tr, squares_T in latents],
            None if carried is None else [_leaf(z_gTr) for z_gTr in carried],
        )

    def _slice(self, latent: torch.Tensor) -> "_Saved":
        latent = latent.detach()
        return self._store(latent) if self._communicator.size == 1 else _Slice(latent, self._communicator, self._store)

    def _store(self, tensor: torch.Tensor) -> "_Saved":
        return _OnDevice(tensor) if self._host is None else _OnHost(tensor, self._copies, self._host)

    def _start_ahead(self) -> None:
        """Gather this segment and those of a block ahead; fetch another block's, so that it is there when gathered."""
        several = self._communicator.size > 1
        segment: SlicedLatents | None = self
        for number in range(1 + _AHEAD + _AHEAD):
            if segment is None:
                return
            gathers = number < 1 + _AHEAD
            for saved in segment._all():
                if gathers or several:
                    saved.fetch()
                if gathers:
                    saved.start()
            segment = segment._before

    def _all(self) -> "Iterator[_Saved]":
        for latent, squares in self._latents:
            yield latent
            if squares is not None:
                yield squares
        yield from self._carried or ()
        yield from self._others


class _Saved(Protocol):
    """A tensor until the backward pass needs it."""

    def fetch(self) -> None:
        """Start to copy what is saved to the device, if that is not under way."""

    def start(self) -> None:
        """Start to make it whole, if that is not under way."""

    def whole(self) -> torch.Tensor:
        """The tensor, once, laid out in memory as it was."""


class _OnDevice:
    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def fetch(self) -> None:
        """It is there."""

    def start(self) -> None:
        """It is whole."""

    def whole(self) -> torch.Tensor:
        return self._tensor


class _OnHost:
    def __init__(self, tensor: torch.Tensor, copies: _Copies, host: HostMemory) -> None:
        # Projections may stand side by side, ``[T, g, r]``, and be seen as ``[g, T, r]``.
        self._turned = not tensor.is_contiguous()
        self._copy: HostCopy | None = copies.of(tensor.transpose(0, 1) if self._turned else tensor, host)

    def fetch(self) -> None:
        if self._copy is not None:
            self._copy.fetch()

    def start(self) -> None:
        """It is whole."""

    def whole(self) -> torch.Tensor:
        if self._copy is None:
            raise AssertionError("it was given already")
        tensor, self._copy = self._copy.take(), None
        return tensor.transpose(0, 1) if self._turned else tensor


class _Slice:
    """This rank's slice of a tensor that all ranks have."""

    def __init__(self, whole: torch.Tensor, communicator: Communicator, save: Callable[[torch.Tensor], _Saved]) -> None:
        self._communicator = communicator
        # Projections may stand side by side, ``[T, g, r]``, and be seen as ``[g, T, r]``.
        self._turned = not whole.is_contiguous()
        ordered = whole.transpose(0, 1) if self._turned else whole
        if not ordered.is_contiguous():
            raise AssertionError(f"latents of shape {tuple(whole.shape)} have gaps between them")
        self._shape = ordered.shape
        self._own = save(ordered.flatten().chunk(communicator.size)[communicator.rank].clone())
        self._gather: tuple[Pending, torch.Tensor, torch.Tensor] | None = None

    def fetch(self) -> None:
        self._own.fetch()

    def start(self) -> None:
        """Start to gather the tensor, if that is not under way."""
        if self._gather is None:
            own = self._own.whole()
            gathered = own.new_empty(self._shape)
            self._gather = self._communicator.start_all_gather(gathered.view(-1), own, PURPOSE), gathered, own

    def whole(self) -> torch.Tensor:
        """The tensor, laid out in memory as it was."""
        if self._gather is None:
            raise AssertionError("its gather was not started")
        (pending, gathered, _), self._gather = self._gather, None
        pending.wait()
        return gathered.transpose(0, 1) if self._turned else gathered


def _original_or_saved(
    original: list[tuple[torch.Tensor | None, ...]], saved: list[_OnHost | None]
) -> list[torch.Tensor | None]:
    return list(original.pop()) if original else [None if each is None else _leaf(each.whole()) for each in saved]


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf for autograd: the recomputation must save for its nodes what the forward pass saved."""
    return tensor.detach().requires_grad_()
