"""What measuring costs a step, and a scrape its rank: ``python -m tests.benchmarks.telemetry``.

Two CPU ranks of one thread each over gloo, tensor parallel. Steps with and without measuring take turns, in an order
that chance gives each pair, so that a busy machine slows both alike. Without, nothing is counted and no clock is read:
the ledger hands out the bare collective. Besides, all calls that measure a step are made alone, without a step around
them, over and over, which a busy machine disturbs less.
"""

import random
import statistics
import time
import urllib.request
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from boost_core.config import JobSpec
from boost_core.data.corpus import Sampler, load_corpus
from boost_core.parallel.communicator import CommunicationLedger, Entry, Part, StepClock, StepParts, Totals
from boost_core.train import StepTimes
from boost_core.train.state import TrainState
from boost_core.train.step import training_step
from service.gang.worker.rank_metrics import StepCollector, serve_metrics
from tests.benchmarks.figures import FIGURES, write_table
from tests.jobs import tiny_job, write_corpus
from tests.ranks import Ranks

PORTS = range(9400, 9500)
SCRAPES, SCRAPE_SECONDS = 200, 15
# What a job changes of the tests' smallest, and pairs of steps.
JOBS: dict[str, tuple[dict[str, Any], int]] = {
    "2 layers of width 32, 128 tokens": ({}, 800),
    "tiny preset, 2048 tokens": (
        {
            "model": {"preset": "tiny"},
            "training": {"sequence_length": 256, "global_batch_size": 8, "micro_batch_size": 4},
        },
        400,
    ),
}
REPEATS = 200


@dataclass(frozen=True)
class Measured:
    """What rank 0 has measured; all in seconds, a scrape's size in bytes.

    Attributes:
        steps: Steps without and with measuring.
        collectives: Of a step.
        alone: A step's measuring, without the step.
        scrape: Its size, how long it takes, and how much of that the CPU works, for asker and asked.
    """

    steps: list[tuple[float, float]]
    collectives: int
    alone: float
    scrape: tuple[int, float, float]


class Done(dist.Work):
    """A collective that has ended."""

    def wait(self, timeout: timedelta | None = None) -> bool:
        return True


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


def measure(spec: JobSpec, pairs: int) -> Measured:
    """All figures of a job."""
    state, steps = TrainState.initial(spec, torch.device("cpu")), StepCollector()
    sampler = Sampler(load_corpus(spec.data, spec.training.sequence_length), spec.training.sequence_length, seed=1)
    chance = random.Random(1)  # the same on all ranks

    def step(measuring: bool) -> float:
        with nullcontext() if measuring else unmeasured():
            dist.barrier()
            started = time.perf_counter()
            state.ledger.clear()
            training_step(state, sampler)
            end(state, steps)
            return time.perf_counter() - started

    for measuring in [True, False] * 5:
        step(measuring)
    taken = []
    for _ in range(pairs):
        seconds = {measuring: step(measuring) for measuring in chance.sample([False, True], 2)}
        taken.append((seconds[False], seconds[True]))
    step(True)
    lines, marks = state.ledger.totals(), len(state.clock._marks)
    alone = [measuring_alone(state, steps, lines, marks) for _ in range(REPEATS)]
    return Measured(taken, sum(each.calls for each in lines.values()), statistics.median(alone), scraped(steps))


def end(state: TrainState, steps: StepCollector) -> None:
    """What the loop does with a step's measures."""
    parts = state.clock.end()
    steps.add(StepTimes(state.step, parts.seconds, parts.seconds, parts, state.ledger.by_group()))


def measuring_alone(state: TrainState, steps: StepCollector, lines: dict[Entry, Totals], marks: int) -> float:
    """Seconds of all calls that measure a step with these collectives, and so many marks of the clock."""
    done, payload = Done(), torch.zeros(8)
    calls = [entry for entry, totals in lines.items() for _ in range(totals.calls)]
    started = time.perf_counter()
    state.ledger.clear()
    state.clock.begin()
    for entry in calls:
        state.ledger.start(Entry(entry.kind, entry.group, entry.purpose), payload, lambda: done).wait()
    for _ in range(marks):
        state.clock.enter(Part.FORWARD)
    end(state, steps)
    return time.perf_counter() - started


def scraped(steps: StepCollector) -> tuple[int, float, float]:
    """Of one scrape, asked for in the rank's own process: bytes, seconds, seconds of the CPU for asker and asked."""
    endpoint = serve_metrics([steps], (), "127.0.0.1", PORTS)
    size = 0
    started, worked = time.perf_counter(), time.process_time()
    for _ in range(SCRAPES):
        with urllib.request.urlopen(f"http://{endpoint}/metrics") as answer:
            size = len(answer.read())
    return size, (time.perf_counter() - started) / SCRAPES, (time.process_time() - worked) / SCRAPES


def main() -> None:
    """Measure and write the table."""
    rows = []
    ranks = Ranks()
    with TemporaryDirectory() as folder:
        corpus = write_corpus(Path(folder) / "corpus")
        for name, (changes, pairs) in JOBS.items():
            measured: Measured = ranks.run(2, measure, tiny_job(corpus, folder, **changes), pairs)[0]
            ratios = [with_it / without - 1 for without, with_it in measured.steps]
            error = 1.2533 * statistics.stdev(ratios) / len(ratios) ** 0.5  # of a median
            step = statistics.median(without for without, _ in measured.steps)
            size, seconds, worked = measured.scrape
            rows.append(
                [
                    name,
                    f"{1000 * step:.1f} ms",
                    f"{measured.collectives}",
                    f"{statistics.median(ratios):+.1%} ± {error:.1%}",
                    f"{1000 * measured.alone:.2f} ms, {measured.alone / step:.2%}",
                    f"{size / 1024:.1f} KiB, {1000 * seconds:.1f} ms",
                    f"{worked / SCRAPE_SECONDS:.3%}",
                ]
            )
    ranks.close()
    header = [
        "job", "step", "collectives", "with measuring relative to without, median", "measuring alone", "one scrape",
        f"share of a core, at one per {SCRAPE_SECONDS} s",
    ]  # fmt: skip
    write_table(FIGURES / "telemetry.md", header, rows)


if __name__ == "__main__":
    main()
