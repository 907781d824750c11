"""Plans of context parallelism compared with published systems' rules: ``python -m tests.benchmarks.context``.

Writes docs/figures/context.md: what the balance of placements costs in keys sent, over windows of measured lengths, and
how much of attention's full rate each rule reaches on the same work. Everything is counted or simulated, and nothing is
run; it takes some minutes.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from textwrap import wrap

from boost_core.context.placement import Window, areas, local_tasks, moved_tasks, place
from boost_core.context.plan import AttentionLayer, ContextPlan, Exchange, Rates, busiest
from tests.benchmarks.context_methods import METHODS, Taken, Work, by_piece
from tests.benchmarks.figures import FIGURES, provenance, table
from tests.benchmarks.lengths import LENGTHS, LONGEST, MEASURED, documents_of
from tests.placements import OTHERS, placed

WINDOWS = (  # of what, tokens, ranks, tokens of a chunk
    ("wlbllm", 2**17, 8, 1024), ("wlbllm", 2**17, 32, 512), ("wlbllm", 2**19, 32, 1024),
    ("prolong", 2**17, 8, 1024), ("prolong", 2**19, 32, 1024),
)  # fmt: skip
DRAWS = 20
STAGES, MOVED = (2, 3, 4), "moved"
PLACEMENTS = ("contiguous", *OTHERS, "heap", "near", "loose")
RANK_TOKENS = 2**15
GROUP = LONGEST // RANK_TOKENS
WORLDS = {16: 4, 64: 2, 256: 1}  # ranks, and how many draws
CHUNKS = {16: (2048, 4096), 64: (2048, 4096), 256: (2048,)}  # what is tried at each
FLOPS, NODE = 400e12, 400e9
FABRICS = (50e9, 25e9)
LAYERS = {
    "64 heads, 8 of keys": AttentionLayer(8192, 1024, 64),
    "32 heads, r = d/4": AttentionLayer(4096, 4096, 32, rank=1024),
}


def balance() -> Iterator[list[str]]:
    """Of each placement: imbalance, its worst, keys moved, and the busiest rank's, as shares of a ring's."""
    for kind, tokens, ranks, size in WINDOWS:
        windows = [Window(documents_of(kind, tokens, draw), size) for draw in range(DRAWS)]
        row = [f"{kind} {tokens // 1024}K, {ranks}, {size}"]
        for how in (*PLACEMENTS, MOVED):
            found = [_balance(window, ranks, how) for window in windows]
            uneven, moved, busy = zip(*found, strict=True)
            mean = statistics.mean
            row.append(f"{mean(uneven):.2f} ({max(uneven):.2f}) · {mean(moved):.2f} · {mean(busy):.2f}")
        yield row


def _balance(window: Window, ranks: int, how: str) -> tuple[float, float, float]:
    placement = placed(window, ranks, "contiguous" if how == MOVED else how)
    tasks = moved_tasks(window, placement, ranks) if how == MOVED else local_tasks(window, placement)
    sent = ContextPlan(window, ranks, placement, tasks, 1).keys
    most = max(areas(window, tasks, ranks))
    of_a_ring = window.chunks * (ranks - 1)
    return most * ranks / window.area, len(sent) / of_a_ring, busiest(sent) * ranks / of_a_ring


def planning_milliseconds() -> list[float]:
    """Of this process's time for each plan of 512 chunks on 32 ranks: near, and its transfers in stages."""
    found = []
    for kind, draw in product(MEASURED, range(DRAWS)):
        window = Window(documents_of(kind, LONGEST, draw), 1024)
        begun = time.process_time()
        placement = place(window, 32, "near")
        _ = ContextPlan(window, 32, placement, local_tasks(window, placement), 4).key_stages
        found.append(1000 * (time.process_time() - begun))
    return found


@dataclass(frozen=True)
class Simulated:
    """One draw: the windows, and all plans for all of their ranks together."""

    windows: Sequence[Window]
    plans: Sequence[ContextPlan]

    def taken(self, layer: AttentionLayer, rates: Rates) -> dict[str, Taken]:
        """Of each rule and of our plans."""
        work = Work(self.windows, GROUP, layer, rates)
        found = {"ideal": Taken(work.ideal, 1.0)} | {name: rule(work) for name, rule in METHODS.items()}
        exchanges: Sequence[Exchange] = ("keys", "latents") if layer.rank else ("keys",)
        for exchange in exchanges:
            best = min((by_piece(plan, layer, rates, exchange) for plan in self.plans), key=lambda each: each.seconds)
            found[f"ours, {exchange}"] = Taken(best.seconds, best.imbalance)
        return found


def plans(documents: Sequence[int], ranks: int, chunk_tokens: Sequence[int]) -> Iterator[ContextPlan]:
    """All that there are with chunks of these sizes: by each placement, and with tasks moved from a contiguous one."""
    for size, how in product(chunk_tokens, (*PLACEMENTS, MOVED)):
        window = Window(tuple(documents), size)
        placement = placed(window, ranks, "contiguous" if how == MOVED else how)
        tasks = moved_tasks(window, placement, ranks) if how == MOVED else local_tasks(window, placement)
        for count in STAGES:
            yield ContextPlan(window, ranks, placement, tasks, count)


def simulated(kind: str, ranks: int, draw: int) -> Simulated:
    """Windows that each hold the longest document, one for every so many ranks."""
    windows = [Window(documents_of(kind, LONGEST, 1000 * draw + number), 4096) for number in range(ranks // GROUP)]
    documents = [length for window in windows for length in window.documents]
    return Simulated(windows, list(plans(documents, ranks, CHUNKS[ranks])))


def rules() -> Iterator[tuple[str, str, list[str]]]:
    """Rows by layer and bandwidth: of each rule the share of the full rate, and its imbalance."""
    for kind in LENGTHS:
        for ranks, draws in WORLDS.items():
            drawn = [simulated(kind, ranks, draw) for draw in range(draws)]
            for name, layer in LAYERS.items():
                for fabric in FABRICS:
                    taken = [each.taken(layer, Rates(FLOPS, NODE, fabric)) for each in drawn]
                    yield name, f"{fabric / 1e9:g} GB/s", [f"{kind}, {ranks}", *_shares(taken, layer)]


def _shares(taken: Sequence[dict[str, Taken]], layer: AttentionLayer) -> list[str]:
    def mean(name: str) -> float:
        return statistics.mean(each["ideal"].seconds / each[name].seconds for each in taken)

    shown = []
    for name in (*METHODS, "ours, keys", "ours, latents"):
        if name in taken[0]:
            shown.append(f"{mean(name):.2f} ({statistics.mean(each[name].imbalance for each in taken):.2f})")
    first = [mean("ours, keys") / mean(name) for name in ("ring", "ByteScale", "WLB", "Magi")]
    # Linear layers have 12 d² weights, of 6 FLOPs a token forward and backward.
    linear = 6 * 12 * layer.hidden_size**2 * RANK_TOKENS / FLOPS
    step = statistics.mean((linear + each["WLB"].seconds) / (linear + each["ours, keys"].seconds) for each in taken)
    return [*shown, f"{min(first):.2f} – {max(first):.2f}", f"{step:.2f}"]


def main() -> None:
    """Count, simulate and write the figure."""
    milliseconds = planning_milliseconds()
    lines = [
        "# Context parallelism, planned",
        "",
        "Counted and simulated; nothing was run on a GPU. `python -m tests.benchmarks.context` writes this page.",
        "",
        "## The cost of balance",
        "",
        f"Windows of measured lengths, {DRAWS} draws: kind and tokens, ranks, tokens per chunk. Largest area of a rank "
        "relative to the mean (in the worst window) · keys moved in total · by the busiest rank, both as shares of "
        "what a ring moves.",
        "",
        *table(["window, ranks, chunk", *PLACEMENTS, "tasks moved from contiguous"], list(balance())),
        "",
        "Planning 512K tokens on 32 ranks (near, chunks of 1024, four stages) takes "
        f"{statistics.median(milliseconds):.0f} ms of one core in the median, {max(milliseconds):.0f} ms at most, over "
        f"{len(milliseconds)} windows.",
    ]
    by_case: dict[tuple[str, str], list[list[str]]] = {}
    for name, fabric, row in rules():
        by_case.setdefault((name, fabric), []).append(row)
    lines += [
        "",
        "## Comparison with other systems' rules",
        "",
        "Share of attention's full rate (400 TFLOP/s) reached in forward and backward, and in brackets the largest "
        f"time relative to the mean; {RANK_TOKENS // 1024}K tokens per rank, documents of up to {LONGEST // 1024}K, "
        "each rank on its own node. The last two columns are our speed-up when keys are sent: in attention, relative "
        "to the best and the worst of the first four, where FCP publishes 1.13 to 2.21; and in the whole layer, "
        "relative to WLB, with linear layers at the same rate, where DistCA publishes 1.35.",
    ]
    for (name, fabric), rows in by_case.items():
        ours = ["ours, keys", "ours, latents"] if LAYERS[name].rank else ["ours, keys"]
        lines += ["", f"### {name}, {fabric}", ""]
        lines += table(
            ["lengths, ranks", *METHODS, *ours, "speed-up over the first four", "layer speed-up over WLB"], rows
        )
    wrapped = [each for line in lines for each in ([line] if line.startswith("|") else wrap(line, 120) or [""])]
    (FIGURES / "context.md").write_text("\n".join([*wrapped, "", provenance(), ""]))


if __name__ == "__main__":
    main()
