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

With ``parallelism.split_micro_batch``, the halves of a micro-batch go through the blocks as two coroutines of the same
code. Where one awaits an exchange, the other goes on to its own next exchange. If blocks recompute nothing, halves of
the tokens do so without autograd, and a third coroutine, with all tokens, records what they have computed
(``kernels.launch.Part``): one backward pass for both, in which weight gradients hide the exchange.

Shape suffixes: T tokens, r latents; g projections.
"""

from collections.abc import Callable, Coroutine, Generator, Sequence
from dataclasses import dataclass, field
from functools import partial
from types import coroutine
from typing import Any, TypeVar

import torch
from torch.utils.checkpoint import checkpoint

from boost_core.config.parallelism import ModeTraits
from boost_core.kernels.launch import Part
from boost_core.parallel.activation_offload import HostCopy, HostMemory, shared_copy
from boost_core.parallel.btp import BottleneckTensorParallel, Exchanged, PartialLatents
from boost_core.parallel.communicator import Communicator, Pending

Result = TypeVar("Result")

PURPOSE = "kept latent"
_AHEAD = 4  # segments of a block that have latents as inputs

# The latents that cross into a segment from the previous block.
Crossing = list[torch.Tensor] | None


def recomputed(work: Callable[..., Result], *arguments: Any) -> Result:
    """Call a function; autograd saves only its arguments, and calls it again for the rest."""
    result: Result = checkpoint(work, *arguments, use_reentrant=False, preserve_rng_state=False)
    return result


@coroutine
def end_turn() -> Generator[None, None, None]:
    """Let the other computations go on; to be awaited."""
    yield


@coroutine
def without_grad(computation: Coroutine[None, None, Result]) -> Generator[None, None, Result]:
    """Run a computation without autograd, which the others have between its turns; to be awaited."""
    try:
        while True:
            with torch.no_grad():
                try:
                    computation.send(None)
                except StopIteration as end:
                    result: Result = end.value
                    return result
            yield
    finally:
        computation.close()


def run_in_turns(computations: Sequence[Coroutine[None, None, Result]]) -> list[Result]:
    """Run computations in turns, each to its next exchange, and return their results."""
    results: dict[int, Result] = {}
    try:
        while len(results) < len(computations):
            for index, computation in enumerate(computations):
                if index not in results:
                    try:
                        computation.send(None)
                    except StopIteration as end:
                        results[index] = end.value
    finally:
        for computation in computations:
            computation.close()
    return [results[index] for index in range(len(computations))]


class Segments:
    """Runs the segments of one block's forward pass, and the exchanges between them.

    Args:
        traits: What the block saves.
        strategy: Its strategy, of which blocks that save slices use the group and the host's memory.
        crosses: Whether latents of the previous block cross into this one.
        lookahead: The forward pass's.
        exchanges_keys: Whether keys are exchanged. Only that then ends a turn: the keys have a whole block's
            computation of the other half to hide behind, of which each exchange of latents would end a part.

    Attributes:
        lookahead: As given.
    """

    def __init__(
        self, traits: ModeTraits, strategy: BottleneckTensorParallel, crosses: bool, lookahead: "Lookahead",
        exchanges_keys: bool,
    ) -> None:  # fmt: skip
        self._recomputes, self._on_host = traits.again == "segments", traits.on_host
        self._slices = traits.slices and torch.is_grad_enabled()
        self._strategy, self._crosses, self.lookahead = strategy, crosses, lookahead
        self._exchanges_keys = exchanges_keys
        self._saved: SlicedLatents | None = None  # of the segment behind the next exchange

    def _begin(self) -> None:
        """Save the next segment's inputs where no rank's device has them whole, unless autograd saves them."""
        ranks = self._strategy.communicator
        if self._slices and self._saved is None and (self._on_host or ranks.size > 1):
            self._saved = SlicedLatents(ranks, self.lookahead, self._strategy.host if self._on_host else None)

    def first(self, work: Callable[..., Result], *inputs: torch.Tensor | None) -> Result:
        """Run the segment in front of the first exchange."""
        self._begin()
        if self._saved is not None:
            give = self._saved.save_others(*inputs)
            return recomputed(lambda: work(*give()))
        return recomputed(work, *inputs) if self._recomputes else work(*inputs)

    async def exchange(
        self, start: Callable[[list[PartialLatents]], Callable[[], Result]], partials: list[PartialLatents]
    ) -> Result:
        """Start the exchange of latents, which ends what is recomputed, and wait for it."""
        self._begin()
        wait = start(partials)
        if self.lookahead.overlapped and not self._exchanges_keys:
            await end_turn()
        return wait()

    def __call__(
        self, work: Callable[..., Result], exchanged: list[Exchanged], carried: Crossing, *others: torch.Tensor
    ) -> Result:
        """Run the segment behind an exchange: ``work`` of its results, of what crosses into it, and of other inputs."""
        saved, self._saved = self._saved, None
        if saved is not None:
            saved.save(exchanged, carried if self._crosses else None)
            give = saved.save_others(*others)
            return recomputed(lambda: work(*saved.give(), *give()))
        inputs = exchanged, carried, *others
        return recomputed(work, *inputs) if self._recomputes else work(*inputs)


@dataclass
class Lookahead:
    """One forward pass through several blocks, whose segments the backward pass gathers ahead.

    Attributes:
        overlapped: Whether another forward pass goes on at its exchanges (``run_in_turns``).
        part: The part of the tokens that go through, where two halves of them do so for one backward pass.
        last: The newest segment that saves its latents in slices.
        copies: Its copies on the host.
    """

    overlapped: bool = False
    part: Part | None = None
    last: "SlicedLatents | None" = None
    copies: list[HostCopy] = field(default_factory=list)


class SlicedLatents:
    """The inputs of one segment, of which no rank's device has the latents whole.

    Args:
        communicator: The tensor parallel group, of several ranks unless ``host`` is given.
        lookahead: The forward pass's; this becomes its newest segment.
        host: Where tensors are saved; ``None`` for the device.
    """

    def __init__(self, communicator: Communicator, lookahead: Lookahead, host: HostMemory | None = None) -> None:
        self._communicator, self._host, self._copies = communicator, host, lookahead.copies
        self._before, lookahead.last = lookahead.last, self
        self._original: tuple[list[Exchanged], Crossing] | None = None
        self._latents: list[tuple[_Saved, _Saved | None]] = []
        self._carried: list[_Saved] | None = None
        self._others: list[_Saved] = []
        if host is not None:
            host.segment()

    def save(self, exchanged: list[Exchanged], carried: Crossing) -> None:
        """Save a slice of the exchanges' results, in order, and of what crosses into the segment."""
        self._original = exchanged, carried
        ranks = self._communicator if self._communicator.size > 1 else None
        for (h_Tr, squares_T), _ in exchanged:
            squares = None
            if squares_T is not None:  # among several ranks it came in one piece of memory with the latents
                squares_T = squares_T.detach() if ranks is None else squares_T.detach().clone()
                squares = _Saved(squares_T, self._copies, self._host, None)
            self._latents.append((_Saved(h_Tr.detach(), self._copies, self._host, ranks), squares))
        if carried is not None:
            self._carried = [_Saved(z_gTr.detach(), self._copies, self._host, ranks) for z_gTr in carried]

    def save_others(self, *tensors: torch.Tensor | None) -> Callable[[], list[torch.Tensor | None]]:
        """Save other inputs of the segment, or of the one in front of its exchange.

        Returns:
            A function that returns them: for the forward pass as they came, and then, once, as they were saved.
        """
        if self._host is None:
            return partial(list, tensors)
        saved = [None if each is None else _Saved(each.detach(), self._copies, self._host, None) for each in tensors]
        self._others += [each for each in saved if each is not None]
        original = [tensors]

        def give() -> list[torch.Tensor | None]:  # does not refer to this object, which refers to what is saved
            return list(original.pop()) if original else [None if each is None else each.whole() for each in saved]

        return give

    def give(self) -> tuple[list[Exchanged], Crossing]:
        """What was saved: for the forward pass as it came, and then, once, as gathered."""
        if self._original is not None:
            original, self._original = self._original, None
            return original

        # Gather this segment and those of a block ahead; fetch another block's, so that it is there when gathered.
        several = self._communicator.size > 1
        segment: SlicedLatents | None = self
        for number in range(1 + _AHEAD + _AHEAD):
            if segment is None:
                break
            gathers = number < 1 + _AHEAD
            of_exchanges = (each for both in segment._latents for each in both if each is not None)
            for saved in (*of_exchanges, *(segment._carried or ()), *segment._others):
                if (gathers or several) and isinstance(saved.place, HostCopy):
                    saved.place.fetch()
                if gathers:
                    saved.start()
            segment = segment._before

        exchanged: list[Exchanged] = [
            ((saved.whole(), None if squares is None else squares.whole()), None) for saved, squares in self._latents
        ]
        carried = None if self._carried is None else [saved.whole() for saved in self._carried]
        self._latents, self._carried = [], None
        return exchanged, carried


class _Saved:
    """A tensor until the backward pass needs it: on the device or on the host, whole or this rank's slice of it.

    Args:
        tensor: The tensor.
        copies: Copies on the host, of which one may be of the same memory.
        host: Where it is copied to; ``None`` to save it on the device.
        ranks: The ranks of which each saves a slice; ``None`` to save the whole.

    Attributes:
        place: What is saved, until it is returned.
    """

    def __init__(
        self, tensor: torch.Tensor, copies: list[HostCopy], host: HostMemory | None, ranks: Communicator | None
    ) -> None:
        # Projections may stand side by side, ``[T, g, r]``, and be seen as ``[g, T, r]``.
        self._turned = not tensor.is_contiguous() and (host is not None or ranks is not None)
        ordered = tensor.transpose(0, 1) if self._turned else tensor
        self._shape, self._ranks = ordered.shape, ranks
        if ranks is not None:
            if not ordered.is_contiguous():
                raise AssertionError(f"latents of shape {tuple(tensor.shape)} have gaps between them")
            ordered = ordered.flatten().chunk(ranks.size)[ranks.rank].clone()
        self.place: torch.Tensor | HostCopy | None = ordered if host is None else shared_copy(copies, ordered, host)
        self._gather: tuple[Pending, torch.Tensor, torch.Tensor] | None = None

    def start(self) -> None:
        """Start to gather the whole tensor from the ranks' slices, if that is not under way."""
        if self._ranks is not None and self._gather is None:
            local = self._take()
            gathered = local.new_empty(self._shape)
            self._gather = self._ranks.start_all_gather(gathered.view(-1), local, PURPOSE), gathered, local

    def whole(self) -> torch.Tensor:
        """The tensor, once, laid out in memory as it was.

        A leaf for autograd: the recomputation must save for its nodes what the forward pass saved.
        """
        if self._ranks is None:
            tensor = self._take()
        else:
            if self._gather is None:
                raise AssertionError("its gather was not started")
            (pending, tensor, _), self._gather = self._gather, None
            pending.wait()
        return (tensor.transpose(0, 1) if self._turned else tensor).detach().requires_grad_()

    def _take(self) -> torch.Tensor:
        place, self.place = self.place, None
        if place is None:
            raise AssertionError("it was returned already")
        return place.take() if isinstance(place, HostCopy) else place
