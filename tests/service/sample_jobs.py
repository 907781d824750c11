"""A job with a life behind it, for tests of what people see of jobs."""

import math
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.config import ParallelismConfig
from boost_core.messages import Cause, LogLine, RankTimesReport, Report, ShapeReport, StepReport
from service.jobs.model import NODES, JobRecord
from service.jobs.store import JobStore
from tests.service.records import (
    a_checkpoint,
    a_fault,
    a_restart,
    a_spec,
    a_start,
    a_step,
    an_evaluation,
    an_interruption,
    start,
)

STEPS = 200
DONE = 120
FAULT_AT, JOINED_AT = 60, 90  # between these steps, half the ranks are gone
SLOW_RANK = 2
STEP_TIME = timedelta(milliseconds=20)
NODE_IDS = ("node-a", "node-b")


def sample_spec(**changes: Any) -> Any:
    parallelism = {"tensor_parallel_size": 2, "data_parallel_size": 2}
    training = {"steps": STEPS, "sequence_length": 64, "global_batch_size": 32}
    return a_spec(**{"parallelism": parallelism, "training": training} | changes)


def loss_at(step: int) -> float:
    return 2 + 6 * math.exp(-step / 40)


def step_report(step: int, **changes: Any) -> StepReport:
    numbers = {
        "steps": STEPS,
        "eta_seconds": (STEPS - step) / 2,
        "loss": loss_at(step),
        "tokens_per_second": 2000.0 + 10 * (step % 7),
    }
    return a_step(step, **numbers | changes)


def shape_report(data: int = 2) -> ShapeReport:
    nodes = [node for node in NODE_IDS[:data] for _ in range(2)]
    return ShapeReport(tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=data, nodes=nodes)


def log_line(message: str, rank: int = 0, level: str = "INFO") -> LogLine:
    return LogLine(rank=rank, level=level, message=message)


def rank_times(step: int, slow: float = 0.19) -> RankTimesReport:
    busy = [0.1, 0.101, slow, 0.099]
    return RankTimesReport(step=step, busy_seconds=busy[:2] if FAULT_AT < step <= JOINED_AT else busy)


class SampleJob:
    """A job whose gang reports what the test has it report, one step's time after the other."""

    def __init__(self, store: JobStore, folder: Path, **changes: Any) -> None:
        self.store = store
        self.id = store.create(sample_spec(**changes), f"file://{folder}").id
        self._sequence = 0
        self._time = datetime.now(UTC)

    @property
    def record(self) -> JobRecord:
        return self.store.get(self.id)

    def start(self) -> None:
        start(self.store, self.id)
        self._time = datetime.now(UTC)
        self.report(shape_report(), a_start())

    def report(self, *reports: Report) -> None:
        numbered = []
        for report in reports:
            self._sequence += 1
            self._time += STEP_TIME
            numbered.append((self._sequence, self._time, report))
        self.store.append_reports(self.id, 1, numbered)

    def train(self, until: int = DONE) -> None:
        """Train with a rank that is slow, lose a worker on the way, and get one back."""
        reports: list[Report] = [log_line("training begins"), log_line("this rank is late", SLOW_RANK, "WARNING")]
        for step in range(1, until + 1):
            reports.append(step_report(step))
            if step % 5 == 0:
                reports.append(rank_times(step))
            if step % 40 == 0:
                sets = tuple(named.name for named in self.record.spec.data.validation)
                reports.append(an_evaluation(step, loss_at(step) + 0.1, sets))
            if step == FAULT_AT:
                reports += [an_interruption(step), shape_report(1), a_restart(step, Cause.WORKER_LOST), a_fault(step)]
            if step == JOINED_AT:
                joined = {"resumed_step": step, "message": "node-b has joined"}
                reports.append(an_interruption(step, Cause.NODE_JOINED))
                reports += [shape_report(), a_restart(step, Cause.NODE_JOINED, **joined)]
        self.report(*reports)

    def save(self, *steps: int) -> None:
        """Write checkpoints of these steps."""
        folder = CheckpointFolder(self.record.checkpoint_url)
        for step in steps:
            folder.prepare(step)
            (Path(folder.step_url(step).removeprefix("file://")) / "part").write_bytes(b"12345")
            folder.commit_written(self.record.spec, ParallelismConfig(), step, step * 8, {"part": 0xCBF53A1C})
            self.report(a_checkpoint(step))


def show_nodes(store: JobStore, **labels: str) -> None:
    """Have the service see two nodes of four GPUs."""
    store.keep_snapshot(
        NODES,
        [
            {
                "node_id": name,
                "labels": labels,
                "total": {"CPU": 8.0, "GPU": 4.0},
                "free": {"CPU": 6.0, "GPU": free},
                "draining": name == "node-b",
            }
            for name, free in zip(NODE_IDS, (2.0, 4.0), strict=True)
        ],
    )
