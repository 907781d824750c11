"""Two schedulers on one PostgreSQL while either is killed or stopped, and the database crashes, again and again."""

import random
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from pathlib import Path

import pytest
from sqlalchemy import select
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

from service.jobs.database import migrate
from service.jobs.model import JobRecord
from service.jobs.states import TERMINAL_STATES, JobState
from service.jobs.store import JobStore
from service.jobs.tables import EventRow
from tests.postgres import PostgresServer, postgres_server
from tests.service.crash_matrix import LIVES, User
from tests.service.file_cluster import FileCluster
from tests.service.replica import LEASE_SECONDS

pytestmark = pytest.mark.nightly

JOBS = 50
DEADLINE_SECONDS = 240
ENDS = {  # the states that lives come to in the end, and the attempts that they take
    "succeeds": (["SUCCEEDED"], 1),
    "fails": (["FAILED"], 1),
    "is lost": (["SUCCEEDED"], 2),
    "is cancelled": (["CANCELLED"], 1),
    "is paused and resumed": (["SUCCEEDED"], 2),
    "is retried and succeeds": (["FAILED", "SUCCEEDED"], 2),
}


def is_retried_and_succeeds(user: User) -> list[JobRecord]:
    job = user.submit("fails-at-first")
    return [user.store.retry(job.id) if job.state is JobState.FAILED else job]


OURS = LIVES | {"is retried and succeeds": is_retried_and_succeeds}


class Replicas:
    """Processes that are started again when they have been killed."""

    def __init__(self, database_url: str, folder: Path) -> None:
        self._command = [sys.executable, "-m", "tests.service.replica", database_url, str(folder / "cluster.db")]
        self._log = folder / "replicas.log"
        self._processes = [self._start() for _ in range(2)]

    def _start(self) -> subprocess.Popen[bytes]:
        with self._log.open("ab") as log:
            return subprocess.Popen(self._command, stdout=log, stderr=log)

    def kill(self, index: int) -> None:
        self._processes[index].kill()
        self._processes[index].wait()
        self._processes[index] = self._start()

    def stop_for_a_while(self, index: int) -> None:
        """Until another one has taken it for dead."""
        self._processes[index].send_signal(signal.SIGSTOP)
        time.sleep(1.5 * LEASE_SECONDS)
        self._processes[index].send_signal(signal.SIGCONT)

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(30)


class Chaos(threading.Thread):
    """What goes wrong, in turns, until it is told to end."""

    def __init__(self, replicas: Replicas, postgres: PostgresServer) -> None:
        super().__init__(name="chaos")
        self.done: Counter[str] = Counter()
        self.enough = threading.Event()
        self._replicas, self._postgres, self._chance = replicas, postgres, random.Random(0)

    def run(self) -> None:
        while not self.enough.wait(self._chance.uniform(0.2, 1.5)):
            what = ("kill", "stop", "restart database")[self.done.total() % 3]
            if what == "kill":
                self._replicas.kill(self._chance.randrange(2))
            elif what == "stop":
                self._replicas.stop_for_a_while(self._chance.randrange(2))
            else:
                self._postgres.restart()
            self.done[what] += 1


@pytest.mark.timeout(2 * DEADLINE_SECONDS)
def test_each_job_ends_once_whoever_dies(tmp_path: Path) -> None:
    with postgres_server() as postgres:
        url = postgres.create_database()
        migrate(url)
        replicas = Replicas(url, tmp_path)
        chaos = Chaos(replicas, postgres)
        chaos.start()
        try:
            records = use(JobStore(url))
        finally:
            chaos.enough.set()
            chaos.join()
            cluster = FileCluster(tmp_path / "cluster.db")
            deadline = time.monotonic() + 30
            while cluster.alive() and time.monotonic() < deadline:
                time.sleep(0.1)
            replicas.close()
        assert min(chaos.done[what] for what in ("kill", "stop", "restart database")) >= 1, chaos.done
        assert cluster.alive() == set()
        store = JobStore(url)
        assert len(store.page(limit=2 * JOBS)[0]) == JOBS
        for life, job in records:
            ends, attempts = ENDS[life]
            story = events_of(store, job.id)
            states = [data["state"] for kind, _, data in story if kind == "state"]
            assert [state for state in states if state in TERMINAL_STATES] == ends, (life, job, states)
            # One that a stopped scheduler started when it woke up is ended before anybody hears of it.
            assert cluster.launches(job.id, polls=1) == list(range(1, attempts + 1)), (life, job, states)
            for attempt in range(1, attempts + 1):
                sequences = [sequence for _, (number, sequence), _ in story if sequence and number == attempt]
                assert sequences == list(range(1, len(sequences) + 1)), (life, job)


def use(store: JobStore) -> list[tuple[str, JobRecord]]:
    """Submit jobs and see them through; whatever fails is tried again."""
    lives = [list(ENDS)[number % len(ENDS)] for number in range(JOBS)]
    users = [User(store, f"user {number}") for number in range(JOBS)]
    records: dict[int, JobRecord] = {}
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not (len(records) == JOBS and all(job.finished for job in records.values())):
        assert time.monotonic() < deadline, [job for job in records.values() if not job.finished]
        for number, (life, user) in enumerate(zip(lives, users, strict=True)):
            if number not in records or not records[number].finished:
                try:
                    (records[number],) = OURS[life](user)
                except DBAPIError:
                    continue
        time.sleep(0.2)
    return [(life, records[number]) for number, life in enumerate(lives)]


def events_of(store: JobStore, job_id: str) -> list[tuple[str, tuple[int, int | None], dict]]:
    with Session(store.engine) as session:
        rows = session.scalars(select(EventRow).where(EventRow.job_id == job_id).order_by(EventRow.id))
        return [(row.kind, (row.attempt, row.sequence), row.data) for row in rows]
