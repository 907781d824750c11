"""A cluster in a file, which lives on when the service is killed. Its gangs play what is written for their jobs."""

import sqlite3
import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

from boost_core.config import JobSpec, Layout
from boost_core.messages import Cause, Report, WorkerCommand
from boost_core.plan.machine import NOMINAL, Basis
from service.gang.status import GangPhase, GangReport, GangStatus, JobTag, NodeCapacity, Orders, PollRequest
from tests.service.records import (
    a_checkpoint,
    a_log_line,
    a_restart,
    a_shape,
    a_start,
    a_step,
    an_interruption,
)

_FINAL = (GangPhase.SUCCEEDED, GangPhase.FAILED)
_TABLES = """
CREATE TABLE IF NOT EXISTS gangs (
    job_id TEXT, attempt INTEGER, name TEXT, tensor INTEGER, pipeline INTEGER, data INTEGER,
    stage INTEGER DEFAULT 0, seen INTEGER DEFAULT 0, paused INTEGER DEFAULT 0, PRIMARY KEY (job_id, attempt));
CREATE TABLE IF NOT EXISTS launches (job_id TEXT, attempt INTEGER, polls INTEGER DEFAULT 0);
CREATE TABLE IF NOT EXISTS drills (job_id TEXT, attempt INTEGER, kind TEXT);
"""


@dataclass(frozen=True)
class Stage:
    """Part of a gang's life. It is over when its reports have been stored and its phase has been seen again after."""

    phase: GangPhase
    reports: tuple[Report, ...] = ()
    lasts: bool = False  # for ever, unless somebody ends it


STARTING = Stage(GangPhase.STARTING, (a_log_line("workers start"),))
TRAINING = Stage(GangPhase.TRAINING, (a_start(), a_shape(), a_step(1)))
RECOVERING = Stage(GangPhase.RECOVERING, (an_interruption(1),))
RECOVERED = Stage(GangPhase.TRAINING, (a_restart(1, Cause.WORKER_LOST), a_step(2), a_checkpoint(2)))
SAVING = Stage(GangPhase.SAVING, (a_log_line("the store is away"),))
SUCCEEDED = Stage(GangPhase.SUCCEEDED, (a_step(10), a_checkpoint(10)), lasts=True)
FAILED = Stage(GangPhase.FAILED, (a_log_line("it diverges"),), lasts=True)

Life = Sequence[Stage]  # a gang whose last stage ends is lost
LOST: Life = (STARTING, TRAINING)
ENDLESS: Life = (STARTING, replace(TRAINING, lasts=True))
SUCCESS: Life = (STARTING, TRAINING, SUCCEEDED)
LIVES: Mapping[str, Sequence[Life]] = {  # by job's name and attempt
    "succeeds": [SUCCESS],
    "recovers": [(STARTING, TRAINING, RECOVERING, RECOVERED, SAVING, SUCCEEDED)],
    "fails": [(STARTING, TRAINING, FAILED)],
    "fails-as-it-starts": [(STARTING, FAILED)],
    "is-lost-as-it-starts": [(STARTING,), (STARTING,)],
    "is-lost": [LOST, SUCCESS],
    "is-lost-for-good": [LOST],
    "fails-at-first": [(STARTING, TRAINING, FAILED), SUCCESS],
    "goes-on-and-on": [ENDLESS],
    "goes-on-and-on-at-first": [ENDLESS, SUCCESS],
}


class FileCluster:
    """One node's gangs, on which any number of processes look."""

    def __init__(self, path: Path, cpus: int = 2) -> None:
        self._path, self._cpus = path, float(cpus)
        with closing(self._open()) as file:
            file.executescript(_TABLES)

    def connect(self) -> None: ...

    def close(self) -> None: ...

    def check(self) -> None: ...

    def nodes(self) -> list[NodeCapacity]:
        with closing(self._open()) as file:
            (taken,) = file.execute("SELECT COALESCE(SUM(tensor * pipeline * data), 0) FROM gangs").fetchone()
        return [NodeCapacity("node", {"CPU": self._cpus}, {"CPU": self._cpus - taken})]

    def alive(self) -> set[tuple[str, int]]:
        with closing(self._open()) as file:
            return set(file.execute("SELECT job_id, attempt FROM gangs"))

    def launches(self, job_id: str, polls: int = 0) -> list[int]:
        """The attempts of a job that were started, each as often as it was and polled so often afterwards."""
        query = "SELECT attempt FROM launches WHERE job_id = ? AND polls >= ? ORDER BY rowid"
        with closing(self._open()) as file:
            return [attempt for (attempt,) in file.execute(query, [job_id, polls])]

    def drills(self, job_id: str) -> list[str]:
        with closing(self._open()) as file:
            return [kind for (kind,) in file.execute("SELECT kind FROM drills WHERE job_id = ?", [job_id])]

    def launch(self, tag: JobTag, spec: JobSpec, orders: Orders, basis: Basis = NOMINAL) -> None:
        assert orders.target is not None
        layout = orders.target
        values = [tag.job_id, tag.attempt, spec.name, layout.tp, layout.pp, layout.dp]
        columns = "job_id, attempt, name, tensor, pipeline, data"
        with closing(self._open()) as file:
            file.execute("BEGIN IMMEDIATE")
            begun = file.execute(f"INSERT OR IGNORE INTO gangs ({columns}) VALUES (?, ?, ?, ?, ?, ?)", values)
            if begun.rowcount:
                file.execute("INSERT INTO launches (job_id, attempt) VALUES (?, ?)", [tag.job_id, tag.attempt])
            file.execute("COMMIT")

    def poll(self, requests: Sequence[PollRequest]) -> list[GangStatus | None]:
        return [self._poll(request) for request in requests]

    def _poll(self, request: PollRequest) -> GangStatus | None:
        with closing(self._open()) as file:
            file.execute("BEGIN IMMEDIATE")
            gang = file.execute("SELECT * FROM gangs WHERE job_id = ? AND attempt = ?", request.gang).fetchone()
            status = gang and _go_on(file, gang, request.after_sequence, request.orders)
            file.execute("COMMIT")
        return status

    def wait_for_updates(self, seconds: float) -> set[tuple[str, int]]:
        time.sleep(seconds)  # it has nothing to tell before the next pass
        return set()

    def ask(self, job_id: str, attempt: int, command: WorkerCommand) -> None:
        with closing(self._open()) as file:
            file.execute("INSERT INTO drills VALUES (?, ?, ?)", [job_id, attempt, command.kind])

    def end(self, job_id: str, attempt: int) -> None:
        with closing(self._open()) as file:
            file.execute("DELETE FROM gangs WHERE job_id = ? AND attempt = ?", [job_id, attempt])

    def _open(self) -> sqlite3.Connection:
        file = sqlite3.connect(self._path, timeout=30, isolation_level=None)
        file.execute("PRAGMA synchronous = OFF")  # it outlives processes, not machines
        return file


def _go_on(
    file: sqlite3.Connection, gang: tuple[str, int, str, int, int, int, int, int, int], stored: int, orders: Orders
) -> GangStatus | None:
    job_id, attempt, name, tensor, pipeline, data, stage, seen, paused = gang
    life = LIVES[name][attempt - 1]
    if orders.target is None and life[stage].phase not in _FINAL:
        paused = 1
    elif not paused and not life[stage].lasts and stored >= len(_told(life, stage)):
        stage, seen = (stage + 1, 0) if seen else (stage, 1)
    if stage == len(life):
        file.execute("DELETE FROM gangs WHERE job_id = ? AND attempt = ?", [job_id, attempt])
        return None
    values = [stage, seen, paused, job_id, attempt]
    file.execute("UPDATE gangs SET stage = ?, seen = ?, paused = ? WHERE job_id = ? AND attempt = ?", values)
    newest = "(SELECT MAX(rowid) FROM launches WHERE job_id = ? AND attempt = ?)"
    file.execute(f"UPDATE launches SET polls = polls + 1 WHERE rowid = {newest}", [job_id, attempt])
    phase = GangPhase.PAUSED if paused else life[stage].phase
    told = enumerate(_told(life, stage), 1)
    reports = [GangReport(number, datetime.now(UTC), report) for number, report in told if number > stored]
    layout = None if phase is GangPhase.STARTING else Layout(tensor, pipeline, data)
    return GangStatus(phase, f"stage {stage}: {phase}", reports, layout)


def _told(life: Life, stage: int) -> list[Report]:
    return [report for each in life[: stage + 1] for report in each.reports]
