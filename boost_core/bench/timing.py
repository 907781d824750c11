"""Times of repeated calls, and a device's peak rates."""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

_AHEAD_CYCLES = 2_000_000  # about a millisecond of a GPU's clock, in which the CPU enqueues the timed work
_FLUSHED_BYTES = 256 << 20  # more than any GPU's last-level cache holds


@dataclass(frozen=True)
class Spread:
    """Percentiles of repeated measurements."""

    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, values: list[float]) -> "Spread":
        """Compute the percentiles of two or more values."""
        p20, _, _, p80 = statistics.quantiles(values, n=5, method="inclusive")
        return cls(p20, statistics.median(values), p80)


def wall_seconds(call: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Return the wall time of each of ``repeats`` calls, the device's work included, after one warm-up call."""
    seconds = []
    for _ in range(repeats + 1):
        synchronize(device)
        started = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return seconds[1:]


def kernel_seconds(call: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Like ``wall_seconds``, but on a GPU without the time in which it waits for the CPU to enqueue work.

    The GPU is kept busy while the CPU enqueues a call, and its caches hold nothing of the previous call.
    """
    if device.type != "cuda":
        return wall_seconds(call, device, repeats)
    flushed = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device=device)
    marks = []
    call()
    for _ in range(repeats):
        torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        flushed.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        marks.append((begin, end))
    synchronize(device)
    return [begin.elapsed_time(end) / 1000 for begin, end in marks]


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all enqueued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def memory_bandwidth(device: torch.device) -> float:
    """Return the bytes per second of a large copy, counting reads and writes."""
    source = torch.empty(_FLUSHED_BYTES, dtype=torch.int8, device=device).zero_()
    target = torch.empty_like(source)
    seconds = kernel_seconds(lambda: target.copy_(source), device, repeats=10)
    return 2 * source.numel() / statistics.median(seconds)


def matrix_rate(dtype: torch.dtype, device: torch.device) -> float:
    """Return the FLOPs per second of a large square matrix product."""
    width = 8192 if device.type == "cuda" else 512
    left, right = (torch.randn(width, width, device=device).to(dtype) for _ in range(2))
    return 2 * width**3 / statistics.median(kernel_seconds(lambda: left @ right, device, repeats=10))
