"""Offloaded tasks as queries and outputs, and as latents: ``python -m tests.benchmarks.context_moved``.

Writes docs/figures/context_moved.md, in some minutes, over windows of the two measured sets of lengths: what ranks send
where tasks move off a contiguous placement until it is even, and where they move and what that gains by the trainer's
own plans. Everything is counted or predicted, and nothing is run.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from textwrap import wrap

from boost_core.context.placement import Window, moved_tasks, place
from boost_core.context.plan import AttentionLayer, ContextPlan, Exchange, Transfer, busiest
from tests.benchmarks.context import WINDOWS
from tests.benchmarks.context_rule import CASES, Case
from tests.benchmarks.figures import FIGURES, provenance, table
from tests.benchmarks.lengths import MEASURED, documents_of

LAYER = AttentionLayer(4096, 4096, 32, 1024)  # tensor parallel ranks divide all that is counted
DRAWS = range(10)
HOW: tuple[Exchange, ...] = ("keys", "latents")
PASSES = (False, True)


def moved_bytes(moved: Exchange) -> int:
    """Of a moved token, forward and backward, there and back."""
    return sum(sum(LAYER.moved_bytes(backward, moved)) for backward in PASSES)


def sent() -> Iterator[list[str]]:
    """Of each window: tasks moved, and bytes between ranks with both, in all and by the busiest, in both passes."""
    for kind, tokens, ranks, size in WINDOWS:
        drawn = [_sent(Window(documents_of(kind, tokens, draw), size), ranks) for draw in DRAWS]
        saved = [_saved(len(keys), len(queries)) for _, keys, queries in drawn]
        busy = [_saved(busiest(keys), busiest(queries)) for _, keys, queries in drawn]
        shares = [share for share, _, _ in drawn], saved, busy
        yield [f"{kind} {tokens // 1024}K, {ranks}, {size}", *(f"{statistics.mean(each):.2f}" for each in shares)]


def _sent(window: Window, ranks: int) -> tuple[float, Sequence[Transfer], Sequence[Transfer]]:
    """The share of the tasks that moves, and what is sent."""
    placement = place(window, ranks, "contiguous")
    tasks = moved_tasks(window, placement, ranks)
    plan = ContextPlan(window, ranks, placement, tasks, 1)
    return len(plan.queries) / window.chunks, plan.keys, plan.queries


def _saved(keys: int, queries: int) -> float:
    """The share of all bytes that latents save; those of keys go, go again, and their gradients come back."""
    wide, latents = (3 * keys * LAYER.latent_bytes + queries * moved_bytes(how) for how in HOW)
    return 1 - latents / wide


@dataclass(frozen=True)
class Gained:
    """Of some windows: in how many tasks move, and the time with moves relative to none."""

    moves: int
    ratios: Sequence[float]

    @property
    def cells(self) -> list[str]:
        """Windows with moves, and the mean and the best ratio."""
        mean = math.exp(statistics.mean(map(math.log, self.ratios)))
        return [f"{self.moves} of {len(self.ratios)}", f"{mean:.3f}", f"{min(self.ratios):.3f}"]


def gained(case: Case, kind: str, how: Exchange) -> Gained:
    """What moves gain if they travel so."""
    fixed = case.dealing()
    moving, ratios, moves = replace(fixed, moves_tasks=True, moved=how), list[float](), 0
    for draw in DRAWS:
        documents = case.documents((kind, draw))
        plan = moving.plan(documents)
        moves += bool(plan.queries)
        ratios.append(moving.figures(plan).seconds / fixed.figures(fixed.plan(documents)).seconds)
    return Gained(moves, ratios)


def _ways(case: Case) -> Sequence[Exchange]:
    return HOW if case.exchange == "latents" else HOW[:1]


def _row(name: str, ways: Sequence[Gained]) -> list[str]:
    cells = [cell for each in ways for cell in each.cells]
    return [name, *cells, *[""] * (6 - len(cells))]


def main() -> None:
    """Count, predict and write the figure."""
    wide, latents = (moved_bytes(how) for how in HOW)
    found = {(case, kind): [gained(case, kind, how) for how in _ways(case)] for case, kind in product(CASES, MEASURED)}
    moves = [sum(ways[place].moves for ways in found.values()) for place in (0, -1)]
    lines = [
        "# Offloaded tasks, wide and as latents",
        "",
        "Counted and predicted; nothing was run. `python -m tests.benchmarks.context_moved` writes this page.",
        "",
        f"With 32 heads of 128 and r = d/4, a token whose attention moves takes {wide:,} bytes in bf16, forward and "
        f"backward, as queries and outputs, and {latents:,} as latents: {latents / wide:.2f} of them.",
        "",
        "## What is sent",
        "",
        f"Tasks move off a contiguous placement until no rank is 3 % above the mean, over {len(DRAWS)} windows of "
        "measured lengths: kind and tokens, ranks, tokens per chunk. The share of the tasks that moves; and of all "
        "bytes between ranks, with keys as latents, forward and backward, the share that is saved if offloaded tasks "
        "are latents, too: in all, and of the busiest rank's (most keys and most queries that any rank sends or "
        "receives).",
        "",
        *table(["window, ranks, chunk", "moved", "saved", "saved by the busiest"], list(sent())),
        "",
        "## What is gained",
        "",
        "By the trainer's plans for the jobs of [the comparison of how tokens are dealt](context_rule.md), over "
        f"{len(DRAWS)} windows of each set: in how many tasks move, and the predicted time of attention relative to "
        "plans that move none, geometric mean and best window. Where nodes exchange keys, queries are not tried as "
        f"latents. Wide, tasks move in {moves[0]} of {len(found) * len(DRAWS)} windows; as latents where possible, in "
        f"{moves[1]}.",
        "",
        *table(
            [
                "job, lengths",
                *(f"{name}: {what}" for name in ("wide", "latents") for what in ("moves", "mean", "best")),
            ],
            [_row(f"{case}, {kind}", ways) for (case, kind), ways in found.items()],
        ),
    ]
    wrapped = [each for line in lines for each in ([line] if line.startswith("|") else wrap(line, 120) or [""])]
    (FIGURES / "context_moved.md").write_text("\n".join([*wrapped, "", provenance(), ""]))


if __name__ == "__main__":
    main()
