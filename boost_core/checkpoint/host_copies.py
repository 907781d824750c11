"""Copies of a rank's state in the host's memory.

On a GPU, copies are made on a separate stream, after all work queued at the time of the request. The next step proceeds
meanwhile, up to its update, which waits for the copies on the device, since only updates change the state.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from boost_core.checkpoint.chunks import Chunk
from boost_core.parallel.locked_memory import page_locked_like


class HostCopies:
    """Makes copies in several buffers, so that one copy stays intact while others are made.

    Args:
        places: Number of buffers; each is as large as the rank's state.
        is_held: Whether someone still reads a copy in the buffer to be used next. If so, a new buffer is allocated.
    """

    def __init__(self, places: int, is_held: Callable[[torch.Tensor], bool] = lambda _: False) -> None:
        self._is_held = is_held
        self._places: list[list[torch.Tensor]] = [[] for _ in range(places)]
        self._turn = 0
        self._stream: torch.cuda.Stream | None = None
        self._made: torch.cuda.Event | None = None  # the newest copy

    def prepare(self, chunks: Sequence[Chunk]) -> None:
        """Allocate memory for the next copy now if that is slow, as for a GPU's copies, which are page-locked."""
        if not self._places[self._turn] and _on_gpu(chunks):
            self._places[self._turn] = _memory_for(chunks)

    def take(self, chunks: Sequence[Chunk], lasting: bool = False) -> list[Chunk]:
        """Copy chunks; from a GPU, read copies only after ``wait`` and change the state only after ``before_update``.

        Args:
            chunks: The chunks, the same ones every time.
            lasting: Whether the next copy goes to the next buffer, in turn; otherwise it overwrites this one.
        """
        if self._places[self._turn] and self._is_held(self._places[self._turn][0]):
            self._places[self._turn] = []
        place = self._places[self._turn]
        if lasting:
            self._turn = (self._turn + 1) % len(self._places)
        if not place:
            place += _memory_for(chunks)
        if behind := [pair for pair in zip(chunks, place, strict=True) if pair[0].tensor.is_cuda]:
            self._copy_behind(behind)
        for chunk, copy in zip(chunks, place, strict=True):
            if not chunk.tensor.is_cuda:
                copy.copy_(chunk.tensor)
        return [replace(chunk, tensor=copy) for chunk, copy in zip(chunks, place, strict=True)]

    def before_update(self) -> None:
        """Make work queued from now on wait, on the device, until the newest copy has been made."""
        if self._made is not None:
            torch.cuda.current_stream().wait_event(self._made)

    def wait(self) -> None:
        """Wait until the newest copy has been made. Another thread may call this before the next copy is taken."""
        if self._made is not None:
            self._made.synchronize()

    def _copy_behind(self, behind: Sequence[tuple[Chunk, torch.Tensor]]) -> None:
        if self._stream is None:
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            for chunk, copy in behind:
                copy.copy_(chunk.tensor, non_blocking=True)
                chunk.tensor.record_stream(self._stream)  # in case the state is freed before it has been copied
            self._made = torch.cuda.Event(blocking=True)  # type: ignore[no-untyped-call]
            self._made.record(self._stream)


def _on_gpu(chunks: Sequence[Chunk]) -> bool:
    return any(chunk.tensor.is_cuda for chunk in chunks)


def _memory_for(chunks: Sequence[Chunk]) -> list[torch.Tensor]:
    """Allocate a separate storage for each chunk; torch's checkpoint would copy a view again to write it."""
    of_gpu = [chunk.tensor for chunk in chunks if chunk.tensor.is_cuda]
    locked = iter(page_locked_like(of_gpu) if of_gpu else ())
    return [next(locked) if chunk.tensor.is_cuda else torch.empty_like(chunk.tensor) for chunk in chunks]
