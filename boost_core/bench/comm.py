"""Collectives among live ranks, from small to large payloads, and the α + n/β fitted to their all-reduces.

Ranks on several nodes are timed by level: those of each node, then those with the same place in each. All groups of a
level send at once, as they do in training, so what they share of a switch is in β; all-reduces are also timed with one
group alone.
"""

import math
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from itertools import takewhile
from typing import Literal, NamedTuple

import torch
import torch.distributed as dist

from boost_core.bench.results import Row, wall_seconds
from boost_core.config.parallelism import SymmetricMemoryConfig
from boost_core.hardware import Link
from boost_core.parallel.symmetric_memory import SymmetricMemory, connect
from boost_core.plan.machine import MeasuredLink
from boost_core.plan.throughput import fit

_seconds = partial(wall_seconds, warm_calls=3, before=dist.barrier)  # all ranks start together
_HIDDEN_BYTES = 16 << 20  # payload of the all-reduce that a product may hide


class Level(NamedTuple):
    """A level of the network: the ranks of a node, or those with the same place in each node.

    Attributes:
        name: ``node`` or ``between nodes``.
        group: This rank's group.
        ranks: Number of ranks in each group.
        groups: Number of groups.
        first: Whether this rank is in the first group, which is also timed alone.
    """

    name: Literal["node", "between nodes"]
    group: dist.ProcessGroup
    ranks: int
    groups: int
    first: bool


def levels(device: torch.device) -> list[Level]:
    """Return the levels at which there are several ranks, innermost first. All ranks call it.

    Raises:
        ValueError: Nodes have different numbers of ranks.
    """
    rank, size = dist.get_rank(), dist.get_world_size()
    place = dist.get_node_local_rank(fallback_rank=rank)  # without torchrun all are on this node
    places = torch.empty(size, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(places, torch.tensor([place], device=device))
    local = int(places.max()) + 1
    if size % local or not torch.equal(places.cpu(), torch.arange(size) % local):
        raise ValueError(f"nodes have different numbers of ranks, {places.tolist()} by place: start the same on each")
    nodes = size // local
    inside, _ = dist.new_subgroups(local)  # type: ignore[no-untyped-call]
    across, _ = dist.new_subgroups_by_enumeration([list(range(each, size, local)) for each in range(local)])  # type: ignore[no-untyped-call]
    both = [Level("node", inside, local, nodes, rank < local), Level("between nodes", across, nodes, local, place == 0)]
    return [level for level in both if level.ranks > 1]


def comm_rows(level: Level, device: torch.device, largest_bytes: int, repeats: int) -> tuple[Link, list[Row]]:
    """Time collectives at a level, and fit the link to all-reduces of all its groups at once. All ranks call it.

    Args:
        level: The level.
        device: Where the payloads live.
        largest_bytes: The largest payload; sizes start at 1 KiB and grow by a factor of four.
        repeats: Timed calls of each size.

    Returns:
        The link, fitted to rank 0's times on all ranks; and this rank's times.
    """
    sizes, medians, rows = [1 << power for power in range(10, largest_bytes.bit_length(), 2)], [], []
    where = "" if level.name == "node" else f", {level.name}"
    among = f"among {level.ranks} ranks ({dist.get_backend()}){where}"
    for size in sizes:
        payload = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        for name in ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "send"):
            call = partial(_run, payload, level.group, operation=name)
            seconds = _seconds(call, device, repeats)
            case = f"{name} of {size} bytes {among}"
            rows.append(Row.of(case, "time", "s", *seconds))
            if name == "all-reduce":
                median = torch.tensor(statistics.median(seconds), dtype=torch.float64, device=device)
                dist.broadcast(median, 0)  # so that all ranks arrive at the same link
                medians.append(median.item())
                if level.groups > 1:
                    alone = _seconds(call if level.first else lambda: None, device, repeats)
                    rows.append(Row.of(f"{case}, one group alone", "time", "s", *alone))
    link, case = fit(level.ranks, sizes, medians), f"all-reduce {among}"
    rows.append(Row.of(case, "fitted α", "s", link.base_seconds))
    rows.append(Row.of(case, "fitted β", "bytes/s", link.bytes_per_second))
    return link, rows


def _run(payload: torch.Tensor, group: dist.ProcessGroup, operation: str) -> None:
    """Run one of the operations; ``send`` goes from each even rank of the group to the next one."""
    own = payload[: len(payload) // group.size()]
    whole, rank = payload[: len(own) * group.size()], group.rank()
    match operation:
        case "all-reduce":
            dist.all_reduce(payload, group=group)
        case "all-gather":
            dist.all_gather_into_tensor(whole, own.clone(), group=group)
        case "reduce-scatter":
            dist.reduce_scatter_tensor(torch.empty_like(own), whole, group=group)
        case "all-to-all":
            dist.all_to_all_single(torch.empty_like(whole), whole, group=group)
        case "send" if rank % 2:
            dist.recv(payload, group=group, group_src=rank - 1)
        case "send" if rank + 1 < group.size():
            dist.send(payload, group=group, group_dst=rank + 1)


def measured_link(level: Level, device: torch.device, link: Link, repeats: int) -> MeasuredLink:
    """Return a level's link for a profile, with the share of an all-reduce that other work hides. All ranks call it.

    Raises:
        ValueError: The link has no rate, because larger all-reduces took no longer.
    """
    if not math.isfinite(link.bytes_per_second):
        raise ValueError("larger all-reduces took no longer than smaller ones: give a larger --largest")
    width = 4096 if device.type == "cuda" else 512
    matrix = torch.randn(width, width, device=device)
    payload = torch.zeros(_HIDDEN_BYTES // 4, device=device)

    def both() -> None:
        sent = dist.all_reduce(payload, group=level.group, async_op=True)
        torch.mm(matrix, matrix)
        sent.wait()

    calls = partial(torch.mm, matrix, matrix), partial(dist.all_reduce, payload, group=level.group), both
    overlap = hidden_share(*(min(_seconds(call, device, repeats)) for call in calls))
    return MeasuredLink(
        ranks=level.ranks, base_seconds=link.base_seconds, bytes_per_second=link.bytes_per_second, overlap=overlap
    )


def symmetric_rows(
    level: Level, device: torch.device, largest_bytes: int, repeats: int
) -> tuple[SymmetricMemoryConfig | None, list[Row]]:
    """Time sums through symmetric memory and all-reduces, and find the sizes up to which they are faster.

    All ranks call it.

    Args:
        level: The innermost level.
        device: Where the payloads live.
        largest_bytes: As for ``comm_rows``.
        repeats: As for ``comm_rows``.

    Raises:
        ValueError: Symmetric memory is not available on some node; the message, the same on all ranks, says why.
    """
    ranks, backend = level.ranks, dist.get_backend()
    ways: dict[str, Callable[[torch.Tensor], object]] = {backend: partial(dist.all_reduce, group=level.group)}
    for name, one_shot in (("one shot", largest_bytes), ("two shots", 0)):
        limits = SymmetricMemoryConfig(one_shot_bytes=one_shot, two_shot_bytes=largest_bytes)
        memory, why = connect(limits, level.group, device)
        reasons: list[str | None] = [None] * dist.get_world_size()
        dist.all_gather_object(reasons, why)  # another node's ranks may have one, and all meet while timing
        if memory is None or any(reasons):
            raise ValueError(f"no symmetric memory: {next(filter(None, reasons))}")

        def summed(payload: torch.Tensor, memory: SymmetricMemory = memory) -> None:
            memory.start(payload).wait()

        ways[name] = summed
    rows, longest = [], {name: list[float]() for name in ways}
    sizes = [1 << power for power in range(10, largest_bytes.bit_length(), 2)]  # from 1 KiB on, as in ``comm_rows``
    for size in sizes:
        payload = torch.zeros(size // 2, dtype=torch.bfloat16, device=device)
        for name, way in ways.items():
            seconds = _seconds(partial(way, payload), device, repeats)
            median = torch.tensor(statistics.median(seconds), dtype=torch.float64, device=device)
            dist.all_reduce(median, dist.ReduceOp.MAX)  # so that all ranks arrive at the same sizes
            longest[name].append(median.item())
            case = f"all-reduce of {size} bytes among {ranks} ranks (by {name})"
            rows.append(Row.of(case, "time", "s", *seconds))
    return faster_up_to(sizes, *longest.values()), rows


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
    in_one = [size for size, *_ in takewhile(lambda each: each[2] <= min(each[1], each[3]), times)]
    in_two = [size for size, *_ in takewhile(lambda each: each[3] < each[1], times[len(in_one) :])]
    if not in_one and not in_two:
        return None
    return SymmetricMemoryConfig(one_shot_bytes=max(in_one, default=0), two_shot_bytes=max(in_two, default=0))


def hidden_share(one: float, other: float, both: float) -> float:
    """Return the share of the shorter of two times that is saved when both run at once: from 0 to 1."""
    return min(1.0, max(0.0, (one + other - both) / min(one, other)))
