"""How the trainer deals tokens, compared with a choice for each job: ``python -m tests.benchmarks.context_rule``.

Writes docs/figures/context_rule.md, in some minutes. No job knows the lengths of its documents in advance. So at best
it could choose, when it starts, the placement, chunk and stages that are fastest on some windows; this choice is then
compared on others of the same lengths. Everything is predicted, and nothing is run.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from textwrap import wrap

from boost_core.config.parallelism import chunk_tokens
from boost_core.context.placement import Window, local_tasks, place
from boost_core.context.plan import AttentionLayer, ContextPlan, Exchange, Rates, figures
from boost_core.context.selection import ContextPlanner
from boost_core.hardware import LINKS, LOOPBACK, device_named
from boost_core.plan.machine import Profile, of_cores
from tests.benchmarks.context_methods import by_piece
from tests.benchmarks.figures import FIGURES, provenance, table
from tests.benchmarks.lengths import MEASURED, documents_of

PLACED, CHUNKS, STAGES = ("near", "loose", "contiguous", "heap"), (2, 4, 8, 16, 32), (2, 4)
SHORTEST, MOST_CHUNKS = 256, 512  # tokens; of a window, as planning more takes long
CHOOSE, COMPARE = ([(kind, draw) for kind in MEASURED for draw in draws] for draws in ((1, 2), (3, 4)))
ONE = [("one", 0)]

Drawn = tuple[str, int]  # of what lengths, and which
Way = tuple[str, int, int]  # placement, chunks of a rank, stages


def _rates(kind: str, node: str) -> Rates:
    device = device_named(kind)
    assert device is not None
    flops, fabric = Profile.nominal(device, "bf16").attention_flops, LINKS["fabric-200g"].bytes_per_second
    return Rates(flops, LINKS[node].bytes_per_second, fabric)


H100, A100 = _rates("H100", "nvlink-h200"), _rates("A100", "nvlink-a100")
CORES = Rates(of_cores(4).attention_flops, LOOPBACK.bytes_per_second, LOOPBACK.bytes_per_second)


def _layer(tensor: int, hidden: int = 4096, heads: int = 32, element: int = 2) -> AttentionLayer:
    return AttentionLayer(hidden, hidden, heads, hidden // 4, tensor, element)


@dataclass(frozen=True)
class Case:
    """A job: its layer, tokens of a sequence, ranks of one and of a node, what these do, and what they send."""

    name: str
    layer: AttentionLayer
    tokens: int
    ranks: int
    node_ranks: int
    rates: Rates
    exchange: Exchange

    def __str__(self) -> str:
        return f"{self.name}, {self.tokens // 1024}K on {self.ranks}"

    def documents(self, drawn: Drawn) -> tuple[int, ...]:
        """Of a window."""
        kind, draw = drawn
        return (self.tokens,) if kind == "one" else documents_of(kind, self.tokens, draw)

    def seconds(self, plan: ContextPlan, apart: bool) -> float:
        """Of a layer's attention, by kernels that process chunks apart or together."""
        of_plan = by_piece if apart else figures
        return of_plan(plan, self.layer, self.rates, self.exchange, self.node_ranks).seconds

    def dealing(self) -> ContextPlanner:
        """What the trainer does."""
        size = chunk_tokens(self.tokens, self.ranks)
        return ContextPlanner(self.ranks, size, None, self.layer, self.rates, self.exchange, self.node_ranks)


CASES = (
    Case("7B, tp 1, H100", _layer(1), 2**15, 4, 8, H100, "keys"),
    Case("7B, tp 1, H100", _layer(1), 2**17, 8, 8, H100, "keys"),
    Case("7B, tp 4, H100", _layer(4), 2**17, 4, 2, H100, "latents"),
    Case("7B, tp 4, A100", _layer(4), 2**17, 4, 2, A100, "latents"),
    Case("7B, tp 4, H100", _layer(4), 2**19, 16, 2, H100, "latents"),
    Case("7B, tp 8, H100", _layer(8), 2**19, 8, 1, H100, "latents"),
    Case("7B, tp 8, H100", _layer(8), 2**19, 32, 1, H100, "latents"),
    Case("30B, tp 8, H100", _layer(8, 8192, 64), 2**18, 8, 1, H100, "latents"),
    Case("64 heads, 8 of keys, tp 8", AttentionLayer(8192, 1024, 64, None, 8), 2**19, 16, 1, H100, "keys"),
    Case("1B, tp 1, A100", _layer(1, 2048), 2**16, 16, 8, A100, "latents"),
    Case("4 cores", _layer(1, 512, 8, 4), 2**14, 4, 4, CORES, "keys"),
)


def ways(case: Case, documents: tuple[int, ...]) -> Iterator[tuple[Way, ContextPlan]]:
    """All that a job could do with a window."""
    for chunks, how in product(CHUNKS, PLACED):
        size = case.tokens // case.ranks // chunks
        if size < SHORTEST or chunks * case.ranks > MOST_CHUNKS:
            continue
        window = Window(documents, size)
        placement = place(window, case.ranks, how)
        for stages in STAGES:
            yield (
                (how, chunks, stages),
                ContextPlan(window, case.ranks, placement, local_tasks(window, placement), stages),
            )


def compared(case: Case) -> Iterator[str]:
    """Seconds of the trainer's plans over those of the choice: of one document and of many; and the imbalance."""
    drawn = [*ONE, *CHOOSE, *COMPARE]
    found = {each: dict(ways(case, case.documents(each))) for each in drawn}
    ours = {each: case.dealing().plan(case.documents(each)) for each in drawn}
    for apart in (False, True):
        timed = {each: {way: case.seconds(plan, apart) for way, plan in plans.items()} for each, plans in found.items()}
        for choose_by, compare_on in ((ONE, ONE), (CHOOSE, COMPARE)):
            best = min(timed[ONE[0]], key=lambda way: _mean([timed[each][way] for each in choose_by]))
            ratio = _mean([case.seconds(ours[each], apart) / timed[each][best] for each in compare_on])
            yield f"{ratio:.2f} ({', '.join(map(str, best))})"
    uneven = [max(plan.loads) * plan.ranks / plan.window.area for plan in ours.values()]
    yield f"{max(uneven):.2f}"


def _mean(values: Sequence[float]) -> float:
    """Geometric."""
    return math.exp(sum(map(math.log, values)) / len(values))


def main() -> None:
    """Plan, predict and write the figure."""
    rows = [[str(case), *compared(case)] for case in CASES]
    means = [f"{_mean([float(row[place].split()[0]) for row in rows]):.2f}" for place in range(1, 5)]
    lines = [
        "# How tokens are dealt, compared with a choice for each job",
        "",
        "Predicted; nothing was run. `python -m tests.benchmarks.context_rule` writes this page.",
        "",
        "Seconds of a layer's attention as the trainer deals tokens, relative to the fastest placement, number of "
        "chunks per rank and number of stages (in brackets): for one document, and for windows of measured lengths, "
        "where the choice is made on two windows of each set and both are compared on two others. First on the "
        "assumption that kernels process all pieces of a call together, as on GPUs, then on the assumption that they "
        "process each chunk by itself. The last column is the trainer's largest area of a rank relative to the mean, "
        "in the worst of these windows.",
        "",
        *table(
            ["job", "one document", "others", "one document, by chunk", "others, by chunk", "worst imbalance"],
            [*rows, ["mean", *means, ""]],
        ),
    ]
    wrapped = [each for line in lines for each in ([line] if line.startswith("|") else wrap(line, 120) or [""])]
    (FIGURES / "context_rule.md").write_text("\n".join([*wrapped, "", provenance(), ""]))


if __name__ == "__main__":
    main()
