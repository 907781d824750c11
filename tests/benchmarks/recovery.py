"""How long a fault stops training, here and under stock Ray Train, in turns: ``python -m tests.benchmarks.recovery``.

The same small job on simulated nodes of two CPUs each. A worker is killed, or a node is removed without notice. What
counts is the time from then to the end of the first step after it.
"""

import argparse
import json
import logging
import os
import random
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, cast

import psutil
import ray
import ray.train
from ray._common.utils import get_default_ray_temp_dir
from ray.cluster_utils import Cluster
from ray.exceptions import RayError
from ray.train import FailureConfig, RunConfig, ScalingConfig, UserCallback
from ray.train.torch import TorchTrainer
from ray.util.state import list_actors

from boost_core.config import JobSpec, Layout
from boost_core.messages import (
    PLANNED_CAUSES,
    Cause,
    LogLine,
    Report,
    RestartReport,
    ShapeReport,
    StartReport,
    StepReport,
)
from service.gang.ray.gangs import RayGangs
from service.gang.status import GangPhase, GangReport, JobTag, Orders, PollRequest
from tests.benchmarks.figures import FIGURES, provenance
from tests.jobs import tiny_job, write_corpus

PATIENCE_SECONDS = 180.0  # for the start, and for the first step after the fault
LOOK_SECONDS = 0.1
BUSY_SECONDS = 5.0  # in which to see what other work there is
STEADY_STEPS = 30  # before the fault: several checkpoints and copies
TENSOR, NODE_CPUS = 2, 2
EVERY_STEPS = 10  # a checkpoint, and a copy in memory
MOST_STARTS = 3  # of a cluster
RANKS = {"RankWorker", "RayTrainWorker"}  # classes of actors
NEVER = float("inf")
PARTS = ("detect", "stop", "place", "start", "load", "first_step")

logger = logging.getLogger("recovery")


@dataclass(frozen=True)
class Scenario:
    """A fault.

    Attributes:
        name: What happens.
        kind: What is lost: a worker or a node.
        nodes: How many nodes of two CPUs there are, enough for a replica each.
        replicas: How many replicas the job may have at most; the nodes beyond are spare.
        aim: What the ratio of ours to stock is to be at most.
    """

    name: str
    kind: str
    nodes: int
    replicas: int
    aim: float

    @property
    def ranks(self) -> int:
        """How many ranks train before the fault."""
        return self.replicas * TENSOR

    @property
    def whole_again(self) -> bool:
        """Whether there is room for as many ranks after the fault."""
        return self.kind == "worker" or self.nodes > self.replicas


SCENARIOS = (
    Scenario("worker killed, two replicas of three left", "worker", 3, 3, 0.1),
    Scenario("worker killed, no replica left", "worker", 2, 1, 0.25),
    Scenario("node lost, two replicas of three left", "node", 3, 3, 0.1),
    Scenario("node lost, no replica left, a spare node", "node", 2, 1, 0.25),
)


@dataclass(frozen=True)
class Recovery:
    """What a fault came to.

    Attributes:
        seconds: From the fault to the end of the first step after it; infinite if there was none.
        parts: Seconds of it, one part after the other.
        ranks: How many ranks did that step.
        again: Steps that had to be computed again.
        whole_seconds: From the fault to the first step of as many ranks as before; ``None`` where there is no room.
        pause_seconds: Between two steps, to get there; ``None`` if the first step was of as many already.
        problem: Why there was no such step.
        launch_seconds: From the job's launch to the end of its first step.
        again_seconds: The same for its next gang, on nodes that have had ranks of the same service; ``None`` where
            nothing of the first is left to it, or not all nodes are.
        control: MB that each of the job's actors but the ranks has to itself, by class.
    """

    seconds: float
    parts: dict[str, float] = field(default_factory=dict)
    ranks: int = 0
    again: int = 0
    whole_seconds: float | None = None
    pause_seconds: float | None = None
    problem: str = ""
    launch_seconds: float = 0.0
    again_seconds: float | None = None
    control: dict[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Victim:
    """What a fault hits: a process, or the node that it is on."""

    pid: int
    node: str


class SimulatedNodes:
    """A Ray cluster on this machine: a head without CPUs, and nodes of two CPUs."""

    def __init__(self) -> None:
        os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
        # Ray writes the address there, wherever the head has its own.
        Path(get_default_ray_temp_dir()).mkdir(exist_ok=True)
        self._folder = tempfile.mkdtemp(prefix="recovery-")  # short: Ray puts sockets there
        self._cluster = Cluster()

    def start(self, count: int) -> None:
        """Start the head and so many nodes."""
        self._cluster.add_node(
            num_cpus=0,
            include_dashboard=True,
            dashboard_host="127.0.0.1",
            dashboard_port=_free_port(),
            temp_dir=self._folder,
        )
        for _ in range(count):
            self._cluster.add_node(num_cpus=NODE_CPUS)

    @property
    def address(self) -> str:
        """Where drivers connect to."""
        return str(self._cluster.address)

    def remove(self, node_id: str) -> None:
        """Kill a node, without notice."""
        (node,) = [node for node in self._cluster.worker_nodes if node.node_id == node_id]
        self._cluster.remove_node(node, allow_graceful=False)

    def close(self) -> None:
        """End all of it."""
        ray.shutdown()  # where a start has failed half-way
        self._cluster.shutdown()
        while Path(self._folder).exists():  # the last of Ray's processes may be about to write
            shutil.rmtree(self._folder, ignore_errors=True)
            time.sleep(LOOK_SECONDS)


@contextmanager
def simulated_nodes(count: int) -> Iterator[SimulatedNodes]:
    nodes = _started(count)
    try:
        yield nodes
    finally:
        nodes.close()


def _started(count: int) -> SimulatedNodes:
    for left in reversed(range(MOST_STARTS)):
        nodes = SimulatedNodes()
        try:
            nodes.start(count)
        except (RuntimeError, RayError, TimeoutError):  # now and then Ray's head hangs while it starts
            nodes.close()
            if not left:
                raise
            logger.exception("a cluster did not start; once more")
        else:
            break
    return nodes


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


class RunEnded(RuntimeError):
    """The job has ended, which it should not."""


class Training(ABC):
    """The job under one of the systems."""

    def until(self, done: Callable[[], Any], seconds: float) -> Any:
        """Look on until something is so; what it says then, or ``None`` when time is up."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self.look()
            if result := done():
                return result
            time.sleep(LOOK_SECONDS)
        return None

    @abstractmethod
    def look(self) -> None:
        """Take in what has happened."""

    @abstractmethod
    def steady(self) -> bool:
        """Whether all ranks have trained for a while."""

    @abstractmethod
    def first_step(self) -> float:
        """When the first step of all ended, by the wall clock."""

    @abstractmethod
    def victim(self) -> Victim:
        """The last rank."""

    @abstractmethod
    def recovery(self, since: float) -> Recovery | None:
        """What the fault at a time of the wall clock came to, once it is over."""

    def launch_again(self) -> float | None:
        """End it and launch it again; seconds to the end of its first step. ``None`` if that is as the first time."""
        return None

    @abstractmethod
    def close(self) -> None:
        """End it."""


class Ours(Training):
    """A gang of ours, polled as the scheduler does."""

    def __init__(self, address: str, spec: JobSpec, scenario: Scenario, folder: Path) -> None:
        self._spec, self._scenario = spec, scenario
        layouts = spec.layouts()
        self._orders = Orders(layouts[-1], tuple(layouts), Cause.LIMITS_CHANGED)
        self._gangs = RayGangs(address, None, folder / "secrets")
        self._gangs.connect()
        self._launch(attempt=1)

    def _launch(self, attempt: int) -> None:
        self._reports: list[GangReport] = []
        self._sequence, self._attempt = 0, attempt
        tag = JobTag("recovery", attempt, self._spec.name, "default", "anonymous")
        self._gangs.launch(tag, self._spec, self._orders)

    def look(self) -> None:
        (status,) = self._gangs.poll([PollRequest(("recovery", self._attempt), self._sequence, self._orders)])
        if isinstance(status, Exception):
            raise status
        if status is None or status.phase is GangPhase.FAILED:
            raise RunEnded(f"the gang has ended: {status.message if status else 'its supervisor is gone'}")
        self._reports += status.reports
        if status.reports:
            self._sequence = status.reports[-1].sequence

    def _of(self, kind: type[Report], since: float = 0.0) -> list[tuple[float, Any]]:
        timed = [(each.time.timestamp(), each.report) for each in self._reports if isinstance(each.report, kind)]
        return [(moment, report) for moment, report in timed if moment > since]

    def steady(self) -> bool:
        starts, steps = self._of(StartReport), self._of(StepReport)
        if not starts or not steps:
            return False
        _, start = starts[-1]
        return bool(start.world_size == self._scenario.ranks and steps[-1][1].step >= start.step + STEADY_STEPS)

    def first_step(self) -> float:
        return self._of(StepReport)[0][0]

    def victim(self) -> Victim:
        lines = [line.message for _, line in self._of(LogLine) if line.rank == self._scenario.ranks - 1]
        pid = [line.rpartition("pid ")[2].rstrip(")") for line in lines if " is up " in line][-1]
        return Victim(int(pid), self._of(ShapeReport)[-1][1].nodes[-1])

    def recovery(self, since: float) -> Recovery | None:
        restarts = [each for each in self._of(RestartReport, since) if each[1].cause not in PLANNED_CAUSES]
        if not restarts:
            return None
        ended, restart = restarts[0]
        starts = self._of(StartReport, since)
        first_start = [start for moment, start in starts if moment <= ended][-1]
        whole = next((moment for moment, start in starts if start.world_size == self._scenario.ranks), None)
        whole_ended = self._of(StepReport, whole)[:1] if whole else []
        if self._scenario.whole_again and not whole_ended:
            return None
        # The report counts from the last word that came before the fault.
        parts = restart.parts | {"detect": restart.parts["detect"] + ended - since - restart.seconds}
        return Recovery(
            seconds=ended - since,
            parts=parts,
            ranks=first_start.world_size,
            again=restart.step - restart.resumed_step,
            whole_seconds=whole_ended[0][0] - since if whole_ended else None,
            pause_seconds=self._pause(whole_ended[0][0]) if whole_ended and whole_ended[0][0] > ended else None,
        )

    def _pause(self, ended: float) -> float:
        return next(restart.seconds for moment, restart in self._of(RestartReport) if moment == ended)

    def launch_again(self) -> float:
        self._gangs.end("recovery", self._attempt)
        time.sleep(BUSY_SECONDS)  # for its processes to be gone
        launched = time.time()
        self._launch(self._attempt + 1)
        self.until(lambda: self._of(StepReport), PATIENCE_SECONDS)
        return self.first_step() - launched

    def close(self) -> None:
        self._gangs.end("recovery", self._attempt)
        self._gangs.close()


class Journal:
    """A file to which all processes of a stock run append what happens and when."""

    def __init__(self, path: str) -> None:
        self._path = path

    def note(self, kind: str, **more: Any) -> None:
        line = json.dumps({"kind": kind, "time": time.time(), "pid": os.getpid(), **more})
        with Path(self._path).open("a") as stream:
            stream.write(line + "\n")

    def report(self, report: Report) -> None:
        self.note(report.kind, **report.model_dump(include={"step", "world_size", "load_seconds"}))


class Noticed(UserCallback):
    """Notes when Ray Train has noticed a fault."""

    def __init__(self, path: str) -> None:
        self._journal = Journal(path)

    def after_exception(self, run_context: Any, worker_exceptions: dict[int, Exception]) -> None:
        self._journal.note("noticed", ranks=sorted(worker_exceptions))


def stock_rank(settings: dict[str, Any]) -> None:
    """What each of Ray Train's workers runs; pickled whole, so that this file need not be imported there."""
    import torch

    from boost_core.train import train

    context, journal = ray.train.get_context(), Journal(settings["journal"])
    rank, ranks = context.get_world_rank(), context.get_world_size()
    journal.note("entered", rank=rank, ranks=ranks, node=ray.get_runtime_context().get_node_id())
    if ranks % settings["tensor"]:
        raise ValueError(f"{ranks} workers are not whole tensor parallel groups of {settings['tensor']}")
    torch.set_num_threads(1)
    spec = JobSpec.model_validate_json(settings["spec"])
    train(spec.at(Layout(settings["tensor"], 1, ranks // settings["tensor"])), journal)


def run_stock(settings: dict[str, Any]) -> None:
    """Run the job under Ray Train, elastic and otherwise with its defaults; in a process of its own."""
    ray.init(settings["address"], log_to_driver=False)
    TorchTrainer(
        stock_rank,
        train_loop_config=settings,
        scaling_config=ScalingConfig(
            num_workers=cast(Any, (TENSOR, settings["most"])), resources_per_worker={"CPU": 1}
        ),
        run_config=RunConfig(
            name="recovery",
            storage_path=settings["storage"],
            failure_config=FailureConfig(max_failures=-1),
            callbacks=[cast(Any, Noticed(settings["journal"]))],
        ),
    ).fit()


Note = dict[str, Any]


class Stock(Training):
    """The same trainer under Ray Train."""

    def __init__(self, address: str, spec: JobSpec, scenario: Scenario, folder: Path) -> None:
        self._scenario, self._journal = scenario, folder / "journal.jsonl"
        self._read = 0  # bytes of the journal
        self._notes: list[Note] = []
        self._ended: dict[int, float] = {}  # when each process was gone
        settings = {
            "address": address, "spec": spec.model_dump_json(), "most": scenario.ranks, "tensor": TENSOR,
            "journal": str(self._journal), "storage": str(folder / "ray"),
        }  # fmt: skip
        command = [sys.executable, "-m", "tests.benchmarks.recovery", "--stock", json.dumps(settings)]
        self._log = folder / "stock.log"
        with self._log.open("w") as log:
            self._driver = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)

    def look(self) -> None:
        if self._driver.poll() is not None:
            raise RunEnded(f"Ray Train has ended:\n{self._log.read_text()[-4000:]}")
        if self._journal.exists():
            with self._journal.open() as stream:
                stream.seek(self._read)
                whole_lines = stream.read().rpartition("\n")[0]
            self._read += len(whole_lines) + 1 if whole_lines else 0
            self._notes += [json.loads(line) for line in whole_lines.splitlines()]
        for note in self._of("entered"):
            if note["pid"] not in self._ended and not _alive(note["pid"]):
                self._ended[note["pid"]] = time.time()

    def _of(self, kind: str, since: float = 0.0) -> list[Note]:
        return [note for note in self._notes if note["kind"] == kind and note["time"] > since]

    def steady(self) -> bool:
        starts, steps = self._of("started"), self._of("progress")
        if not starts or not steps:
            return False
        return bool(
            starts[-1]["world_size"] == self._scenario.ranks and steps[-1]["step"] >= starts[-1]["step"] + STEADY_STEPS
        )

    def first_step(self) -> float:
        return float(self._of("progress")[0]["time"])

    def victim(self) -> Victim:
        last = [note for note in self._of("entered") if note["rank"] == self._scenario.ranks - 1][-1]
        return Victim(last["pid"], last["node"])

    def recovery(self, since: float) -> Recovery | None:
        entered = self._of("entered", since)
        steps = [step for step in self._of("progress", since) if step["pid"] in {note["pid"] for note in entered}]
        if not steps:
            return None
        start = next(note for note in self._of("started", since) if note["pid"] == steps[0]["pid"])
        whole = next((each for each in self._of("started", since) if each["world_size"] == self._scenario.ranks), None)
        whole_ended = self._of("progress", whole["time"])[:1] if whole else []
        if self._scenario.whole_again and not whole_ended:
            return None
        return Recovery(
            seconds=steps[0]["time"] - since,
            parts=self._parts(since, start, steps[0]["time"]),
            ranks=start["world_size"],
            again=max(note["step"] for note in self._of("progress") if note["time"] < start["time"]) - start["step"],
            whole_seconds=whole_ended[0]["time"] - since if whole_ended else None,
        )

    def _parts(self, since: float, start: Note, first_step: float) -> dict[str, float]:
        noticed = [note["time"] for note in self._of("noticed", since) if note["time"] < start["time"]]
        before = {note["pid"] for note in self._of("entered") if note["time"] < since}
        gone = max(self._ended.get(pid, 0.0) for pid in before)
        entered = max(note["time"] for note in self._of("entered", since) if note["time"] < start["time"])
        loads = start["time"] - start["load_seconds"]
        marks = [since, noticed[0] if noticed else gone, gone, entered, loads, start["time"], first_step]
        # What comes earlier than the mark before it has taken no time of its own.
        for number in range(1, len(marks)):
            marks[number] = max(marks[number - 1 : number + 1])
        return {part: marks[number + 1] - marks[number] for number, part in enumerate(PARTS)}

    def close(self) -> None:
        self._driver.kill()
        self._driver.wait()


def _alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


SYSTEMS: dict[str, Callable[[str, JobSpec, Scenario, Path], Training]] = {"ours": Ours, "stock Ray Train": Stock}
Measured = dict[tuple[Scenario, str], list[Recovery]]


def job(corpus: Path, checkpoints: Path, replicas: int) -> JobSpec:
    """A small CoLA in fp32, tp 2, with so many replicas at most."""
    return tiny_job(
        corpus, checkpoints,
        training={
            "steps": 1_000_000, "evaluate_every_steps": 1_000_000, "global_batch_size": 12, "micro_batch_size": 2,
        },
        checkpoint={"every_steps": EVERY_STEPS, "keep_last": 3},
        elasticity={"data_parallel_size": {"min": 1, "max": replicas}},
        fault_tolerance={"memory_copy_every_steps": EVERY_STEPS, "max_restarts": 1000},
    )  # fmt: skip


def measure(system: str, scenario: Scenario, pause_seconds: float) -> Recovery:
    """Start the job on a cluster of its own, let it train, strike, and look on."""
    with tempfile.TemporaryDirectory(prefix="recovery-job-") as name, simulated_nodes(scenario.nodes) as nodes:
        folder = Path(name)
        spec = job(write_corpus(folder / "corpus"), folder / "checkpoints", scenario.replicas)
        launched = time.time()
        training = SYSTEMS[system](nodes.address, spec, scenario, folder)
        try:
            if not training.until(training.steady, PATIENCE_SECONDS):
                return Recovery(NEVER, problem=f"did not train within {PATIENCE_SECONDS:.0f} s of its start")
            victim, launch_seconds = training.victim(), training.first_step() - launched
            control = control_memory(nodes.address)
            time.sleep(pause_seconds)
            since = time.time()
            if scenario.kind == "worker":
                os.kill(victim.pid, signal.SIGKILL)
            else:
                nodes.remove(victim.node)
            found: Recovery | None = training.until(lambda: training.recovery(since), PATIENCE_SECONDS)
            found = found or Recovery(NEVER, problem=f"did not go on within {PATIENCE_SECONDS:.0f} s of the fault")
            again_seconds = training.launch_again() if scenario.kind == "worker" else None
            return replace(found, launch_seconds=launch_seconds, again_seconds=again_seconds, control=control)
        except RunEnded as ended:
            logger.exception("a run has ended")
            return Recovery(NEVER, problem=str(ended).partition("\n")[0])
        finally:
            training.close()


def control_memory(address: str) -> dict[str, float]:
    """MB that each of a cluster's actors has to itself, by class, without ranks."""
    actors = list_actors(address=address, filters=[("state", "=", "ALIVE")], raise_on_missing_output=False)
    return {
        actor.class_name: psutil.Process(actor.pid).memory_full_info().uss / 1e6
        for actor in actors
        if actor.class_name not in RANKS
    }


def measure_all(rounds: int) -> tuple[Measured, list[float]]:
    """All scenarios under both systems, in turns that change from round to round; and what other work there was.

    That is the share of the CPUs in use just before each run.
    """
    busy: list[float] = []
    chance = random.Random(0)  # so that faults come at all moments between two looks of a controller
    measured: Measured = {(scenario, system): [] for scenario in SCENARIOS for system in SYSTEMS}
    for number in range(rounds):
        for scenario in SCENARIOS:
            for system in list(SYSTEMS)[:: 1 if number % 2 == 0 else -1]:
                busy.append(psutil.cpu_percent(BUSY_SECONDS) / 100)
                recovery = measure(system, scenario, 2 + chance.uniform(0, 2))
                logger.info("round %d, %s, %s: %s", number + 1, scenario.name, system, recovery)
                measured[scenario, system].append(recovery)
    return measured, busy


def table(measured: Measured) -> list[str]:
    """A row a scenario and system."""
    parts = [part.replace("_", " ") for part in PARTS]
    header = ["", "", "to the first step", *parts, "ranks", "steps repeated", "full size again"]
    rows = [_row(scenario, system, runs) for (scenario, system), runs in measured.items()]
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]


def _row(scenario: Scenario, system: str, runs: Sequence[Recovery]) -> list[str]:
    recovered = [run for run in runs if run.parts]
    totals = sorted(run.seconds for run in runs)
    parts = [_median([run.parts.get(part, 0.0) for run in recovered]) for part in PARTS]
    ranks = " or ".join(sorted({str(run.ranks) for run in recovered}))
    again = _median([run.again for run in recovered], "{:.0f}")
    whole = _median([run.whole_seconds for run in recovered if run.whole_seconds is not None])
    pauses = [run.pause_seconds for run in recovered if run.pause_seconds is not None]
    if pauses:
        whole += f", stopped for {_median(pauses)}"
    total = f"**{_median(totals)}** ({_seconds(totals[0])} – {_seconds(totals[-1])})"
    return [scenario.name, system, total, *parts, f"{scenario.ranks} → {ranks}", again, whole]


def started(measured: Measured) -> list[str]:
    """A row a number of ranks and system: how soon it trains, and what its control takes."""
    rows = [["ranks", "", "launch to the first step", "next launch", "actors other than ranks"], ["---"] * 5]
    for (scenario, system), runs in measured.items():
        if scenario in (SCENARIOS[0], SCENARIOS[1]):
            launches = [run.launch_seconds for run in runs if run.launch_seconds]
            again = [run.again_seconds for run in runs if run.again_seconds is not None]
            actors = {name: [run.control.get(name, 0.0) for run in runs] for run in runs for name in run.control}
            parts = [f"{name} {_median(values, '{:.0f} MB')}" for name, values in sorted(actors.items())]
            seconds = [_median(values, "{:.1f} s") for values in (launches, again)]
            rows.append([str(scenario.ranks), system, *seconds, ", ".join(parts)])
    return ["| " + " | ".join(row) + " |" for row in rows]


def _median(values: Sequence[float], form: str = "{:.1f}") -> str:
    return _seconds(statistics.median(values), form) if values else "–"


def _seconds(value: float, form: str = "{:.1f}") -> str:
    return form.format(value) if value < NEVER else "never"


def verdict(scenario: Scenario, measured: Measured) -> str:
    """A sentence about the ratio of ours to stock."""
    ours, stock = ([run.seconds for run in measured[scenario, system]] for system in SYSTEMS)
    if NEVER in (*ours, *stock):
        problems = [
            f"{system}, round {number + 1}: {run.problem}"
            for system in SYSTEMS
            for number, run in enumerate(measured[scenario, system])
            if run.problem
        ]
        return f"- {scenario.name}: no ratio. {'; '.join(problems)}."
    ratio = statistics.median(ours) / statistics.median(stock)
    rounds = ", ".join(f"{mine / theirs:.2f}" for mine, theirs in zip(ours, stock, strict=True))
    within = "within" if ratio <= scenario.aim else "**not within**"
    return f"- {scenario.name}: {ratio:.2f} of stock's time (by round {rounds}), {within} the aim of {scenario.aim}."


def text(measured: Measured, busy: Sequence[float]) -> str:
    """All that goes into the file."""
    rounds = len(next(iter(measured.values())))
    return "\n".join(
        [
            *table(measured), "", *[verdict(scenario, measured) for scenario in SCENARIOS], "",
            *started(measured), "",
            NOTES.format(rounds=rounds, every=EVERY_STEPS), "",
            f"{provenance()[:-1]}, Ray {version('ray')}, on {datetime.now(UTC):%Y-%m-%d}. Other work took "
            f"{statistics.median(busy):.0%} of the CPUs before a run in the median, and {max(busy):.0%} at most.", "",
        ]
    )  # fmt: skip


NOTES = """\
Seconds from the fault to the end of the first step after it, and their parts: medians of {rounds} rounds, for the total
also the minimum and the maximum. Ratios are between medians. Each run has its own simulated cluster. The job: a small
CoLA in fp32 on CPU, tp 2, a checkpoint and a copy in memory every {every} steps. *Full size again*: from the fault
until as many ranks train as before; where that comes later than the first step, the gang has continued with the
remaining replicas and has stopped once more to take in the replaced one.

Stock is `TorchTrainer` with `ScalingConfig(num_workers=(2, 2 × replicas), resources_per_worker={{"CPU": 1}})`,
`FailureConfig(max_failures=-1)` and otherwise defaults; it runs the same trainer, which resumes from its own
checkpoints. Ray Train cannot count in multiples of tp: nodes of two CPUs are what makes its counts even here, and the
trainer refuses odd ones. In the scenario with a spare node it is limited to one replica, or it would use the spare node
from the start.

The parts of ours are from the restart's report, with *detect* starting at the fault. Stock's are observed from outside:
*detect* ends when its callback hears of the fault, *stop* when the last old process is gone, *place* when the last rank
has entered its function (with the process group initialized), *start* when it begins to load. The last rank is killed,
or its node removed; our supervisor and Ray Train's controller are both on the head, which stays.

Launch: from the call that starts the job, with nodes and cluster up; stock's includes its driver's imports. The next
launch, as after a pause or of another job, finds the nodes' fork servers running; stock starts as it did the first
time. Memory is a process's private memory; there is one `TrainStateActor` per cluster, and stock's driver, which lives
as long as its job, is not included."""


def main() -> None:
    """Measure and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path, default=FIGURES / "recovery.md")
    parser.add_argument("--stock", help=argparse.SUPPRESS)  # what this program starts for itself
    arguments = parser.parse_args()
    if arguments.stock:
        run_stock(json.loads(arguments.stock))
        return
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text(text(*measure_all(arguments.rounds)))


if __name__ == "__main__":
    main()
