"""Short jobs on a service whose parts die all the time: replicas of the API, the database, the object store.

``python -m tests.benchmarks.chaos --jobs 60 --surplus 1940`` writes docs/figures/chaos.md. All is real: PostgreSQL,
the S3 server, a Ray cluster, two replicas of ``boost serve``, every gang. Some jobs are cancelled, some paused and
resumed, some fail. The surplus waits behind the others, in one group, and is cancelled together once all are submitted.
"""

import argparse
import logging
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from boost_core.checkpoint.folder import CheckpointFolder
from service.client import ApiError, Client, ServiceUnreachable
from service.jobs.model import JobEvent, JobRecord
from service.jobs.states import TERMINAL_STATES, JobState
from tests.benchmarks.figures import FIGURES, write_table
from tests.elastic.ray_cluster import Nodes
from tests.jobs import tiny_job, write_corpus
from tests.postgres import PostgresServer, postgres_server
from tests.s3 import BUCKET, S3Server, s3_server
from tests.service.conftest import free_port

logger = logging.getLogger(__name__)

BOOST = Path(sys.executable).parent / "boost"
REPLICAS = 2
STEPS = 12
SUBMITTERS = 4
QUIET_SECONDS = (4.0, 10.0)  # between two faults
OUTAGE_SECONDS = (3.0, 12.0)  # of the object store
PATIENCE_SECONDS = 600.0  # for all jobs to come to their ends after the last fault
# What becomes of a job, and the state that it must end in. One in ten of each of the first three.
FATES = {"cancelled": JobState.CANCELLED, "paused": JobState.SUCCEEDED, "doomed": JobState.FAILED}
UNFINISHED = [state for state in JobState if state not in TERMINAL_STATES]
SURPLUS = "surplus"
IN_TIME = {"cancelled", SURPLUS}  # jobs that may have succeeded before they were cancelled


class Replica:
    """One ``boost serve``, which is started again when it is killed."""

    def __init__(self, number: int, folder: Path, environment: dict[str, str]) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        own = {"BOOST_HOME": str(folder / "home"), "BOOST_PORT": str(self.port)}
        self._environment, self.log = os.environ | environment | own, folder / f"replica-{number}.log"
        self.start()

    def start(self) -> None:
        with self.log.open("ab") as log:
            self._process = subprocess.Popen([BOOST, "serve"], env=self._environment, stdout=log, stderr=log)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def end(self) -> None:
        self._process.send_signal(signal.SIGTERM)
        self._process.wait(60)


@dataclass
class Chaos:
    """One run.

    Attributes:
        replicas: The services.
        database: Theirs.
        store: That of the checkpoints.
        chance: Draws faults and fates.
        done: How often each fault has been brought about.
        fates: By job, what was to become of it.
        failures: What has gone wrong in threads.
    """

    replicas: list[Replica]
    database: PostgresServer
    store: S3Server
    chance: random.Random
    done: Counter[str] = field(default_factory=Counter)
    fates: dict[str, str] = field(default_factory=dict)
    failures: list[Exception] = field(default_factory=list)

    def run(self, specs: list[tuple[str, dict[str, Any]]]) -> None:
        """Have all jobs submitted while parts die, and go on with that until all have ended.

        Args:
            specs: Fate and spec of each job.
        """
        over = threading.Event()
        breaking = threading.Thread(target=self._guarded(lambda: self._break(over)))
        breaking.start()
        shares = [specs[number::SUBMITTERS] for number in range(SUBMITTERS)]
        submitting = [threading.Thread(target=self._guarded(partial(self._submit, share))) for share in shares]
        for thread in submitting:
            thread.start()
        for thread in submitting:
            thread.join()
        while self.client().cancel_many({"group": SURPLUS, "state": [str(state) for state in UNFINISHED]}).remaining:
            pass
        few = sum(fate != SURPLUS for fate, _ in specs) // 10
        self.until(lambda: self._unfinished() < few)
        over.set()
        breaking.join()
        self.until(lambda: self._unfinished() == 0)

    def until(self, condition: Callable[[], bool]) -> None:
        """Wait for something."""
        deadline = time.monotonic() + PATIENCE_SECONDS * (1 + len(self.fates) / 50)
        while not condition():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{self._unfinished()} jobs have not come to their end")
            time.sleep(1.0)

    def client(self) -> Client:
        """A client of any replica; what it asks for it tries for long, there or later."""
        return Client(self.chance.choice(self.replicas).url, retry_seconds=60.0)

    def _guarded(self, work: Callable[[], None]) -> Callable[[], None]:
        def guarded() -> None:
            try:
                work()
            except Exception as error:
                logger.exception("a thread has failed")
                self.failures.append(error)

        return guarded

    def jobs(self, states: Collection[JobState] = ()) -> Iterator[JobRecord]:
        """All jobs in these states; without any, all."""
        with self.client() as client:
            page = client.list(states, limit=500)
            yield from page.jobs
            while page.next_cursor is not None:
                page = client.list(states, limit=500, cursor=page.next_cursor)
                yield from page.jobs

    def _unfinished(self) -> int:
        return sum(1 for _ in self.jobs(UNFINISHED))

    def _submit(self, specs: list[tuple[str, dict[str, Any]]]) -> None:
        for fate, spec in specs:
            with self.client() as client:
                job = client.submit(spec)
                self.fates[job.id] = fate
                if fate == "cancelled":
                    time.sleep(self.chance.uniform(0, 10))
                    client.cancel(job.id)
                if fate == "paused":
                    time.sleep(self.chance.uniform(0, 10))
                    self._pause_and_resume(client, job.id)

    def _pause_and_resume(self, client: Client, job_id: str) -> None:
        try:
            client.pause(job_id)
            time.sleep(self.chance.uniform(0, 3))
            self._resume(client, job_id)
        except ApiError as error:
            if error.code != "job-already-finished":  # it was quick
                raise

    def _resume(self, client: Client, job_id: str) -> None:
        """The client sends this once, because it may have taken effect when the answer is lost: look, and try again."""
        while (job := client.get(job_id)).state is JobState.PAUSED or job.pause_requested:
            try:
                client.resume(job_id)
            except (ApiError, ServiceUnreachable) as error:
                logger.info("resuming %s: %s", job_id, error)
                time.sleep(1.0)

    def _break(self, over: threading.Event) -> None:
        while not over.wait(self.chance.uniform(*QUIET_SECONDS)):
            fault = self.chance.choice(list(_FAULTS))
            logger.info("%s", fault)
            _FAULTS[fault](self)
            self.done[fault] += 1

    def kill_replica(self) -> None:
        """SIGKILL one, and start it again a moment later."""
        replica = self.chance.choice(self.replicas)
        replica.kill()
        time.sleep(self.chance.uniform(0, 2))
        replica.start()

    def restart_database(self) -> None:
        """As in a crash."""
        self.database.restart()

    def stop_store(self) -> None:
        """For some seconds."""
        self.store.stop()
        time.sleep(self.chance.uniform(*OUTAGE_SECONDS))
        self.store.start()


_FAULTS: dict[str, Callable[[Chaos], None]] = {
    "replica killed": Chaos.kill_replica,
    "database restarted": Chaos.restart_database,
    "object store stopped": Chaos.stop_store,
}


def jobs_to_run(folder: Path, count: int, surplus: int, chance: random.Random) -> list[tuple[str, dict[str, Any]]]:
    """Fates and specs."""
    fates = [fate for fate in FATES for _ in range(count // 10)]
    fates += ["left alone"] * (count - len(fates)) + [SURPLUS] * surplus
    chance.shuffle(fates)
    corpus, damaged = write_corpus(folder / "corpus"), folder / "damaged"
    damaged.mkdir()
    (damaged / "text.txt").write_bytes(b"one two " * 2**18 + b"\xff")  # which a rank finds, and not the API
    training = {"steps": STEPS, "evaluate_every_steps": STEPS}
    layout = {"tensor_parallel_size": 1}
    faults = {"max_restarts": 100}
    spec = tiny_job(corpus, "unused", training=training, parallelism=layout, fault_tolerance=faults)
    plain = spec.model_dump(mode="json") | {"checkpoint": {"every_steps": 6}}
    doomed = plain | {"data": {"source": {"kind": "text", "paths": [str(damaged)]}}}
    others = {"doomed": doomed, SURPLUS: plain | {"group": SURPLUS, "priority": -1}}
    return [(fate, others.get(fate, plain)) for fate in fates]


def wrong(job: JobRecord, events: list[JobEvent], fate: str, folder: CheckpointFolder) -> list[str]:
    """What is not as it should be with a job that has come to its end."""
    expected = {JobState.CANCELLED} if fate == SURPLUS else {FATES.get(fate, JobState.SUCCEEDED)}
    expected |= {JobState.SUCCEEDED} if fate in IN_TIME else set()
    states = [event.data["state"] for event in events if event.kind == "state"]
    steps = {event.data["step"] for event in events if event.kind == "progress"}
    ends = [state for state in states if state in TERMINAL_STATES]
    found = []
    if job.state not in expected:
        found.append(f"is {job.state} ({job.message}), and was to be {fate}")
    if ends != [job.state]:
        found.append(f"has ended as {ends}")
    if job.state is JobState.SUCCEEDED and steps != set(range(1, STEPS + 1)):
        found.append(f"has reports of the steps {sorted(steps)}")
    if job.state is JobState.SUCCEEDED and folder.steps()[-1:] != [STEPS]:
        found.append(f"has checkpoints of {folder.steps()}")
    return [f"{job.id} {problem}" for problem in found]


@contextmanager
def world(folder: Path, chance: random.Random) -> Iterator[tuple[Chaos, Nodes]]:
    """All parts, running."""
    with postgres_server() as database, s3_server(folder) as store:
        os.environ.update(store.environment)  # before the nodes start, whose workers have theirs
        nodes = Nodes(1)
        environment = {
            "BOOST_AUTH": "false", "BOOST_DATABASE_URL": database.create_database(), "BOOST_RAY_ADDRESS": nodes.address,
            "BOOST_CHECKPOINT_ROOT": f"s3://{BUCKET}/runs",
        }  # fmt: skip
        replicas = [Replica(number, folder, environment) for number in range(REPLICAS)]
        try:
            yield Chaos(replicas, database, store, chance), nodes
            for replica in replicas:
                replica.end()
        finally:
            for replica in replicas:
                replica.kill()
            nodes.close()


def report(chaos: Chaos, nodes: Nodes, seconds: float) -> tuple[list[tuple[str, str]], bool]:
    """Look at every job; what there is to say as rows of a table, and whether all is as it should be."""
    problems, states, attempts, restarts = [str(error) for error in chaos.failures], Counter[str](), 0, 0
    listed = list(chaos.jobs())
    with chaos.client() as client:
        for job in listed:
            events = list(client.events(job.id, follow=False))
            folder = CheckpointFolder(job.checkpoint_url)
            problems += wrong(job, events, chaos.fates[job.id], folder)
            states[job.state] += 1
            attempts, restarts = attempts + job.attempt, restarts + sum(job.restart_counts.values())
    if {job.id for job in listed} != set(chaos.fates):
        problems.append(f"{len(listed)} jobs are there of {len(chaos.fates)} that were answered with an id")
    left = nodes.taken()
    for problem in problems + left:
        logger.error("%s", problem)
    rows = [(f"fault: {fault}", str(count)) for fault, count in sorted(chaos.done.items())]
    rows += [(f"jobs {state}", str(count)) for state, count in sorted(states.items())]
    rows += [
        ("jobs lost, duplicated or in a wrong state", str(len(problems))),
        ("gangs started, and recoveries within gangs", f"{attempts}, {restarts}"),
        ("placement groups, actors and processes left over", ", ".join(left) or "none"),
        ("total time", f"{seconds / 60:.1f} minutes"),
    ]
    return rows, not (problems or left)


def main() -> None:
    """Measure and write the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--surplus", type=int, default=0)
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    chance = random.Random(given.seed)
    with tempfile.TemporaryDirectory(prefix="chaos-") as name, world(Path(name), chance) as (chaos, nodes):
        specs = jobs_to_run(Path(name), given.jobs, given.surplus, chance)
        begun = time.monotonic()
        chaos.run(specs)
        rows, good = report(chaos, nodes, time.monotonic() - begun)
    jobs = f"{given.jobs} short jobs" + f" and {given.surplus:,} that are cancelled in the queue" * (given.surplus > 0)
    write_table(FIGURES / "chaos.md", ["", f"{jobs}, on {REPLICAS} replicas"], rows)
    sys.exit(not good)


if __name__ == "__main__":
    main()
