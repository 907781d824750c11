"""What the record costs at scale: unfinished jobs as the scheduler reads them, requests, and a scrape of /metrics.

``python -m tests.benchmarks.record_at_scale`` writes docs/figures/record_at_scale.md; it takes some minutes.
"""

import gc
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psutil
from sqlalchemy import insert, text

from service.accounts.tenants_and_queues import QuotaStore
from service.jobs.database import migrate
from service.jobs.goodput import Goodput
from service.jobs.model import JobFilter
from service.jobs.states import JobState, Reason
from service.jobs.store import JobStore
from service.jobs.tables import JobRow
from service.telemetry.exporter import ServiceCollector, exposition
from service.telemetry.process import ProcessMetrics
from tests.benchmarks.figures import FIGURES, write_table
from tests.jobs import tiny_job
from tests.postgres import postgres_server
from tests.service.records import a_step, numbered

FEW, MANY = 1_000, 100_000  # recorded jobs
UNFINISHED, RUNNING, WAITING, CANCELLED, ROWS, TIMES = 20_000, 200, 100, 1_000, 5_000, 40
OPENMETRICS = "application/openmetrics-text;version=1.0.0"
REASONS = {
    JobState.QUEUED: Reason.SUBMITTED,
    JobState.RUNNING: Reason.GANG_STARTED,
    JobState.SUCCEEDED: Reason.TRAINING_FINISHED,
}


def fill(store: JobStore, counts: Mapping[JobState, int], recorded: int = 0) -> None:
    """Record so many more jobs in each state, of eight tenants; those that run have done a step."""
    spec, now = tiny_job(Path("corpus"), "file:///c").model_dump(mode="json"), datetime.now(UTC)
    rows: list[dict[str, Any]] = []
    for state, count in counts.items():
        for _ in range(count):
            number, waits, ended = recorded + len(rows) + 1, state is JobState.QUEUED, state is JobState.SUCCEEDED
            job_id, name = f"job-{number:016}", f"job-{number}"
            rows.append({
                "id": job_id, "tenant": f"team-{number % 8}", "queue": "default", "submitted_by": "anonymous",
                "name": name, "spec": spec | {"name": name}, "state": state, "reason": REASONS[state],
                "message": "waits for its turn", "waiting_for": "behind job-1 and 7 more" if waits else None,
                "attempt": int(not waits), "checkpoint_url": f"file:///c/{job_id}", "submitted_at": now,
                "queued_at": now, "waiting_since": now if waits else None, "started_at": None if waits else now,
                "finished_at": now - timedelta(days=1) if ended else None, "arrival": number,
                "goodput": Goodput(since=now, booked_until=now).model_dump(mode="json"), "version": 1,
            })  # fmt: skip
    with store.engine.begin() as connection:
        for begin in range(0, len(rows), ROWS):
            connection.execute(insert(JobRow), rows[begin : begin + ROWS])
    for job in store.first_active(0):
        store.append_reports(job.id, 1, numbered(a_step(1)))
    if store.engine.dialect.name == "postgresql":
        with store.engine.begin() as connection:
            connection.execute(text("ANALYZE jobs"))


@contextmanager
def stores(database: str) -> Iterator[Callable[[], JobStore]]:
    """Makes records in a kind of database."""
    with tempfile.TemporaryDirectory(prefix="record-") as folder:
        if database == "sqlite":
            urls = (f"sqlite:///{folder}/{number}.db" for number in range(10))
            yield lambda: opened(next(urls))
        else:
            with postgres_server() as server:
                yield lambda: opened(server.create_database())


def opened(url: str) -> JobStore:
    migrate(url)
    return JobStore(url)


def least(store: JobStore, work: Callable[[], object]) -> float:
    """Milliseconds that something takes at best: of CPU with SQLite, which runs in this process, or else elapsed."""
    clock = time.process_time if store.engine.dialect.name == "sqlite" else time.perf_counter
    seconds = []
    for _ in range(TIMES):
        begun = clock()
        work()
        seconds.append(clock() - begun)
    return 1000 * min(seconds)


def reads(store: JobStore, jobs: int) -> dict[str, float]:
    """Milliseconds of what requests read."""
    ended, running = f"job-{jobs:016}", [JobState.QUEUED, JobState.RUNNING]
    quotas = QuotaStore(store)
    lists = {
        "a page of jobs": (JobFilter(), None),
        "a page from the middle": (JobFilter(), f"job-{jobs // 2:016}"),
        "a tenant's": (JobFilter(tenant="team-1"), None),
        "a queue's": (JobFilter(queue="default"), None),
        "a tenant's that wait or run": (JobFilter(running, "team-1"), None),
        "a tenant's that failed (none)": (JobFilter([JobState.FAILED], "team-1"), None),
        "somebody's (none)": (JobFilter(submitted_by="nobody"), None),
        "by a part of the name (none)": (JobFilter(name="nope"), None),
    }
    times = {"one job": least(store, lambda: store.get(ended))}
    for name, (wanted, cursor) in lists.items():
        times[name] = least(store, lambda wanted=wanted, cursor=cursor: store.page(wanted, 100, cursor)[0])  # type: ignore[misc]
    return times | {"queues": least(store, quotas.queues), "tenants": least(store, quotas.tenants)}


def cancels(store: JobStore) -> dict[str, float]:
    """Elapsed milliseconds of cancelling queued jobs: the newest by one request, as many others by a request each."""
    times = {}
    for together in (True, False):
        begun = time.perf_counter()
        queued = store.ids(JobFilter([JobState.QUEUED], cancellable=True), CANCELLED)
        if together:
            assert len([*store.cancel_many(queued)]) == CANCELLED
        else:
            for job_id in queued:
                store.request_cancel(job_id)
        times[f"cancel of {CANCELLED:,} queued jobs{'' if together else ', one by one'} (elapsed)"] = 1000 * (
            time.perf_counter() - begun
        )
    return times


def scrape(store: JobStore) -> tuple[float, str]:
    """Milliseconds of a scrape, and its size."""
    collector = ServiceCollector(store, QuotaStore(store), ProcessMetrics())
    content = exposition(collector, OPENMETRICS)[0]
    lines = content.count(b"\n")
    return least(store, lambda: exposition(collector, OPENMETRICS)), f"{len(content) / 1e6:.1f} MB, {lines:,} lines"


def measure(database: str) -> list[list[str]]:
    """The rows of a kind of database."""
    rows = []
    with stores(database) as new:
        with closing(new()) as store:
            fill(store, {JobState.QUEUED: UNFINISHED})
            gc.collect()
            before = psutil.Process().memory_info().rss
            store.active()
            gc.collect()
            memory = (psutil.Process().memory_info().rss - before) / 2**20
            warm = least(store, store.active)
        rows.append([f"{database}: all of {UNFINISHED:,} unfinished jobs, warm", "", f"{warm:.0f} ms", ""])
        if database == "sqlite":  # the first, in a process that has freed nothing yet
            rows.append(["memory of their records", "", f"{memory:.0f} MiB", ""])
        of_few, of_many = dict[str, float](), dict[str, float]()
        for jobs, times in ((FEW, of_few), (MANY, of_many)):
            with closing(new()) as store:
                others = jobs - RUNNING - WAITING
                fill(store, {JobState.SUCCEEDED: others, JobState.RUNNING: RUNNING, JobState.QUEUED: WAITING})
                times |= reads(store, jobs)
                times["a scrape"], size = scrape(store)
                fill(store, {JobState.QUEUED: 2 * CANCELLED}, recorded=jobs)
                times |= cancels(store)
        for name, many in of_many.items():
            shown = f"{name} ({size})" if name == "a scrape" else name
            few = of_few[name]
            rows.append([f"{database}: {shown}", f"{few:.2f} ms", f"{many:.2f} ms", f"{many / few:.2f}"])
    return rows


def main() -> None:
    """Measure and write the figure."""
    header = [f"{RUNNING} jobs run", f"{FEW:,} recorded", f"{MANY:,} recorded", "ratio"]
    write_table(FIGURES / "record_at_scale.md", header, [*measure("sqlite"), *measure("postgresql")])


if __name__ == "__main__":
    main()
