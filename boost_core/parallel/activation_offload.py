"""Tensors that blocks save for their backward pass in the host's memory: ``recompute: offload``.

A tensor to be saved is copied to the host while work continues, and its memory on the device is released
one block later: when the corresponding segment of the next block puts its own tensors there, work waits for the copies
of this one. So about one block's tensors of a rank are in transit at a time, however many micro-batches it has in
flight, and a backward pass that follows its own forward pass finds the last block's still on the device. The others
are fetched ahead of their use (``recompute``), except for the first block of a backward pass that follows another
micro-batch's forward pass.

On a GPU, copies run on two streams of their own, one for each direction, and the host's buffers are page-locked.
Buffers are kept and reused: there are as many of each size as were ever needed at once, which is what the micro-batches
in progress keep. On a CPU, copies are made at once, and all else is the same.
"""

import contextlib
import logging
import mmap
import sys
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

# Page-locked memory of exactly the sizes requested: torch's own allocator rounds each up to a power of two.

logger = logging.getLogger(__name__)

_ALIGNMENT = 256  # of each tensor, as CUDA's own memory has it


class _LockedPages(mmap.mmap):
    """Pages that the driver has locked; released with the last tensor in them."""

    address: int | None = None
    device = 0  # whose context locked them

    def __del__(self) -> None:
        if self.address is None or sys.is_finalizing():
            return
        with torch.cuda.device(self.device):  # the last tensor may go in any thread
            status = int(torch.cuda.cudart().cudaHostUnregister(self.address))  # type: ignore[no-untyped-call]
        if status != 0:
            logger.warning("CUDA does not release locked memory of the host (error %d)", status)


def page_locked_like(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """An uninitialised tensor on the host for each, each with its own storage, in memory locked at once.

    If the driver does not lock that much at once, torch locks it piece by piece.
    """
    places = [0, *accumulate(-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors)]
    size = -(-places[-1] // mmap.PAGESIZE) * mmap.PAGESIZE
    pages = _LockedPages(-1, size)
    address = torch.frombuffer(pages, dtype=torch.uint8).data_ptr()
    status = int(torch.cuda.cudart().cudaHostRegister(address, size, 0))  # type: ignore[no-untyped-call]
    if status != 0:
        with contextlib.suppress(Exception):  # the driver's error is said by the next launch, which clears it
            torch.ones(1, device="cuda")
        refusal = f"CUDA does not lock {size:,} bytes of the host's memory (error {status})"
        logger.warning("%s; torch locks it piece by piece", refusal)
        del pages  # the pieces may need their memory
        return [torch.empty_like(tensor, device="cpu", pin_memory=True) for tensor in tensors]
    pages.address, pages.device = address, torch.cuda.current_device()
    placed = zip(tensors, places, strict=False)
    return [torch.frombuffer(pages, dtype=x.dtype, count=x.numel(), offset=at).view(x.shape) for x, at in placed]


_ON_THE_WAY = 4  # segments in flight at a time: those of one block
_OUT, _BACK = 0, 1  # the ways to the host and back, each of which has its stream


def host_bytes(size: int, device: torch.device) -> torch.Tensor:
    """Allocate ``size`` bytes on the host; for a GPU in locked pages, so that copies need no staging buffer."""
    if device.type != "cuda":
        return torch.empty(size, dtype=torch.uint8)
    (locked,) = page_locked_like([torch.empty(size, dtype=torch.uint8, device="meta")])
    return locked


@dataclass(eq=False)
class HostMemory:
    """One rank's memory on the host, for all of its blocks and micro-batches.

    Attributes:
        free: Buffers for reuse, by their size.
        leaving: Copies that have memory on the device, by segment.
        streams: A GPU's streams for copies to the host and back.
    """

    free: dict[int, list["_Buffer"]] = field(default_factory=lambda: defaultdict(list))
    leaving: deque[list["HostCopy"]] = field(default_factory=deque)
    streams: dict[torch.device, tuple[torch.cuda.Stream, torch.cuda.Stream]] = field(default_factory=dict)

    def segment(self) -> None:
        """Begin another segment; wait for the copies of the segment one block before it, and release its memory."""
        self.leaving.append([])
        while len(self.leaving) > _ON_THE_WAY:
            for copy in self.leaving.popleft():
                copy.let_go()

    def put(self, tensor: torch.Tensor) -> "HostCopy":
        """Start to copy a dense tensor, which must no longer be written to."""
        free = self.free[tensor.nbytes]
        buffer = free.pop() if free else _Buffer(host_bytes(tensor.nbytes, tensor.device))
        copy = HostCopy(self, buffer, tensor)
        self.leaving[-1].append(copy)
        return copy


@dataclass(eq=False)
class _Buffer:
    """Some of the host's memory.

    Attributes:
        bytes: The memory.
        read: When the last copy from it has arrived; ``None`` where copies are made at once.
    """

    bytes: torch.Tensor
    read: torch.cuda.Event | None = None


class HostCopy:
    """A tensor on its way to the host, there, or on its way back, until all who keep it have taken it.

    Args:
        host: Whose buffer it has.
        buffer: The buffer, of the tensor's size.
        tensor: What to copy.

    Attributes:
        leaving: The tensor as long as the device has it.
        version: Counts what has been written to it.
        keepers: Number of those who will take it.
    """

    def __init__(self, host: HostMemory, buffer: _Buffer, tensor: torch.Tensor) -> None:
        self._host, self._buffer, self.keepers = host, buffer, 0
        if not tensor.is_contiguous():
            raise AssertionError(f"a tensor of shape {tuple(tensor.shape)} is not contiguous")
        self.leaving: torch.Tensor | None = tensor.detach()
        self.version = tensor._version
        self._come: torch.Tensor | None = None
        self._device, self._saved = tensor.device, buffer.bytes.view(tensor.dtype).view(tensor.shape)
        self._left = self._copied(_OUT, self._saved, self.leaving, buffer.read)
        self._ready: torch.cuda.Event | None = None

    def let_go(self) -> None:
        """Release the memory on the device unless it is being fetched back; work waits until it has been copied."""
        if self.leaving is not None:
            self._wait_for(self._left)
        self.leaving = None

    def fetch(self) -> torch.Tensor:
        """Start to copy it back, unless it is there or under way, and return where it arrives."""
        if self._come is None and self.leaving is not None:
            self._come = self.leaving
        elif self._come is None:
            self._come = torch.empty(self._saved.shape, dtype=self._saved.dtype, device=self._device)
            self._ready = self._buffer.read = self._copied(_BACK, self._come, self._saved, self._left)
        return self._come

    def take(self) -> torch.Tensor:
        """The tensor, for work queued from now on; the last keeper to take it frees the buffer."""
        come = self.fetch()
        self._wait_for(self._ready)
        self.keepers -= 1
        if self.keepers == 0:
            self._end()
        return come

    def __del__(self) -> None:
        """Free the buffer of an abandoned pass, too."""
        if self.keepers > 0 and not sys.is_finalizing():
            self._wait_for(self._ready)
            self._end()

    def _end(self) -> None:
        self.let_go()
        self._come = None
        self._host.free[len(self._buffer.bytes)].append(self._buffer)
        self.keepers = 0

    @property
    def _copies_later(self) -> bool:
        return self._device.type == "cuda"

    def _copied(
        self, way: int, target: torch.Tensor, origin: torch.Tensor, after: torch.cuda.Event | None
    ) -> torch.cuda.Event | None:
        """Copy after an event and what is queued; returns when it is done, ``None`` where copies are made at once."""
        if not self._copies_later:
            target.copy_(origin)
            return None
        streams, device = self._host.streams, self._device
        if device not in streams:
            streams[device] = torch.cuda.Stream(device), torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream = streams[device][way]
        stream.wait_stream(torch.cuda.current_stream(device))
        if after is not None:
            stream.wait_event(after)
        with torch.cuda.stream(stream):
            _copy(target, origin)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)
        return done

    def _wait_for(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self._device).wait_event(event)


def shared_copy(copies: list[HostCopy], tensor: torch.Tensor, host: HostMemory) -> HostCopy:
    """A tensor's copy, for one more keeper; one of ``copies`` as long as the device still has the tensor."""
    copies[:] = [copy for copy in copies if copy.leaving is not None]
    # The same memory in the same shape and type, not written to since.
    same = tensor.data_ptr(), tensor.shape, tensor.dtype, tensor._version
    for copy in copies:
        own = copy.leaving
        if own is not None and (own.data_ptr(), own.shape, own.dtype, copy.version) == same:
            break
    else:
        copy = host.put(tensor)
        copies.append(copy)
    copy.keepers += 1
    return copy


def _copy(target: torch.Tensor, origin: torch.Tensor) -> None:
    target.copy_(origin, non_blocking=True)
