"""All-reduces in a live group, from small to large, and the α + n/β fitted to them."""

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile

import torch
import torch.distributed as dist

from boost_core.bench.results import Row
from boost_core.bench.timing import Spread, synchronize
from boost_core.config.parallelism import SymmetricMemoryConfig
from boost_core.hardware import Link
from boost_core.parallel.symmetric_memory import SymmetricMemory, connect
from boost_core.plan.collectives import fit
from boost_core.plan.measured import MeasuredLink

_WARM_CALLS = 3
_HIDDEN_BYTES = 16 << 20  # payload of the all-reduce that a product may hide


def comm_rows(device: torch.device, largest_bytes: int, repeats: int) -> tuple[Link, list[Row]]:
    """Time all-reduces over the default group, and fit the link. All its ranks call it.

    Args:
        device: Where the payloads live.
        largest_bytes: The largest payload; sizes start at 1 KiB and grow by a factor of four.
        repeats: Timed all-reduces of each size.
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
    """Return the link for a profile, with the share of an all-reduce that other work hides. All ranks call it."""
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


def symmetric_rows(
    device: torch.device, largest_bytes: int, repeats: int
) -> tuple[SymmetricMemoryConfig | None, list[Row]]:
    """Time sums through symmetric memory and all-reduces, and find the sizes up to which they are faster.

    All ranks call it.

    Args:
        device: Where the payloads live.
        largest_bytes: As for ``comm_rows``.
        repeats: As for ``comm_rows``.

    Raises:
        ValueError: Symmetric memory is not available here; the message says why.
    """
    ranks, backend = dist.get_world_size(), dist.get_backend()
    ways: dict[str, Callable[[torch.Tensor], object]] = {backend: dist.all_reduce}
    world = dist.group.WORLD
    assert world is not None
    for name, one_shot in (("one shot", largest_bytes), ("two shots", 0)):
        limits = SymmetricMemoryConfig(one_shot_bytes=one_shot, two_shot_bytes=largest_bytes)
        memory, why = connect(limits, world, device)
        if memory is None:
            raise ValueError(f"no symmetric memory: {why}")
        ways[name] = partial(_summed, memory)
    sizes, rows, found = [], [], {name: list[float]() for name in ways}
    size = 1 << 10
    while size <= largest_bytes:
        payload = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        sizes.append(size)
        for name, way in ways.items():
            seconds = _seconds(partial(way, payload), device, repeats)
            found[name].append(_agreed(statistics.median(seconds), device))
            case = f"all-reduce of {size} bytes among {ranks} ranks (by {name})"
            rows.append(Row.spread("comm", case, "time", "s", Spread.of(seconds)))
        size *= 4
    return faster_up_to(sizes, *found.values()), rows


def faster_up_to(
    sizes: Sequence[int], by_group: Sequence[float], one_shot: Sequence[float], two_shots: Sequence[float]
) -> SymmetricMemoryConfig | None:
    """Return the sizes up to which symmetric memory was always faster; ``None`` if it never was.

    Args:
        sizes: From small to large.
        by_group: Seconds of the group's own all-reduce at each size.
        one_shot: Seconds of a sum in one shot.
        two_shots: Seconds of a sum in two.
    """
    times = list(zip(sizes, by_group, one_shot, two_shots, strict=True))
    in_one = [size for size, group, one, two in takewhile(lambda each: each[2] <= min(each[1], each[3]), times)]
    rest = takewhile(lambda each: each[3] < each[1], times[len(in_one) :])
    in_two = [size for size, *_ in rest]
    largest_in_one = in_one[-1] if in_one else 0
    if not in_one and not in_two:
        return None
    return SymmetricMemoryConfig(one_shot_bytes=largest_in_one, two_shot_bytes=in_two[-1] if in_two else 0)


def _summed(memory: SymmetricMemory, payload: torch.Tensor) -> None:
    memory.start(payload).wait()


def _agreed(seconds: float, device: torch.device) -> float:
    """Return the longest time of any rank, so that all arrive at the same sizes."""
    said = torch.tensor(seconds, dtype=torch.float64, device=device)
    dist.all_reduce(said, dist.ReduceOp.MAX)
    return said.item()


def hidden_share(one: float, other: float, both: float) -> float:
    """Return the share of the shorter of two times that is saved when both run at once: from 0 to 1."""
    return min(1.0, max(0.0, (one + other - both) / min(one, other)))


def _seconds(call: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Return the wall time of each call, starting when all ranks are ready."""
    seconds = []
    for _ in range(_WARM_CALLS + repeats):
        dist.barrier()
        synchronize(device)
        started = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return seconds[_WARM_CALLS:]
