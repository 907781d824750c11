"""Computations in segments, so that several overlap by taking turns, and what is recomputed in the backward pass."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from boost_core.model.strategy import GatheredLatents, Held, Latents
from boost_core.parallel.communicator import Communicator, Pending
from boost_core.parallel.offload import HostCopy, HostMemory

Result = TypeVar("Result")

# Yields a function that waits for an exchange in flight, and is sent that exchange's result; returns its own result.
Segments = Generator[Callable[[], Any], Any, Result]


def run_together(computations: Sequence[Segments[Result]]) -> list[Result]:
    """Run computations in turns, a segment each, and return their results; all have the same number of segments."""
    waits, results = [next(computation) for computation in computations], list[Result]()
    while not results:
        for index, computation in enumerate(computations):
            try:
                waits[index] = computation.send(waits[index]())
            except StopIteration as end:
                results.append(end.value)
    return results


def no_recompute(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function; autograd keeps what it needs."""
    return function(*arguments)


def checkpoint_block(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function; autograd keeps only its arguments, and calls it again for the rest (arXiv 1604.06174)."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def checkpoint_segment(function: Callable[..., Any], *arguments: Any) -> Any:
    """As ``checkpoint_block``, but without repeating the exchanged product that ends the work; see ``in_recompute``."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=_first_and_again)


def in_recompute() -> bool:
    """Whether this is the backward pass's recomputation, in which nothing reads the product that was exchanged."""
    return _recomputes.get()


_recomputes: ContextVar[bool] = ContextVar("recomputes", default=False)


def _first_and_again() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _recomputing()


@contextmanager
def _recomputing() -> Iterator[None]:
    before = _recomputes.set(True)
    try:
        yield
    finally:
        _recomputes.reset(before)


# Inputs of a recomputed block's segments, kept for the backward pass in slices, on the host, or both.
#
# After its exchange a latent is the same on every rank of the group. With ``recompute: shared``, each rank keeps 1/p
# of a
# segment's inputs: its own latents and, under LaX, those that cross into it. A segment's gathers start when the
# backward
# pass reaches the segment one block after it, so that the computation in between hides them; the first in a backward
# pass
# have nothing to hide behind. A norm's statistics, one element per token, stay whole. What is gathered has the same
# bits
# and memory layout as what was kept, so everything computed from it is the same.
#
# With ``recompute: offload``, the host's memory holds these slices, or the whole latents on one rank, the statistics
# and
# the residual (``host_memory``). They are fetched as far ahead as latents are gathered, and a block further ahead where
# they are gathered.
#
# Shape suffixes: T tokens, r latents; g projections.

PURPOSE = "kept latent"
_AHEAD = 4  # segments of a block that are given latents


class _Copies:
    """Copies on the host, shared by keepers of the same memory."""

    def __init__(self) -> None:
        self._copies: list[HostCopy] = []

    def of(self, tensor: torch.Tensor, host: HostMemory) -> HostCopy:
        """A tensor's copy, with one more keeper; it is reused as long as the device still has the tensor."""
        self._copies = [copy for copy in self._copies if copy.leaves]
        copy = next((copy for copy in self._copies if copy.is_of(tensor)), None)
        if copy is None:
            copy = host.put(tensor)
            self._copies.append(copy)
        copy.keep()
        return copy


@dataclass
class Lookahead:
    """The segments of one forward pass, which the backward pass gathers ahead.

    Attributes:
        last: The newest segment.
        copies: Its copies on the host.
    """

    last: "SlicedLatents | None" = None
    copies: _Copies = field(default_factory=_Copies)


class SlicedLatents:
    """The ``SharedLatents`` of one segment.

    Args:
        communicator: The tensor parallel group, of several ranks unless ``host`` is given.
        lookahead: The forward pass's; this becomes its newest segment.
        host: Where tensors are kept; ``None`` for the device.
    """

    def __init__(self, communicator: Communicator, lookahead: Lookahead, host: HostMemory | None = None) -> None:
        self._communicator, self._host, self._copies = communicator, host, lookahead.copies
        self._before, lookahead.last = lookahead.last, self
        self._exchanges: list[GatheredLatents] = []
        self._given: tuple[list[Latents], list[torch.Tensor] | None] | None = None
        self._latents: list[tuple[_Kept, _Kept | None]] = []
        self._carried: list[_Kept] | None = None
        self._held: list[_Held] = []
        if host is not None:
            host.segment()

    def of_exchange(self) -> GatheredLatents:
        """Where another exchange before the segment finds its latents in the backward pass."""
        self._exchanges.append(GatheredLatents())
        return self._exchanges[-1]

    def keep(self, latents: list[Latents], carried: list[torch.Tensor] | None) -> None:
        """Keep a slice of the exchanges' results, in order, and of what crosses into the segment."""
        self._given = latents, carried
        self._latents = [
            (self._keep(h_Tr), None if squares_T is None else self._keep_statistic(squares_T))
            for h_Tr, squares_T in latents
        ]
        self._carried = None if carried is None else [self._keep(z_gTr) for z_gTr in carried]

    def hold(self, tensor: torch.Tensor) -> torch.Tensor | Held:
        """Another input of the segment: the tensor itself, or, if kept on the host, what gives it as ``give`` does."""
        if self._host is None:
            return tensor
        held = _Held(tensor, _OnHost(tensor.detach(), self._copies, self._host))
        self._held.append(held)
        return held

    def give(self) -> tuple[list[Latents], list[torch.Tensor] | None]:
        """What was kept: first as it came, for the forward pass, then as gathered, once."""
        if self._given is not None:
            given, self._given = self._given, None
            return given
        self._start_ahead()
        latents: list[Latents] = [
            (kept.whole(), None if squares is None else squares.whole()) for kept, squares in self._latents
        ]
        carried = None if self._carried is None else [kept.whole() for kept in self._carried]
        if self._communicator.size > 1:  # one rank exchanges nothing
            for exchange, gathered in zip(self._exchanges, latents, strict=True):
                exchange.latents = gathered if gathered[1] is not None else None  # the statistic's gradient reads it
        self._latents, self._carried, self._exchanges = [], None, []
        return (
            [(_leaf(h_Tr), None if squares_T is None else _leaf(squares_T)) for h_Tr, squares_T in latents],
            None if carried is None else [_leaf(z_gTr) for z_gTr in carried],
        )

    def _keep(self, latent: torch.Tensor) -> "_Kept":
        latent = latent.detach()
        return self._store(latent) if self._communicator.size == 1 else _Slice(latent, self._communicator, self._store)

    def _keep_statistic(self, squares_T: torch.Tensor) -> "_Kept":
        squares_T = squares_T.detach()
        return self._store(squares_T if self._communicator.size == 1 else squares_T.clone())  # it came with latents

    def _store(self, tensor: torch.Tensor) -> "_Kept":
        return _OnDevice(tensor) if self._host is None else _OnHost(tensor, self._copies, self._host)

    def _start_ahead(self) -> None:
        """Gather this segment and those of a block ahead; fetch another block's, so that it is there when gathered."""
        gathered = 1 + _AHEAD
        for number, segment in zip(range(gathered + _AHEAD), self._from_here(), strict=False):
            for kept in segment._all():
                if number < gathered or self._communicator.size > 1:
                    kept.fetch()
                if number < gathered:
                    kept.start()

    def _from_here(self) -> "Iterator[SlicedLatents]":
        """This segment, and those before it."""
        segment: SlicedLatents | None = self
        while segment is not None:
            yield segment
            segment = segment._before

    def _all(self) -> "Iterator[_Kept]":
        for kept, squares in self._latents:
            yield kept
            if squares is not None:
                yield squares
        yield from self._carried or ()
        yield from (held.kept for held in self._held)


class _Kept(Protocol):
    """A tensor until it is wanted again."""

    def fetch(self) -> None:
        """Start to copy what is kept to the device, if that is not under way."""

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


class _Held(Held):
    """The ``Held`` of a tensor."""

    def __init__(self, tensor: torch.Tensor, kept: _Kept) -> None:
        self._given: torch.Tensor | None = tensor
        self.kept = kept

    def give_held(self) -> torch.Tensor:
        """The tensor as it came, for the forward pass, and then as it was kept, once."""
        if self._given is not None:
            given, self._given = self._given, None
            return given
        return _leaf(self.kept.whole())


class _Slice:
    """This rank's slice of a tensor that all ranks have."""

    def __init__(self, whole: torch.Tensor, communicator: Communicator, keep: Callable[[torch.Tensor], _Kept]) -> None:
        self._communicator = communicator
        # Projections may stand side by side, ``[T, g, r]``, and be seen as ``[g, T, r]``.
        self._turned = not whole.is_contiguous()
        ordered = whole.transpose(0, 1) if self._turned else whole
        if not ordered.is_contiguous():
            raise AssertionError(f"latents of shape {tuple(whole.shape)} have gaps between them")
        self._shape = ordered.shape
        self._own = keep(ordered.flatten().chunk(communicator.size)[communicator.rank].clone())
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


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    """A leaf for autograd: the recomputation must save for its nodes what the forward pass saved."""
    return tensor.detach().requires_grad_()
