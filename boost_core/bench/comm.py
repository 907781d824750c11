"""All-reduces of a live group, from small to large, and the α + n/β that they follow."""

import statistics
import time

import torch
import torch.distributed as dist

from boost_core.bench.results import Row
from boost_core.bench.timing import Spread, synchronize
from boost_core.hardware import Link
from boost_core.plan.collectives import fit

_WARM_CALLS = 3


def comm_rows(device: torch.device, largest_bytes: int, repeats: int) -> tuple[Link, list[Row]]:
    """Times of all-reduces over the default group, and the link that they make. All its ranks call it.

    Args:
        device: Where the payloads live.
        largest_bytes: The largest payload; from 1 KiB, each is four times the one before.
        repeats: All-reduces of each size that are timed.
    """
    ranks, sizes, medians, rows = dist.get_world_size(), [], [], []
    size = 1 << 10
    while size <= largest_bytes:
        seconds = _seconds(torch.zeros(size // 2, dtype=torch.bfloat16, device=device), repeats)
        sizes.append(size)
        medians.append(statistics.median(seconds))
        case = f"all-reduce of {size} bytes among {ranks} ranks ({dist.get_backend()})"
        rows.append(Row.spread("comm", case, "time", "s", Spread.of(seconds)))
        size *= 4
    link, case = fit(ranks, sizes, medians), f"all-reduce among {ranks} ranks ({dist.get_backend()})"
    rows.append(Row.single("comm", case, "fitted α", "s", link.base_seconds))
    rows.append(Row.single("comm", case, "fitted β", "bytes/s", link.bytes_per_second))
    return link, rows


def _seconds(payload: torch.Tensor, repeats: int) -> list[float]:
    """Wall time of each all-reduce after all ranks have come together."""
    seconds = []
    for _ in range(_WARM_CALLS + repeats):
        dist.barrier()
        synchronize(payload.device)
        started = time.perf_counter()
        dist.all_reduce(payload)
        synchronize(payload.device)
        seconds.append(time.perf_counter() - started)
    return seconds[_WARM_CALLS:]
