"""Jobs through several replicas of the service while replicas die, the database crashes and the object store goes away.

``python -m tests.benchmarks.chaos --jobs 200`` writes docs/figures/chaos.md; it takes about half an hour on two cores.
It fails if a job is lost, ends twice or otherwise than it should, or leaves anything behind.
"""

import argparse
import contextlib
import logging
import os
import random
import signal
import subprocess
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from sqlalchemy import select
from sqlalchemy.orm import Session

from service.jobs.store import JobStore
from service.jobs.tables import LeaseRow
from service.scheduler.loop import LEASE_SECONDS
from tests.benchmarks.chaos_jobs import TURNS, Findings, Users
from tests.benchmarks.figures import FIGURES, write_table
from tests.elastic.world import Nodes
from tests.jobs import write_corpus
from tests.postgres import PostgresServer, postgres_server
from tests.s3 import BUCKET, S3Server, s3_server
from tests.service.conftest import free_port
from tests.service.serving import BOOST

logger = logging.getLogger(__name__)

REPLICAS = 3
USERS = 8
CLEAR_SECONDS = 60.0  # after the last job's end, for everything to be gone


class Replicas:
    """``boost serve``, several times on one database, one Ray and one object store."""

    def __init__(self, folder: Path, **settings: str) -> None:
        self.database_url = settings["BOOST_DATABASE_URL"]
        self._folder, self._settings = folder, settings
        self.ports = [free_port() for _ in range(REPLICAS)]
        self._processes = [self._start(number) for number in range(REPLICAS)]

    @property
    def urls(self) -> list[str]:
        return [f"http://127.0.0.1:{port}" for port in self.ports]

    def kill(self, number: int) -> None:
        self._processes[number].kill()
        self._processes[number].wait()

    def start_again(self, number: int) -> None:
        self._processes[number] = self._start(number)

    def signal(self, number: int, what: signal.Signals) -> None:
        self._processes[number].send_signal(what)

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(60)

    def _start(self, number: int) -> subprocess.Popen[bytes]:
        own = {"BOOST_HOME": str(self._folder / f"home-{number}"), "BOOST_PORT": str(self.ports[number])}
        with (self._folder / f"replica-{number}.log").open("ab") as log:
            environment = os.environ | self._settings | own
            return subprocess.Popen([BOOST, "serve"], env=environment, stdout=log, stderr=log)


@dataclass
class Chaos:
    """What goes wrong, one thing after the other: each kind once, and then by chance.

    Attributes:
        replicas: The service.
        postgres: Its database.
        s3: Its object store.
        chance: Draws what comes next.
        done: How often each has happened.
        outages: Seconds that the object store was away each time.
    """

    replicas: Replicas
    postgres: PostgresServer
    s3: S3Server
    chance: random.Random
    done: Counter[str] = field(default_factory=Counter)
    outages: list[float] = field(default_factory=list)

    def run(self, enough: threading.Event) -> None:
        """Go on until there is enough, and leave all as it was."""
        first = list(_FAULTS)
        while not enough.wait(self.chance.uniform(3, 12)):
            fault = first.pop() if first else self.chance.choice(list(_FAULTS))
            logger.info("%s", fault)
            _FAULTS[fault](self)
            self.done[fault] += 1

    def kill_replica(self) -> None:
        number = self.chance.randrange(REPLICAS)
        self.replicas.kill(number)
        time.sleep(self.chance.uniform(0, 5))
        self.replicas.start_again(number)

    def stop_replica(self) -> None:
        """Until another one has taken it for dead."""
        number = self.chance.randrange(REPLICAS)
        self.replicas.signal(number, signal.SIGSTOP)
        time.sleep(LEASE_SECONDS + self.chance.uniform(0, 5))
        self.replicas.signal(number, signal.SIGCONT)

    def crash_database(self) -> None:
        self.postgres.stop("immediate")
        time.sleep(self.chance.uniform(0, 3))
        self.postgres.start()

    def take_store_away(self) -> None:
        seconds = self.chance.uniform(5, 20)
        self.s3.stop()
        time.sleep(seconds)
        self.s3.start()
        self.outages.append(seconds)


_FAULTS: dict[str, Callable[[Chaos], None]] = {
    "replica killed (SIGKILL) and started again": Chaos.kill_replica,
    "replica stopped (SIGSTOP) for longer than its lease": Chaos.stop_replica,
    "database crashed (immediate) and started again": Chaos.crash_database,
    "object store away for 5 to 20 s": Chaos.take_store_away,
}


@contextlib.contextmanager
def world(folder: Path) -> Iterator[tuple[Nodes, Replicas, PostgresServer, S3Server]]:
    """All that a service needs, each part in processes of its own."""
    with contextlib.ExitStack() as stack:
        (folder / "s3").mkdir()
        postgres, s3 = stack.enter_context(postgres_server()), stack.enter_context(s3_server(folder / "s3"))
        os.environ.update(s3.environment)
        nodes = Nodes(2)
        stack.callback(nodes.close)
        settings = {
            "BOOST_AUTH": "false", "BOOST_DATABASE_URL": postgres.create_database(),
            "BOOST_RAY_ADDRESS": nodes.address, "BOOST_CHECKPOINT_ROOT": f"s3://{BUCKET}/jobs",
            "BOOST_RATE_PER_SECOND": "10000", "BOOST_RECONCILE_SECONDS": "0.3",
        }  # fmt: skip
        replicas = Replicas(folder, **settings)
        stack.callback(replicas.close)
        yield nodes, replicas, postgres, s3


def main() -> None:
    """Run, look at what has become of it all, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=FIGURES / "chaos.md")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("httpx").setLevel(logging.WARNING)
    folder = Path(tempfile.mkdtemp(prefix="boost-chaos-"))
    logger.info("logs are in %s", folder)
    kinds = {f"chaos-{number}": TURNS[number % len(TURNS)] for number in range(arguments.jobs)}
    with world(folder) as (nodes, replicas, postgres, s3):
        users = Users(replicas.urls, write_corpus(folder / "corpus"))
        chaos = Chaos(replicas, postgres, s3, random.Random(arguments.seed))
        seconds = _run(users, chaos, kinds)
        left_over = _left_over(nodes)
        findings = Findings(JobStore(replicas.database_url))
        for name, kind in kinds.items():
            findings.look_at(users.get(users.records[name].id), kind)
        rows = _rows(users, chaos, kinds, findings, left_over)
    write_table(arguments.out, ["", f"{arguments.jobs} jobs in {seconds / 60:.0f} minutes"], rows)
    assert not (findings.wrong or left_over), "\n".join([*findings.wrong, *left_over])


def _run(users: Users, chaos: Chaos, kinds: dict[str, str]) -> float:
    """Submit all jobs and see them through; how many seconds that took."""
    begun, enough = time.monotonic(), threading.Event()
    with ThreadPoolExecutor(USERS + 1) as pool:
        disturbing = pool.submit(chaos.run, enough)
        try:
            list(pool.map(users.submit, kinds, kinds.values()))
            logger.info("all jobs are submitted")
            parts = [dict(list(kinds.items())[number::USERS]) for number in range(USERS)]
            list(pool.map(users.see_through, parts))
        finally:
            enough.set()
        disturbing.result()
    return time.monotonic() - begun


def _left_over(nodes: Nodes) -> list[str]:
    deadline = time.monotonic() + CLEAR_SECONDS
    while (left := nodes.taken()) and time.monotonic() < deadline:
        time.sleep(1)
    return left


def _rows(
    users: Users, chaos: Chaos, kinds: dict[str, str], findings: Findings, left_over: list[str]
) -> list[list[str]]:
    names, states = users.names(), Counter(job.state for job in users.records.values())
    with Session(JobStore(chaos.replicas.database_url).engine) as session:
        hands = session.scalars(select(LeaseRow.token)).one()
    rows = [[f"job: {kind}", str(count)] for kind, count in Counter(kinds.values()).items()]
    rows += [[fault, str(chaos.done[fault])] for fault in _FAULTS]
    rows += [
        ["seconds that the object store was away in all", f"{sum(chaos.outages):.0f}"],
        ["times that another replica began to schedule", str(hands - 1)],
        ["requests of users, of them sent again", f"{users.asked}, {users.asked_again}"],
    ]
    rows += [[f"jobs in the end: {state}", str(count)] for state, count in sorted(states.items())]
    rows += [
        ["jobs lost", str(sum(name not in names for name in kinds))],
        ["jobs doubled", str(sum(names.values()) - len(names))],
        ["anything else about a job's end, events or checkpoints", "; ".join(findings.wrong) or "as it should be"],
        ["placement groups, actors and CPUs left over", "; ".join(left_over) or "none"],
    ]
    return rows


if __name__ == "__main__":
    main()
