"""All-reduces through symmetric memory: one buffer on each rank of a group, which all ranks read and write.

A rank copies its payload into its own buffer, and kernels on all ranks sum there (``kernels.symmetric_sum``): small
payloads in one shot, larger ones in two. They are queued on a stream of their own, so that other work can run meanwhile
and one exchange ends before the next begins. Everything is captured in CUDA graphs like other kernels: addresses stay
the same, and the counter of meetings is on the device.

It needs GPUs of one host that reach each other's memory, and processes that see all of them under the same numbers.
"""

import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
import torch.distributed as dist

from boost_core.config.parallelism import SymmetricMemoryConfig
from boost_core.kernels.latent_epilogue import Epilogue
from boost_core.kernels.symmetric_sum import Peers, meet, spread_sum, sum_of_latents, symmetric_sum

SENT = (torch.float32, torch.bfloat16, torch.float16)
_ALIGNMENT = 128  # elements, so that the parts of two shots begin where accesses of 16 bytes do
_PATIENCE = timedelta(minutes=30)  # as torch has by default for gloo

_live: "WeakSet[SymmetricMemory]" = WeakSet()


class SymmetricMemory:
    """The symmetric memory of one group.

    Args:
        handle: What torch's rendezvous returns, for memory that all ranks of the group have allocated alike. It has the
            beginning of each rank's buffer (``get_buffer``) and of its signals, initially 0 (``get_signal_pad``).
        memory: This rank's own memory, kept alive by this object.
        limits: The largest messages exchanged through it, which is also the buffers' size.
        device: Where this rank computes.
        patience: How long a rank on CPU waits for the others; on a GPU, until ``abort_all``.

    Attributes:
        aborted: Nonzero to stop waiting for other ranks.
    """

    def __init__(
        self, handle: Any, memory: torch.Tensor, limits: SymmetricMemoryConfig, device: torch.device,
        patience: timedelta = _PATIENCE,
    ) -> None:  # fmt: skip
        self._handle, self._memory = handle, memory
        self._limits, self._seconds = limits, patience.total_seconds()
        self._rank, self._size = handle.rank, handle.world_size
        peers = range(self._size)
        self._signals = Peers.of([handle.get_signal_pad(peer, (self._size,), torch.int32) for peer in peers])
        self._buffers = {
            dtype: Peers.of([handle.get_buffer(peer, (limits.largest // dtype.itemsize,), dtype) for peer in peers])
            for dtype in SENT
        }
        self._met = torch.zeros(1, dtype=torch.int32, device=device)
        on_gpu = device.type == "cuda"
        self.aborted = torch.zeros(1, dtype=torch.int32, pin_memory=on_gpu)
        self._stream = torch.cuda.Stream(device, priority=-1) if on_gpu else None  # type: ignore[no-untyped-call]
        _live.add(self)

    def takes(self, payload: torch.Tensor) -> bool:
        """Whether ``payload`` is summed here: the same on all ranks, as its size and type are."""
        return payload.nbytes <= self._limits.largest and payload.dtype in SENT and payload.is_contiguous()

    def start(self, payload: torch.Tensor, epilogue: Epilogue | None = None) -> "Summing":
        """Start to sum ``payload`` in place over the ranks.

        Args:
            payload: A tensor for which ``takes`` returns true.
            epilogue: What to compute from the sum, if anything; gets its result, to be read after ``wait``.

        Raises:
            DistError: Another rank does not arrive; only on CPU.
        """
        sent_n, buffers = payload.view(-1), self._buffers[payload.dtype]
        size, in_one_shot = len(sent_n), payload.nbytes <= self._limits.one_shot_bytes
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # which ``None`` leaves as it is
            # What this allocates is freed once the caller's stream has used it, and the next exchange waits for that.
            buffers.memory[self._rank][:size].copy_(sent_n)
            self._meet()
            if not in_one_shot:
                spread_sum(buffers, *part_of(size, self._rank, self._size))
                self._meet()
                own = slice(self._rank, self._rank + 1)
                buffers = Peers(buffers.memory[own], buffers.address_p[own])
            if epilogue is None:
                symmetric_sum(buffers, sent_n)
            else:
                epilogue.result = sum_of_latents(buffers, sent_n, epilogue)
            if in_one_shot:  # nobody may write until all have read; after two shots each reads only its own
                self._meet()
            return Summing(None if self._stream is None else self._stream.record_event())

    def _meet(self) -> None:
        try:
            meet(self._signals, self._rank, self._met, self.aborted, self._seconds)
        except TimeoutError as error:
            raise dist.DistError(str(error)) from error


class Summing(NamedTuple):
    """A sum under way.

    Attributes:
        done: Recorded after it; ``None`` if it is done.
    """

    done: torch.cuda.Event | None

    def wait(self) -> None:
        """Have the current stream wait for it."""
        if self.done is not None:
            torch.cuda.current_stream().wait_event(self.done)


def part_of(size: int, rank: int, ranks: int) -> tuple[int, int]:
    """Where a rank's part of ``size`` elements begins and ends; the last ranks' parts may be smaller, or empty."""
    each = -(-size // (ranks * _ALIGNMENT)) * _ALIGNMENT
    return min(rank * each, size), min((rank + 1) * each, size)


def abort_all() -> None:
    """Stop waiting for other ranks anywhere in this process; from any thread, without calling CUDA.

    Sums are meaningless from then on.
    """
    for each in list(_live):
        each.aborted.fill_(1)


class View(NamedTuple):
    """What one rank of a group sees.

    Attributes:
        host: The host it is on.
        visible: The GPUs that it sees, by UUID.
        device: The number of its own GPU among them.
        reached: The numbers of the GPUs whose memory it reaches.
        rendezvous: Number of rendezvous in its process so far. Torch counts them in each process, and ranks with
            different counts, such as a process that replaces a lost one, would not find each other.
    """

    host: str
    visible: tuple[str, ...]
    device: int
    reached: tuple[int, ...]
    rendezvous: int


def obstacle(views: Sequence[View]) -> str | None:
    """Why ranks cannot have symmetric memory, for people; ``None`` if nothing speaks against it."""
    if len({view.host for view in views}) > 1:
        return "a tensor parallel group is on several hosts"
    if len({view.visible for view in views}) > 1:
        return "ranks of a tensor parallel group see different GPUs, or in another order"
    devices = {view.device for view in views}
    if len(devices) < len(views):
        return "ranks of a tensor parallel group share a GPU"
    if any(devices - {view.device} - set(view.reached) for view in views):
        return "its GPUs cannot reach each other's memory"
    if len({view.rendezvous for view in views}) > 1:
        return "a process of a tensor parallel group was replaced"
    return None


def connect(
    limits: SymmetricMemoryConfig, group: dist.ProcessGroup, device: torch.device
) -> tuple[SymmetricMemory | None, str | None]:
    """The symmetric memory of a group, or why it has none: the same on all its ranks, all of which call this."""
    global _rendezvous_so_far
    if device.type != "cuda":
        return None, "the job trains on CPU"
    numbers = range(torch.cuda.device_count())
    own = torch.cuda.current_device() if device.index is None else device.index
    uuids = tuple(str(torch.cuda.get_device_properties(number).uuid) for number in numbers)
    reached = tuple(number for number in numbers if number != own and torch.cuda.can_device_access_peer(own, number))
    view = View(socket.gethostname(), uuids, own, reached, _rendezvous_so_far)
    views: list[View | None] = [None] * dist.get_world_size(group)
    dist.all_gather_object(views, view, group=group)
    why = obstacle([view for view in views if view is not None])
    if why is not None:
        return None, why

    def on_all(make: Callable[[], Any]) -> tuple[Any, str | None]:
        """What this rank has made, unless any rank could not, and why: no rank waits for one that has failed."""
        made, problem = None, None
        try:
            made = make()
        except Exception as error:
            problem = str(error).partition("\n")[0]
        problems: list[str | None] = [None] * len(views)
        dist.all_gather_object(problems, problem, group=group)
        return made, next((each for each in problems if each is not None), None)

    def allocated() -> torch.Tensor:
        # Imported here because it takes a while, and few jobs use it.
        from torch._C._distributed_c10d import _SymmetricMemory

        # Not from torch's pool, which would keep the memory for the next gang, whose ranks are others.
        return _SymmetricMemory.empty_strided_p2p((limits.largest,), (1,), torch.uint8, device)

    def met() -> SymmetricMemory:
        from torch.distributed._symmetric_memory import rendezvous

        return SymmetricMemory(rendezvous(memory, group), memory, limits, device)

    memory, why = on_all(allocated)
    if why is not None:
        return None, why
    _rendezvous_so_far += 1
    symmetric, why = on_all(met)
    return (symmetric, None) if why is None else (None, why)


_rendezvous_so_far = 0  # of this process
