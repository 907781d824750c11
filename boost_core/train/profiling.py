"""Traces of a rank's steps by torch's profiler, written next to the checkpoints, in the background."""

import gc
import gzip
import logging
import shutil
import threading
import traceback
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from typing import Any

import fsspec
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.profiler import ProfilerAction, ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from boost_core.config.storage import options_at
from boost_core.messages import Fault, FaultReport, ProfileReport, Report
from boost_core.temporary import TemporaryFolder

logger = logging.getLogger(__name__)

_BLOCK_BYTES = 2**20


@dataclass(eq=False)
class StepProfiler:
    """Traces steps of this rank on request, one request after the other.

    A failure costs a trace, never a step. ``ask`` may be called from any thread, everything else from the training one.

    Attributes:
        report: Receives a ``ProfileReport`` for each stored trace, and a ``FaultReport`` for each that failed.
    """

    report: Callable[[Report], None]
    _requested: deque[int] = field(default_factory=deque)
    _trace: "_Trace | None" = None
    _writer: threading.Thread | None = None
    _rank: int = 0
    _folder: str = ""

    def begin(self, rank: int, folder: str) -> None:
        """Join a gang as a rank whose traces go into a folder: a path, ``file://`` or ``s3://``."""
        self._rank, self._folder = rank, folder.rstrip("/")

    def ask(self, steps: int) -> None:
        """Request a trace of this many whole steps, from the next one on."""
        self._requested.append(steps)

    def after_step(self, step: int) -> None:
        """Begin or end a trace between two steps, if due."""
        trace = self._trace
        try:
            if trace is not None and trace.profile.step_num < trace.step + trace.steps:
                trace.profile.step()
            elif trace is not None:
                trace.profile.stop()
                self._trace = None
                self._writer = threading.Thread(target=self._write, args=(trace,), name="trace", daemon=True)
                self._writer.start()
            elif self._requested and (self._writer is None or not self._writer.is_alive()):
                self._trace = _Trace(self._requested.popleft(), step, self._rank, self._folder)
        except Exception as error:  # the profiler raises various types
            self._trace = None
            self._failed(self._rank, step, f"the profiler has failed: {error}")

    def wait(self, seconds: float) -> None:
        """Wait for a trace that is being written, for at most this long."""
        if self._writer is not None:
            self._writer.join(seconds)

    def end(self) -> None:
        """End with the gang: discard incomplete traces."""
        self._requested.clear()
        trace, self._trace = self._trace, None
        if trace is not None:
            with suppress(Exception):
                trace.profile.stop()
            self._failed(trace.rank, trace.step, f"its gang ended before {trace.steps} steps were done")

    def _write(self, trace: "_Trace") -> None:
        try:
            filesystem, path = fsspec.url_to_fs(trace.url, **options_at(trace.url, None))
            with TemporaryFolder("boost-trace-") as folder:
                plain, packed = folder / "trace.json", folder / "trace.json.gz"
                trace.profile.export_chrome_trace(str(plain))
                with plain.open("rb") as source, gzip.open(packed, "wb") as target:
                    shutil.copyfileobj(source, target, _BLOCK_BYTES)  # large, so that Python's lock is released
                filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
                filesystem.put_file(str(packed), path)
                size = packed.stat().st_size
        except Exception as error:  # stores raise types of their own
            logger.warning("%s cannot be written: %s", trace.url, error)
            self._failed(trace.rank, trace.step, f"{trace.url} cannot be written; the log says why")
        else:
            self.report(ProfileReport(step=trace.step, steps=trace.steps, rank=trace.rank, url=trace.url, bytes=size))

    def _failed(self, rank: int, step: int, why: str) -> None:
        message = f"there is no profile of rank {rank}: {why}"
        self.report(FaultReport(what=Fault.PROFILE, step=step, rank=rank, message=message))


class _Trace:
    """A trace, started on construction."""

    def __init__(self, steps: int, step: int, rank: int, folder: str) -> None:
        self.steps, self.step, self.rank = steps, step, rank
        self.url = f"{folder}/step-{step:08d}/rank-{rank}.json.gz"
        devices = [ProfilerActivity.CUDA] if torch.cuda.is_available() else []
        # With a schedule, it marks steps, which is how TensorBoard recognises them; this one records all of them.
        self.profile = profile(activities=[ProfilerActivity.CPU, *devices], schedule=lambda _: ProfilerAction.RECORD)
        self.profile.step_num = step + 1
        self.profile.start()


# The peak memory of a rank's training, as the plan counts it.
#
# On a GPU torch's allocator tracks it. On a CPU it keeps no such count, so storages are counted as operations create
# them; that slows each operation down, most while memory grows, and ends with the watched steps.


class PeakMemory:
    """Peak memory use of a device from now on.

    Args:
        device: The rank's device.

    Attributes:
        watched: Context manager around what is to be counted; on a GPU everything is.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._storages = _Storages() if device.type == "cpu" else None
        self.watched: AbstractContextManager[object] = self._storages or nullcontext()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)

    def bytes(self) -> int:
        """The peak so far."""
        return torch.cuda.max_memory_allocated(self._device) if self._storages is None else self._storages.peak


class _Storages(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts live storages, without keeping them alive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._sizes: dict[StorageWeakRef, int] = {}
        self._at_most = 0  # live bytes, including those freed since the last sweep
        self.peak = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        """Run the operation, and count the storages it creates."""
        result = function(*arguments, **(keywords or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                reference = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
                self._at_most += storage.nbytes() - self._sizes.get(reference, 0)
                self._sizes[reference] = storage.nbytes()
        if self._at_most > self.peak:
            self._sizes = {storage: size for storage, size in self._sizes.items() if not storage.expired()}  # type: ignore[no-untyped-call]
            self._at_most = sum(self._sizes.values())
            self.peak = max(self.peak, self._at_most)
        return result


# Python's garbage collector, run between steps.
#
# Left to itself it would run at moments that differ from rank to rank, holding up one rank in one step and another in
# the next, and with each of them all others.

FULL_EVERY_STEPS = 100


@contextmanager
def collected_between_steps() -> Iterator[Callable[[int], object]]:
    """Run the collector only when the yielded function is called, after a step with its number; on all ranks alike."""
    automatic = gc.isenabled()
    gc.disable()
    try:
        yield lambda step: gc.collect(2 if step % FULL_EVERY_STEPS == 0 else 1)
    finally:
        if automatic:
            gc.enable()


def release_broken_step(error: BaseException) -> None:
    """Drop every reference to the state, and its connections, left by a step that failed.

    The frames that the error and its causes passed through hold them, and so do ready tasks in torch's backward queue,
    which this thread's next backward pass discards.
    """
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__ or each.__context__
    torch.zeros((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
