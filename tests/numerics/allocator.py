"""What torch's own allocator has given out on the CPU, by its own count.

Torch's profiler reports the allocator's running total at each allocation of the threads it watches. Without the flag
below that total leaves out what other threads free, such as those of gloo.
"""

import ctypes
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch._C._profiler import _EventType
from torch.profiler import ProfilerActivity, profile

Result = TypeVar("Result")

_allocator = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
ctypes.c_bool.in_dll(_allocator, "FLAGS_caffe2_report_cpu_memory_usage").value = True


def allocated(work: Callable[[], Result]) -> tuple[Result, int, int]:
    """Run something.

    Returns:
        Its result, and of what it has allocated the bytes that are left with the result, and the most at a time.
    """
    gc.collect()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        probe = torch.empty(1)
        result = work()
        gc.collect()
        del probe
    totals = [total for _, total in sorted(_totals(profiler.profiler.kineto_results.experimental_event_tree()))]
    return result, totals[-1] - totals[0] + 4, max(totals) - totals[0]


def _totals(events: Any) -> Iterator[tuple[int, int]]:
    """Time and running total of each allocation."""
    for event in events:
        if event.typed[0] == _EventType.Allocation:
            yield event.start_time_ns, event.typed[1].total_allocated
        else:
            yield from _totals(event.children)
