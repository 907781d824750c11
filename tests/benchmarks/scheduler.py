"""The way from gangs to the record: a pass over a thousand running jobs, and a real gang's steps as they are stored.

``python -m tests.benchmarks.scheduler`` writes docs/figures/scheduler.md; it takes some two minutes on two cores.
"""

import argparse
import signal
import sqlite3
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from boost_core.config import Layout
from service.client import Client
from service.gang.status import Bundle, GangKey, GangPhase, GangReport, GangStatus, NodeCapacity, PollRequest
from service.jobs.database import migrate
from service.jobs.leases import Leases
from service.jobs.store import JobStore
from service.scheduler.loop import LEASE
from service.scheduler.reconcile import Reconciler
from tests.benchmarks.figures import FIGURES, milliseconds, write_table
from tests.jobs import tiny_job, write_corpus
from tests.service.records import a_step, start
from tests.service.serving import Server

PASSES = 7
SHARES = (0.0, 0.1, 1.0)  # of the jobs that have made a step since the pass before
RANKS, RANKS_A_NODE = 2, 8
LOOK_SECONDS = 0.002
WARM_STEPS = 20


class TrainingGangs:
    """Gangs that train on full nodes: each reports a step when it is told that it has made one."""

    def __init__(self) -> None:
        self._steps: dict[GangKey, int] = {}

    def add(self, gang: GangKey) -> None:
        self._steps[gang] = 0

    def step(self, share: float) -> None:
        """Have a share of all gangs make a step."""
        for gang in list(self._steps)[: round(share * len(self._steps))]:
            self._steps[gang] += 1

    def nodes(self) -> list[NodeCapacity]:
        """As many as they need."""
        needed = range(len(self._steps) * RANKS // RANKS_A_NODE)
        return [NodeCapacity(f"node-{number:04}", {"CPU": float(RANKS_A_NODE)}, {"CPU": 0.0}) for number in needed]

    def alive(self) -> set[GangKey]:
        return set(self._steps)

    def request_nodes(self, bundles: Sequence[Bundle]) -> None: ...

    def refused(self) -> bool:
        return False

    def poll(self, requests: Sequence[PollRequest]) -> list[GangStatus]:
        return [self._poll(request) for request in requests]

    def _poll(self, request: PollRequest) -> GangStatus:
        now, newest = datetime.now(UTC), self._steps[request.gang]
        steps = range(request.after_sequence + 1, newest + 1)
        reports = [GangReport(step, now, a_step(step, steps=10**6)) for step in steps]
        return GangStatus(GangPhase.TRAINING, "they train", reports, Layout(RANKS, 1, 1))


def pass_seconds(folder: Path, jobs: int) -> dict[float, float]:
    """The median pass over running jobs, half of them elastic, by the share of them that have made a step."""
    url = f"sqlite:///{folder}/boost.db"
    migrate(url)
    gangs = TrainingGangs()
    with closing(JobStore(url)) as store:
        for number in range(jobs):
            elastic = {"elasticity": {"data_parallel_size": {"min": 1, "max": 2}}} if number % 2 else {}
            job = store.create(tiny_job(Path("corpus"), "file:///c", name=f"job-{number}", **elastic), "file:///c")
            start(store, job.id)
            gangs.add((job.id, 1))
        lease = Leases(store.engine, "benchmark").take(LEASE, 60)
        assert lease is not None
        reconciler = Reconciler(store.under(lease), cast(Any, gangs), autoscales=True)  # a pass asks for no more
        reconciler.tick()  # which remembers them
        return {share: statistics.median(_passes(reconciler, gangs, share)) for share in SHARES}


def _passes(reconciler: Reconciler, gangs: TrainingGangs, share: float) -> list[float]:
    seconds = []
    for _ in range(PASSES):
        gangs.step(share)
        begun = time.perf_counter()
        reconciler.tick()
        seconds.append(time.perf_counter() - begun)
    return seconds


def stored_after(folder: Path, seconds: float) -> list[float]:
    """How long after each step of a real gang its event has been in the record, seen by another process."""
    server = Server(folder / "home", BOOST_AUTH="false")
    endless = {"steps": 10**6, "evaluate_every_steps": 10**5}
    spec = tiny_job(write_corpus(folder / "corpus"), folder / "c", training=endless, checkpoint={"every_steps": 10**5})
    try:
        server.until(lambda: (answer := server.answers("/readyz")) and answer.is_success)
        with Client(server.url) as client:
            job_id = client.submit(spec).id
            server.until(lambda: (newest := client.get(job_id).progress) and newest.step > WARM_STEPS)
            delays = _watch(folder / "home" / "boost.db", seconds)
            client.cancel(job_id)
    finally:
        server.end(signal.SIGTERM)
    return delays


def _watch(database: Path, seconds: float) -> list[float]:
    """Look at the file whenever somebody has committed to it; the ages of the steps that are new in it."""
    delays: list[float] = []
    deadline = time.monotonic() + seconds
    with closing(sqlite3.connect(f"file:{database}?mode=ro", uri=True)) as file:
        (newest,) = file.execute("SELECT MAX(id) FROM events").fetchone()
        version = None
        while time.monotonic() < deadline:
            before, (version,) = version, file.execute("PRAGMA data_version").fetchone()
            if version == before:
                time.sleep(LOOK_SECONDS)
                continue
            query = "SELECT id, kind, time FROM events WHERE id > ? ORDER BY id"
            found, now = file.execute(query, [newest]).fetchall(), datetime.now(UTC)
            newest = found[-1][0] if found else newest
            steps = [
                datetime.fromisoformat(moment).replace(tzinfo=UTC) for _, kind, moment in found if kind == "progress"
            ]
            delays += [(now - step).total_seconds() for step in steps]
    return delays


def main() -> None:
    """Measure and write the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--seconds", type=float, default=60.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="scheduler-") as folder:
        (Path(folder) / "passes").mkdir()
        passes = pass_seconds(Path(folder) / "passes", given.jobs)
        delays = stored_after(Path(folder), given.seconds)
    rows = [
        (
            f"a pass over {given.jobs:,} running jobs of which {share:.0%} have made a step: median",
            f"{1000 * took:.0f} ms",
        )
        for share, took in passes.items()
    ]
    rows += [
        (f"steps that a real gang made in {given.seconds:.0f} s", f"{len(delays):,}"),
        ("delay until a step is in the record: median, p90, p99", ", ".join(milliseconds(delays, 50, 90, 99))),
    ]
    write_table(FIGURES / "scheduler.md", ["", "here"], rows)


if __name__ == "__main__":
    main()
