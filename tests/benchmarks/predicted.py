"""Steps of real gangs beside what was predicted for them: ``python -m tests.benchmarks.predicted``.

The profile is measured as ``boost bench profile`` and ``boost bench comm`` do, of one core and of two gloo ranks. Gangs
of tp 1 and of tp 2 then run as jobs do, several of each, and correct it; other layouts, in all modes of recomputation,
are held out: nothing of them is known when they are predicted. Rounds go over all cases in turn, the last ones over the
known gangs only.

Two clocks tell how long a step took. One is on the wall, of which the shortest step of a round counts; ranks have a
thread each, and where they are more than the cores, each is predicted to have its share of one. The other counts the
seconds that a rank had a core, of which other work on the machine takes none away: the median of a round's steps, of
the rank that needed most. A rank has no core while it waits in a pipeline, so predictions for this clock are without
idle time. Rates and the link, for both, are measured by this clock; on a core of one's own they are the same by both.

By the wall clock a step communicates for as long as its rank waits for collectives. By the other it communicates while
threads other than the one that trains have a core, which are gloo's (a gang of one rank has hardly any such seconds),
and while that one starts a collective or waits for it. Either way it is what the profile's link was timed by.
"""

import logging
import math
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any, Literal, TypeVar
from unittest.mock import patch

import torch

from boost_core.bench.comm import comm_rows, levels, measured_link
from boost_core.bench.profile import measure
from boost_core.bench.rank import RunShape
from boost_core.config import JobSpec, Layout
from boost_core.messages import Provenance
from boost_core.parallel.communicator import CommunicationLedger, Pending
from boost_core.plan.machine import (
    Basis,
    Factors,
    Fitted,
    Machine,
    MeasuredLink,
    MeasuredProfile,
    PredictedCommunication,
    Ran,
    Ratios,
    model_of,
    shape_of,
)
from boost_core.plan.report import at, step_parts
from boost_core.plan.throughput import StepParts
from boost_core.train import train
from boost_core.train.state import Membership, StepTimes
from tests.benchmarks.figures import FIGURES, provenance, table
from tests.distributed.recording import Recorder
from tests.jobs import tiny_job, write_corpus
from tests.ranks import Ranks

PRESET, LAYERS, SEQUENCE, MICRO_BATCH, BATCH = "60m", 4, 64, 2, 8
STEPS, WATCHED, ROUNDS = 9, 2, 2  # of a run; of these, slower by counting memory; runs of each case held out
JOBS = 9  # of each known gang: by n/(n + 3) three quarters of what is believed
LARGEST, REPEATS = 4 << 20, 15
KNOWN = ((Layout(1, 1, 1), "none"), (Layout(2, 1, 1), "none"))
BASES: dict[Provenance, Provenance] = {"assumed": "fitted", "measured": "measured_fitted"}  # and those corrected
WAYS: tuple[Provenance, ...] = ("assumed", "fitted", "measured", "measured_fitted")
HELD_OUT = tuple(
    (layout, recompute)
    for layout in (Layout(1, 2, 1), Layout(1, 1, 2), Layout(2, 1, 2))
    for recompute in ("none", "latent", "full")
)
CPU = torch.device("cpu")
logger = logging.getLogger(__name__)
Case = tuple[Layout, str]
Clock = Literal["core", "wall"]
Result = TypeVar("Result")


@dataclass(frozen=True)
class Taken:
    """What a step took by one clock.

    Attributes:
        seconds: All of it.
        communication: The part in which it communicated.
    """

    seconds: float
    communication: float


Seconds = dict[Case, list[Taken]]  # of a step, in each round


@dataclass(frozen=True)
class Ways:
    """What steps are predicted by.

    Attributes:
        clock: Which seconds are predicted.
        cores: Of the machine.
        profile: Of one of them.
        corrections: By what jobs took, for ``fitted`` and ``measured_fitted``.
    """

    clock: Clock
    cores: int
    profile: MeasuredProfile
    corrections: Mapping[Provenance, Fitted] = field(default_factory=dict)

    def machine(self, job: JobSpec, way: Provenance) -> Machine:
        """What a gang is predicted to run on."""
        ranks = Layout.of(job.parallelism).world_size
        share = min(1.0, self.cores / ranks) if self.clock == "wall" else 1.0
        if way in ("assumed", "fitted"):
            resources = job.resources.model_copy(update={"cpus_per_worker": share})
            machine = Basis().machine(job.model_copy(update={"resources": resources}))
        else:
            machine = Basis(profile=_share_of(self.profile, share)).machine(job)
        return replace(machine, fitted=self.corrections.get(way))

    def parts(self, job: JobSpec, way: Provenance) -> StepParts:
        """The prediction."""
        parts = step_parts(job, Layout.of(job.parallelism), self.machine(job, way))
        return parts if self.clock == "wall" else parts.model_copy(update={"idle": 0.0})

    def ratios(self, job: JobSpec, base: Provenance, taken: Taken) -> Ratios | None:
        """What a known gang took over the prediction; it has one pipeline rank, which waits for no other."""
        parts = self.parts(job, base)
        predicted = PredictedCommunication(parts.communication, parts.communication / parts.total)
        return Ratios.of(taken.seconds / parts.total, taken.communication, predicted)

    def corrected(self, seconds: Seconds, folder: Path) -> "Ways":
        """The same, corrected by gangs that have run."""
        corrections: dict[Provenance, Fitted] = {}
        for base, way in BASES.items():
            ran = []
            for case, every in seconds.items():
                job = job_of(case, folder)
                found = [self.ratios(job, base, taken) for taken in every]
                ran += [
                    Ran(f"{case} {number}", model_of(job), shape_of(job), ratios)
                    for number, ratios in enumerate(found)
                    if ratios
                ]
            spread = self.machine(job, base).profile.spread
            if fitted := Fitted.to(ran, spread, "CPU", "fp32", model_of(job)):
                corrections[way] = fitted
        return replace(self, corrections=corrections)


def job_of(case: Case, folder: Path) -> JobSpec:
    """The job of a case, in its layout."""
    layout, recompute = case
    job = tiny_job(
        folder / "corpus",
        folder / f"checkpoints-{time.monotonic_ns()}",
        parallelism={**layout.sizes, "recompute": recompute},
        training={
            "steps": STEPS, "sequence_length": SEQUENCE, "global_batch_size": BATCH, "micro_batch_size": MICRO_BATCH,
            "evaluate_every_steps": 10 * STEPS,
        },
        checkpoint={"every_steps": 10 * STEPS},
    )  # fmt: skip
    model = {"preset": PRESET, "num_hidden_layers": LAYERS, "vocab_size": 1024}
    return at(JobSpec.model_validate(job.model_dump(mode="json") | {"model": model}), layout)


class OwnSeconds:
    """Counts how long this thread has a core in some calls."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def of(self, call: Callable[[], Result]) -> Result:
        """Make a call."""
        before = time.thread_time()
        result = call()
        self.seconds += time.thread_time() - before
        return result


@dataclass(frozen=True)
class Awaited:
    """A collective whose wait is counted."""

    pending: Pending
    own: OwnSeconds

    def wait(self) -> None:
        """Wait for it."""
        self.own.of(self.pending.wait)


def steps_of(job: JobSpec) -> list[dict[Clock, Taken]]:
    """Train it on this rank; what each step took by both clocks."""
    steps: list[dict[Clock, Taken]] = []
    own, start = OwnSeconds(), CommunicationLedger.start

    def started(*arguments: Any) -> Awaited:
        return Awaited(own.of(lambda: start(*arguments)), own)

    def now() -> tuple[float, float]:
        every = time.process_time()
        return every, every - time.thread_time() + own.seconds

    before = now()

    def note(times: StepTimes) -> None:
        nonlocal before
        after = now()
        core = Taken(*(later - earlier for later, earlier in zip(after, before, strict=True)))
        steps.append({"core": core, "wall": Taken(times.parts.seconds, times.parts.exposed_communication)})
        before = after

    with patch.object(CommunicationLedger, "start", started):
        train(job, Recorder(), Membership(after_step=note))
    return steps[WATCHED:]


def measured(ranks: Ranks) -> MeasuredProfile:
    """What a core does, and what two ranks exchange."""
    shape = RunShape(PRESET, 2, MICRO_BATCH, SEQUENCE, LAYERS, 1024)
    with patch("time.perf_counter", time.process_time):
        profile = measure(shape, CPU, REPEATS)
    return profile.model_copy(update={"link": ranks.run(2, link_of)[0]})


def link_of() -> MeasuredLink:
    """What two ranks exchange."""
    with patch("time.perf_counter", time.process_time):
        (level,) = levels(CPU)
        link, _ = comm_rows(level, CPU, LARGEST, REPEATS)
        return measured_link(level, CPU, link, REPEATS).model_copy(update={"overlap": 0.0})  # this clock knows of none


def held_up() -> float:
    """How many times as long as its own computing a second of it takes here: 1 where nothing else runs."""
    matrix = torch.randn(512, 512)
    started, computing = time.perf_counter(), time.process_time()
    while time.process_time() - computing < 1:
        matrix @ matrix
    return (time.perf_counter() - started) / (time.process_time() - computing)


def rounds(ranks: Ranks, folder: Path) -> tuple[dict[Clock, Seconds], list[float]]:
    """What each case took in each round by both clocks, and how much other work held a core up before each."""
    cases = (*KNOWN, *HELD_OUT)
    found: dict[Clock, Seconds] = {"core": {case: [] for case in cases}, "wall": {case: [] for case in cases}}
    others = []
    for number in range(JOBS):
        for case in cases if number < ROUNDS else KNOWN:
            others.append(held_up())
            told = ranks.run(case[0].world_size, steps_of, job_of(case, folder))
            most = [max((rank["core"] for rank in step), key=_seconds) for step in zip(*told, strict=True)]
            core, wall = _median(most), min((step["wall"] for step in told[0]), key=_seconds)
            found["core"][case].append(core)
            found["wall"][case].append(wall)
            logger.info("%s: %s of a core, %s on the wall", _name(case), _in_words(core), _in_words(wall))
    return found, others


def main() -> None:
    """Measure, predict and write the table."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    torch.set_num_threads(1)
    ranks, cores = Ranks(), os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        write_corpus(folder / "corpus")
        profile = measured(ranks)
        logger.info("%s", profile)
        found, others = rounds(ranks, folder)
        ranks.close()
        ways = [
            Ways(clock, cores, profile).corrected({case: seconds[case] for case in KNOWN}, folder)
            for clock, seconds in found.items()
        ]
        lines = [*_summary(ways, found, folder)]
        for each in ways:
            lines += ["", f"By the {each.clock} clock:", "", *_rows(each, found[each.clock], folder)]
    low, *_, high = statistics.quantiles(others, n=10)
    conditions = (
        f"{PRESET} with {LAYERS} blocks, {BATCH} sequences of {SEQUENCE} in micro-batches of {MICRO_BATCH}, fp32, "
        f"gloo; {ROUNDS} rounds of {STEPS - WATCHED} steps, and {JOBS} of known gangs. Other work held cores up: for "
        f"a second of one a process waited {statistics.median(others) - 1:.1f} s more (p10 {low - 1:.1f}, "
        f"p90 {high - 1:.1f})."
    )
    (FIGURES / "predicted.md").write_text("\n".join([*lines, "", provenance(), conditions, ""]))


def _rows(ways: Ways, seconds: Seconds, folder: Path) -> list[str]:
    rows = []
    for case, steps in seconds.items():
        job, step = job_of(case, folder), _median(steps)
        predicted = [ways.parts(job, way) for way in WAYS]
        errors = [f"{_in_words(each)} ({each.total / step.seconds - 1:+.0%})" for each in predicted]
        rows.append([_name(case), "held out" if case in HELD_OUT else "known", _in_words(step), *errors])
    return table(["gang", "", "took (communicating)", *WAYS], rows)


def _summary(all_ways: Sequence[Ways], found: Mapping[Clock, Seconds], folder: Path) -> list[str]:
    rows = []
    for ways, way in product(all_ways, WAYS):
        errors, inside = [], []
        for case in HELD_OUT:
            job, seconds = job_of(case, folder), found[ways.clock][case]
            predicted = ways.parts(job, way)
            low, high = ways.machine(job, way).range_of(job, predicted.total, predicted.communication)
            errors.append(abs(predicted.total / _median(seconds).seconds - 1))
            inside += [low <= each.seconds <= high for each in seconds]
        factors = correction.factors if (correction := ways.corrections.get(way)) else Factors()
        rows.append(
            [
                ways.clock,
                way,
                f"{factors.rest:.2f}",
                f"{factors.communication:.2f}",
                f"{statistics.median(errors):.0%}",
                f"{max(errors):.0%}",
                f"{sum(inside) / len(inside):.0%}",
            ]
        )
    header = [
        "clock",
        "held out, by",
        "factor",
        "of communication",
        "median error (aim 10%)",
        "worst (20%)",
        "within p10–p90 (80%)",
    ]
    return table(header, rows)


def _seconds(taken: Taken) -> float:
    return taken.seconds


def _median(every: Sequence[Taken]) -> Taken:
    return Taken(
        statistics.median(each.seconds for each in every), statistics.median(each.communication for each in every)
    )


def _in_words(step: Taken | StepParts) -> str:
    seconds = step.seconds if isinstance(step, Taken) else step.total
    return f"{1000 * seconds:.0f} ({1000 * step.communication:.0f}) ms"


def _name(case: Case) -> str:
    layout, recompute = case
    return f"{layout}, recompute {recompute}"


def _share_of(profile: MeasuredProfile, share: float) -> MeasuredProfile:
    """What a rank has that has a share of a core."""
    if math.isclose(share, 1):
        return profile
    link = profile.link
    if link is not None:
        slower = {"bytes_per_second": link.bytes_per_second * share, "base_seconds": link.base_seconds / share}
        link = link.model_copy(update=slower)
    return profile.model_copy(
        update={
            "product_flops": profile.product_flops * share,
            "attention_flops": profile.attention_flops * share,
            "bandwidth": profile.bandwidth * share,
            "start_seconds": profile.start_seconds / share,
            "block_seconds": profile.block_seconds / share,
            "link": link,
        }
    )


if __name__ == "__main__":
    main()
