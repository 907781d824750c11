"""Attention over context parallel ranks, compared with one rank: ``python -m tests.benchmarks.context_attention``.

Writes docs/figures/context_attention.md. CPU ranks of one thread each over gloo. All placements take turns, so that a
busy machine slows all of them. Where there are more ranks than cores, or other work, only the time that a rank had a
core tells what it takes; seconds on the clock include waiting for one.
"""

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from boost_core.context.attention import ContextAttention
from boost_core.context.placement import Window, areas, local_tasks, place
from boost_core.context.plan import ContextPlan
from boost_core.model.attention import one_by_one
from boost_core.parallel.communicator import CommunicationLedger, Communicator
from tests.benchmarks.figures import FIGURES, write_table
from tests.benchmarks.lengths import documents_of
from tests.numerics.attended import attended
from tests.ranks import Ranks

TOKENS, CHUNK, HEADS, HEAD_SIZE, ROUNDS = 2**14, 1024, 1, 64, 3
CPU = torch.device("cpu")
CASES = (
    ("one document", Window((TOKENS,), CHUNK), 2),
    ("one document, window of 2048", Window((TOKENS,), CHUNK, 2048), 2),
    ("wlbllm's lengths", Window(documents_of("wlbllm", TOKENS, 0), CHUNK), 2),
    # Windows of which contiguous ranks have twice the mean and more.
    ("wlbllm's lengths, 7", Window(documents_of("wlbllm", 2 * TOKENS, 7), CHUNK), 4),
    ("prolong's lengths, 8", Window(documents_of("prolong", 2 * TOKENS, 8), CHUNK), 4),
)
PLACEMENTS = ("contiguous", "near")


@dataclass(frozen=True)
class Measured:
    """Forward and backward on one rank: seconds, seconds on the core, seconds waited for exchanges, bytes sent."""

    wall: float
    core: float
    exposed: float = 0.0
    sent: int = 0


def planned(window: Window, how: str, ranks: int) -> ContextPlan:
    placement = place(window, ranks, how)
    return ContextPlan(window, ranks, placement, local_tasks(window, placement), 2)


def measure(window: Window) -> dict[str, Measured]:
    """A round of this rank: of one rank that has all, and of each placement."""
    ledger = CommunicationLedger()
    communicator = Communicator(dist.group.WORLD, "cp", ledger)
    begin_n = torch.tensor([0, *window.documents]).cumsum(0).to(torch.int32)
    found = {}
    if communicator.rank == 0:
        found["alone"] = timed(partial(one_by_one, begin_n=begin_n, window=window.sees), window.tokens, ledger)
    for how in PLACEMENTS:
        ranks = dist.get_world_size()
        attention = ContextAttention(planned(window, how, ranks), communicator, CPU)
        dist.barrier()
        found[how] = timed(partial(attended, attention), window.tokens // ranks, ledger)
    return found


def timed(attention: Callable[..., torch.Tensor], tokens: int, ledger: CommunicationLedger) -> Measured:
    inputs = [torch.randn(tokens, HEADS, HEAD_SIZE, requires_grad=True) for _ in range(3)]
    gradient = torch.randn(tokens, HEADS, HEAD_SIZE)
    ledger.clear()
    wall, core = time.perf_counter(), time.process_time()
    attention(*inputs).backward(gradient)
    lasted = time.perf_counter() - wall, time.process_time() - core
    return Measured(*lasted, ledger.sum().exposed_seconds, ledger.sum().bytes)


def rows_of(name: str, window: Window, rounds: list[list[dict[str, Measured]]]) -> Iterator[list[str]]:
    """A row for each placement: medians over rounds, of the rank that takes longest."""
    median, count = statistics.median, len(rounds[0])
    alone = [of_ranks[0]["alone"] for of_ranks in rounds]
    cores = {how: [max(each[how].core for each in of_ranks) for of_ranks in rounds] for how in PLACEMENTS}
    walls = {how: [max(each[how].wall for each in of_ranks) for of_ranks in rounds] for how in PLACEMENTS}
    for how in PLACEMENTS:
        plan = planned(window, how, count)
        largest = max(areas(window, plan.tasks, count))
        yield [
            f"{window.tokens // 1024}K, {name}",
            str(count),
            how,
            f"{largest / window.area:.2f}",
            f"{largest * count / window.area:.2f}",
            f"{median(core / its.core for core, its in zip(cores[how], alone, strict=True)):.2f}",
            f"{median(core / other for core, other in zip(cores[how], cores['contiguous'], strict=True)):.2f}",
            f"{median(wall / its.wall for wall, its in zip(walls[how], alone, strict=True)):.2f}",
            f"{median(its.core for its in alone):.2f} s",
            f"{median(max(each[how].exposed for each in of_ranks) for of_ranks in rounds):.2f} s",
            f"{sum(each[how].sent for each in rounds[0]) / 2**20:.1f} MiB",
        ]


def main() -> None:
    pool, rows = Ranks(), list[list[str]]()
    try:
        for name, window, count in CASES:
            rows += rows_of(name, window, [pool.run(count, measure, window) for _ in range(ROUNDS)])
    finally:
        pool.close()
    header = [
        "window", "ranks", "placement", "busiest rank's pairs", "relative to the mean", "its CPU time, one rank = 1",
        "its CPU time, contiguous = 1", "wall-clock time, one rank = 1", "one rank, CPU time", "waiting for exchanges",
        "sent by all",
    ]  # fmt: skip
    write_table(FIGURES / "context_attention.md", header, rows)


if __name__ == "__main__":
    main()
