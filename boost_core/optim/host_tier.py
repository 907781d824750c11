"""Masters and moments in the host's memory, and how they get to the device to be updated.

The update itself runs on the device, chunk by chunk: a chunk of the state is copied into one of two buffers, updated
there, and copied back. So nothing is computed differently, and results are bit-identical with and without it. (Like
``offload_optimizer`` of DeepSpeed and ProTrain, arXiv 2406.08334, except that these update on the host's cores.)

On a GPU copies use two streams of their own, one for each direction, so that the next chunk arrives while the previous
one returns.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from boost_core.optim.flat import BLOCK
from boost_core.parallel.locked_memory import page_locked_like

_SLOTS = 2


def host_zeros(number: int, elements: int, dtype: torch.dtype, device: torch.device) -> list[torch.Tensor]:
    """Return ``number`` flat tensors in the host's memory; for a GPU page-locked, so that copies need no other."""
    if device.type != "cuda":
        return [torch.zeros(elements, dtype=dtype) for _ in range(number)]
    like = torch.empty(elements, dtype=dtype, device="meta")
    return [tensor.zero_() for tensor in page_locked_like([like] * number)]


@dataclass(frozen=True)
class HostTier:
    """The tail of one group's flat state, which is in the host's memory.

    Attributes:
        begin: Where it begins in the group's state.
        state: Its quantities by name.
    """

    begin: int
    state: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Staged:
    """Some of the state in a buffer on the device.

    Attributes:
        tensors: One flat tensor per quantity, its parts one after the other; may be read and written.
        origins: The parts of each.
        ready: Event for the end of the copies; ``None`` where copies are made at once.
    """

    tensors: list[torch.Tensor]
    origins: Sequence[Sequence[torch.Tensor]]
    ready: torch.cuda.Event | None


class Staging:
    """Two buffers on the device, each for one chunk; all groups of an optimizer share them.

    Args:
        device: The device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._elements, self._turn = device, 0, 0
        self._slots: list[torch.Tensor] = []
        on_gpu = device.type == "cuda"
        self._incoming = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._outgoing = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    def reserve(self, elements: int) -> None:
        """Make each buffer at least this large; before the first chunk is loaded."""
        if self._slots:
            raise AssertionError("the buffers are there already")
        self._elements = max(self._elements, elements)

    def load(self, origins: Sequence[Sequence[torch.Tensor]]) -> Staged:
        """Start copying parts of the state into the next buffer; what was in it must have been stored.

        Args:
            origins: For each quantity its parts, any of which may be on the device.
        """
        if not self._slots:
            dtype = origins[0][0].dtype
            self._slots = [torch.empty(self._elements, dtype=dtype, device=self._device) for _ in range(_SLOTS)]
        slot = self._slots[self._turn]
        self._turn = (self._turn + 1) % _SLOTS
        sizes = [sum(part.numel() for part in parts) for parts in origins]
        begins = [0, *accumulate(-(-size // BLOCK) * BLOCK for size in sizes)]
        tensors = [slot[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)]
        if self._incoming is None or self._outgoing is None:
            _copy_in(tensors, origins)
            return Staged(tensors, origins, None)
        # After everything that used this buffer, and after the last writes to the origins.
        self._incoming.wait_stream(torch.cuda.current_stream())
        self._incoming.wait_stream(self._outgoing)
        with torch.cuda.stream(self._incoming):
            _copy_in(tensors, origins)
            ready = torch.cuda.Event()  # type: ignore[no-untyped-call]
            ready.record(self._incoming)
        return Staged(tensors, origins, ready)

    def use(self, staged: Staged) -> list[torch.Tensor]:
        """Return its tensors, for work enqueued from now on."""
        if staged.ready is not None:
            torch.cuda.current_stream().wait_event(staged.ready)
        return staged.tensors

    def store(self, staged: Staged) -> None:
        """Copy it back to its origins, after all enqueued work; to the host concurrently with what is enqueued next."""
        _copy_out(staged, to_host=False)
        if self._outgoing is None:
            _copy_out(staged, to_host=True)
            return
        self._outgoing.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._outgoing):
            _copy_out(staged, to_host=True)

    def wait(self) -> None:
        """Return when no copy is in flight, so that the host may read and write its part of the state."""
        if self._incoming is not None and self._outgoing is not None:
            self._incoming.synchronize()
            self._outgoing.synchronize()


def _copy_in(tensors: Sequence[torch.Tensor], origins: Sequence[Sequence[torch.Tensor]]) -> None:
    for here, part in _pairs(tensors, origins):
        here.copy_(part, non_blocking=True)


def _copy_out(staged: Staged, to_host: bool) -> None:
    for here, part in _pairs(staged.tensors, staged.origins):
        if part.is_cpu == to_host:
            part.copy_(here, non_blocking=True)


def _pairs(
    tensors: Sequence[torch.Tensor], origins: Sequence[Sequence[torch.Tensor]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield each part, and its place in the buffer."""
    for tensor, parts in zip(tensors, origins, strict=True):
        begin = 0
        for part in parts:
            yield tensor[begin : begin + len(part)], part
            begin += len(part)
