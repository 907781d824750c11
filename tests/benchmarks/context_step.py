"""A step of long sequences on two context parallel ranks beside one: ``python -m tests.benchmarks.context_step``.

Writes docs/figures/context_step.md. CPU ranks of one thread each over gloo, which take turns with one rank alone, so
that a busy machine slows both; each works on a core of its own where there are two that are idle.
"""

import statistics
import time
from dataclasses import dataclass

import numpy as np
import torch

from boost_core.config import JobSpec, Layout
from boost_core.data.corpus import Sequences
from boost_core.train.state import TrainState
from boost_core.train.step import training_step
from tests.benchmarks.figures import FIGURES, write_table
from tests.benchmarks.lengths import documents_of
from tests.ranks import Ranks

TOKENS, VOCABULARY, END, WARM, STEPS, ROUNDS = 2**14, 512, 0, 1, 2, 3
SHAPE = {
    "family": "cola", "vocab_size": VOCABULARY, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 2,
    "num_attention_heads": 2, "rank": 32,
}  # fmt: skip
WINDOWS = {"one document": (TOKENS,), "wlbllm's lengths": documents_of("wlbllm", TOKENS, 0)}


@dataclass(frozen=True)
class Measured:
    """A step on one rank: seconds, seconds on its core, seconds waited for exchanges, bytes sent over ``cp``."""

    wall: float
    core: float
    exposed: float
    sent: int


class OneWindow:
    """The same tokens each step, with documents of given lengths."""

    def __init__(self, documents: tuple[int, ...]) -> None:
        self._tokens = np.random.default_rng(0).integers(1, VOCABULARY, (1, TOKENS + 1))
        self._tokens[0, np.cumsum(documents) - 1] = END

    def sequences(self, _first: int, _count: int) -> Sequences:
        return self._tokens


def spec(context: int) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "long",
            "model": SHAPE,
            "parallelism": Layout(1, 1, 1, cp=context).sizes,
            "data": {"documents_apart": True},
            "training": {"steps": 100, "sequence_length": TOKENS, "global_batch_size": 1, "micro_batch_size": 1},
        }
    )


def measure(context: int, documents: tuple[int, ...]) -> Measured:
    """The median step of this rank."""
    state = TrainState.initial(spec(context), torch.device("cpu"), end_of_document=END)
    state.draw()
    window, found = OneWindow(documents), list[Measured]()
    for _ in range(WARM + STEPS):
        state.ledger.clear()
        wall, core = time.perf_counter(), time.process_time()
        training_step(state, window)  # type: ignore[arg-type]
        wall, core = time.perf_counter() - wall, time.process_time() - core
        sent = sum(line.bytes for entry, line in state.ledger.totals().items() if entry.group == "cp")
        found.append(Measured(wall, core, state.ledger.sum().exposed_seconds, sent))
    return sorted(found[WARM:], key=lambda each: each.wall)[STEPS // 2]


def row(pool: Ranks, name: str) -> list[str]:
    """Two ranks' step over one's: medians over rounds, of the rank that takes longer."""
    rounds = [
        (pool.run(1, measure, 1, WINDOWS[name])[0], pool.run(2, measure, 2, WINDOWS[name])) for _ in range(ROUNDS)
    ]
    return [
        name,
        f"{statistics.median(max(each.wall for each in both) / alone.wall for alone, both in rounds):.2f}",
        f"{statistics.median(max(each.core for each in both) / alone.core for alone, both in rounds):.2f}",
        f"{statistics.median(alone.wall for alone, _ in rounds):.2f} s",
        f"{statistics.median(max(each.exposed for each in both) for _, both in rounds):.2f} s",
        f"{sum(each.sent for each in rounds[0][1]) / 2**20:.1f} MiB",
    ]


def main() -> None:
    pool = Ranks()
    try:
        rows = [row(pool, name) for name in WINDOWS]
    finally:
        pool.close()
    header = [
        f"{TOKENS // 1024}K tokens", "step on two ranks over one's", "on their cores", "on one rank",
        "waited for exchanges", "keys sent by both",
    ]  # fmt: skip
    write_table(FIGURES / "context_step.md", header, rows)


if __name__ == "__main__":
    main()
