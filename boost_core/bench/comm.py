"""All-reduces of a live group, from small to large, and the α + n/β that they follow."""

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from boost_core.bench.results import Row
from boost_core.bench.timing import Spread, synchronize
from boost_core.hardware import Link
from boost_core.plan.collectives import fit
from boost_core.plan.measured import MeasuredLink

_WARM_CALLS = 3
_HIDDEN_BYTES = 16 << 20  # of the all-reduce that a product may hide


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
        payload = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        seconds = _seconds(partial(dist.all_reduce, payload), device, repeats)
        sizes.append(size)
        medians.append(statistics.median(seconds))
        case = f"all-reduce of {size} bytes among {ranks} ranks ({dist.get_backend()})"
        rows.append(Row.spread("comm", case, "time", "s", Spread.of(seconds)))
        size *= 4
    link, case = fit(ranks, sizes, medians), f"all-reduce among {ranks} ranks ({dist.get_backend()})"
    rows.append(Row.single("comm", case, "fitted α", "s", link.base_seconds))
    rows.append(Row.single("comm", case, "fitted β", "bytes/s", link.bytes_per_second))
    return link, rows


def measured_link(device: torch.device, link: Link, repeats: int) -> MeasuredLink:
    """The link as a profile has it, with what of an all-reduce other work hides. All ranks call it."""
    width = 4096 if device.type == "cuda" else 512
    matrix = torch.randn(width, width, device=device)
    payload = torch.zeros(_HIDDEN_BYTES // 4, device=device)

    def product() -> None:
        torch.mm(matrix, matrix)

    def both() -> None:
        sent = dist.all_reduce(payload, async_op=True)
        product()
        sent.wait()

    calls = product, partial(dist.all_reduce, payload), both
    overlap = hidden_share(*(min(_seconds(call, device, repeats)) for call in calls))
    return MeasuredLink(
        ranks=dist.get_world_size(), base_seconds=link.base_seconds, bytes_per_second=link.bytes_per_second,
        overlap=overlap,
    )  # fmt: skip


def hidden_share(one: float, other: float, both: float) -> float:
    """Of the shorter of two times, the share that is saved where both go on at once: from 0 to 1."""
    return min(1.0, max(0.0, (one + other - both) / min(one, other)))


def _seconds(call: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Wall time of each call after all ranks have come together."""
    seconds = []
    for _ in range(_WARM_CALLS + repeats):
        dist.barrier()
        synchronize(device)
        started = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return seconds[_WARM_CALLS:]
