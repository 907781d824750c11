"""What measuring costs a step, and a scrape its rank: ``python -m tests.benchmarks.telemetry``.

Two CPU ranks of one thread each over gloo, tensor parallel. Steps with and without measuring take turns, in an order
that chance gives each pair, so that a busy machine slows both alike. Without, nothing is counted and no clock is read:
the ledger hands out the bare collective.
"""

import random
import statistics
import time
import urllib.request
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from boost_core.config import JobSpec
from boost_core.data.corpus import load_corpus
from boost_core.data.sampler import Sampler
from boost_core.parallel.clock import StepClock, StepParts
from boost_core.parallel.ledger import CommunicationLedger
from boost_core.train import StepTimes
from boost_core.train.state import TrainState
from boost_core.train.step import training_step
from service.gang.rank_metrics import StepCollector, serve_metrics
from tests.benchmarks.figures import FIGURES, write_table
from tests.jobs import tiny_job, write_corpus
from tests.ranks import Ranks

PORTS = range(9400, 9500)
SCRAPES, SCRAPE_SECONDS = 200, 15
# What a job changes of the tests' smallest, and pairs of steps.
JOBS: dict[str, tuple[dict[str, Any], int]] = {
    "2 layers of width 32, 128 tokens": ({}, 400),
    "tiny preset, 2048 tokens": (
        {
            "model": {"preset": "tiny"},
            "training": {"sequence_length": 256, "global_batch_size": 8, "micro_batch_size": 4},
        },
        60,
    ),
}
Seconds = tuple[float, float]  # by the wall, and of this process's CPU time


def unmeasured() -> AbstractContextManager[Any]:
    """Takes all measuring out."""
    nothing: Callable[..., None] = lambda *_: None  # noqa: E731
    stack = ExitStack()
    for method in ("begin", "has_batch", "enter"):
        stack.enter_context(patch.object(StepClock, method, nothing))
    stack.enter_context(patch.object(StepClock, "values", lambda _, tensor: tensor.tolist()))
    stack.enter_context(patch.object(StepClock, "end", lambda _: StepParts()))
    stack.enter_context(patch.object(CommunicationLedger, "start", lambda _, entry, payload, launch: launch()))
    stack.enter_context(patch.object(CommunicationLedger, "by_group", lambda _: {}))
    stack.enter_context(patch.object(StepCollector, "add", nothing))
    return stack


def measure(spec: JobSpec, pairs: int) -> tuple[list[tuple[Seconds, Seconds]], int, float, float]:
    """Steps without and with measuring; and of a scrape its bytes, its seconds, and those of the CPU."""
    state, steps = TrainState.initial(spec, torch.device("cpu")), StepCollector()
    sampler = Sampler(load_corpus(spec.data, spec.training.sequence_length), spec.training.sequence_length, seed=1)
    chance = random.Random(1)  # the same on all ranks

    def step(measuring: bool) -> Seconds:
        with nullcontext() if measuring else unmeasured():
            dist.barrier()
            started, worked = time.perf_counter(), time.process_time()
            state.ledger.clear()
            training_step(state, sampler)
            parts = state.clock.end()
            steps.add(StepTimes(state.step, parts.seconds, parts.seconds, parts, state.ledger.by_group()))
            return time.perf_counter() - started, time.process_time() - worked

    for measuring in [True, False] * 5:
        step(measuring)
    taken = []
    for _ in range(pairs):
        seconds = {measuring: step(measuring) for measuring in chance.sample([False, True], 2)}
        taken.append((seconds[False], seconds[True]))
    return taken, *scraped(steps)


def scraped(steps: StepCollector) -> tuple[int, float, float]:
    """Of one scrape, asked for in the rank's own process: bytes, seconds, seconds of the CPU for asker and asked."""
    endpoint = serve_metrics(steps, (), "127.0.0.1", PORTS)
    size = 0
    started, worked = time.perf_counter(), time.process_time()
    for _ in range(SCRAPES):
        with urllib.request.urlopen(f"http://{endpoint}/metrics") as answer:
            size = len(answer.read())
    return size, (time.perf_counter() - started) / SCRAPES, (time.process_time() - worked) / SCRAPES


def added(pairs: Sequence[Seconds]) -> str:
    """What the second of each pair has more than the first: the median, and its standard error."""
    ratios = [measured / bare - 1 for bare, measured in pairs]
    return f"{statistics.median(ratios):+.2%} ± {1.2533 * statistics.stdev(ratios) / len(ratios) ** 0.5:.2%}"


def main() -> None:
    """Measure and write the table."""
    rows = []
    ranks = Ranks()
    with TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder) / "corpus")
        for name, (changes, pairs) in JOBS.items():
            taken, size, seconds, worked = ranks.run(2, measure, tiny_job(corpus, folder, **changes), pairs)[0]
            wall, cpu = ([(bare[which], measured[which]) for bare, measured in taken] for which in (0, 1))
            rows.append(
                [
                    name,
                    f"{1000 * statistics.median(bare for bare, _ in wall):.1f} ms",
                    added(wall),
                    added(cpu),
                    f"{size / 1024:.1f} KiB, {1000 * seconds:.1f} ms",
                    f"{worked / SCRAPE_SECONDS:.3%}",
                ]
            )
    ranks.close()
    header = ["job", "step", "measuring adds", "of CPU time", "a scrape", f"of a core, at one in {SCRAPE_SECONDS} s"]
    write_table(FIGURES / "telemetry.md", header, rows)


if __name__ == "__main__":
    main()
