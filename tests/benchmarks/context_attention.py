"""Attention over two context parallel ranks beside one: ``python -m tests.benchmarks.context_attention``.

Writes docs/figures/context_attention.md. Two CPU ranks of one thread each over gloo. Both ways take turns, so that a
busy machine slows both; what others leave of the cores counts in seconds, and not in a rank's own time on its core.
"""

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from boost_core.nn.documents import one_by_one
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.context.attention import ContextAttention
from boost_core.parallel.ledger import CommunicationLedger
from boost_core.plan.context.figures import ContextPlan
from boost_core.plan.context.placement import place
from boost_core.plan.context.tasks import areas, own_tasks
from boost_core.plan.context.window import Window
from tests.benchmarks.figures import FIGURES, write_table
from tests.benchmarks.lengths import documents_of
from tests.ranks import Ranks

TOKENS, CHUNK, HEADS, HEAD_SIZE, ROUNDS, RANKS = 2**14, 1024, 1, 64, 3, 2
CPU = torch.device("cpu")
WINDOWS = {
    "one document": Window((TOKENS,), CHUNK),
    "one document, window of 2048": Window((TOKENS,), CHUNK, 2048),
    "wlbllm's lengths": Window(documents_of("wlbllm", TOKENS, 0), CHUNK),
}
PLACEMENTS = ("contiguous", "near")


@dataclass(frozen=True)
class Measured:
    """Forward and backward on one rank: seconds, seconds on the core, seconds waited for exchanges, bytes sent."""

    wall: float
    core: float
    exposed: float = 0.0
    sent: int = 0


def planned(window: Window, how: str) -> ContextPlan:
    placement = place(window, RANKS, how)
    return ContextPlan(window, RANKS, placement, own_tasks(window, placement), 2)


def measure(window: Window) -> dict[str, Measured]:
    """A round of this rank: of one rank that has all, and of each placement."""
    ledger = CommunicationLedger()
    communicator = Communicator(dist.group.WORLD, "cp", ledger)
    begin_n = torch.tensor([0, *window.documents]).cumsum(0).to(torch.int32)
    found = {}
    if communicator.rank == 0:
        found["alone"] = timed(partial(one_by_one, begin_n=begin_n, window=window.sees), TOKENS, ledger)
    for how in PLACEMENTS:
        attention = ContextAttention(planned(window, how), communicator, CPU)
        dist.barrier()
        found[how] = timed(attention, TOKENS // RANKS, ledger)
    return found


def timed(attention: Callable[..., torch.Tensor], tokens: int, ledger: CommunicationLedger) -> Measured:
    inputs = [torch.randn(tokens, HEADS, HEAD_SIZE, requires_grad=True) for _ in range(3)]
    gradient = torch.randn(tokens, HEADS, HEAD_SIZE)
    ledger.clear()
    wall, core = time.perf_counter(), time.process_time()
    attention(*inputs).backward(gradient)
    lasted = time.perf_counter() - wall, time.process_time() - core
    return Measured(*lasted, ledger.sum().exposed_seconds, ledger.sum().bytes)


def row(name: str, how: str, rounds: list[list[dict[str, Measured]]]) -> list[str]:
    """What a placement takes of what one rank takes: medians over rounds, of the rank that takes longest."""
    plan, median = planned(WINDOWS[name], how), statistics.median
    alone = [of_ranks[0]["alone"] for of_ranks in rounds]
    both = [[each[how] for each in of_ranks] for of_ranks in rounds]
    by_core = median(max(each.core for each in ranks) / its.core for ranks, its in zip(both, alone, strict=True))
    by_wall = median(max(each.wall for each in ranks) / its.wall for ranks, its in zip(both, alone, strict=True))
    return [
        name,
        how,
        f"{max(areas(plan.window, plan.tasks, RANKS)) / plan.window.area:.2f}",
        f"{by_core:.2f}",
        f"{by_wall:.2f}",
        f"{median(its.core for its in alone):.2f} s",
        f"{median(max(each.exposed for each in ranks) for ranks in both):.2f} s",
        f"{sum(each.sent for each in both[0]) / 2**20:.1f} MiB",
    ]


def main() -> None:
    pool, rows = Ranks(), list[list[str]]()
    try:
        for name, window in WINDOWS.items():
            rounds = [pool.run(RANKS, measure, window) for _ in range(ROUNDS)]
            rows += [row(name, how, rounds) for how in PLACEMENTS]
    finally:
        pool.close()
    header = [
        f"{TOKENS // 1024}K tokens", "placement", "busier rank's pairs", "its CPU time", "wall-clock time",
        "one rank, CPU time", "waiting for exchanges", "sent by both",
    ]  # fmt: skip
    write_table(FIGURES / "context_attention.md", header, rows)


if __name__ == "__main__":
    main()
