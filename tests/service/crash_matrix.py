"""Lives of jobs under a service that is killed at every point where it does something, one after the other.

``python -m tests.service.crash_matrix DATABASE_URL FOLDER LIFE…`` plays each of these lives undisturbed to learn its
points, and then once for each point: a process is killed there, and another one takes over. On PostgreSQL that
is done once for each kind of point after each other kind. What became of it all is in told.json then. It is a program
of its own because it forks.
"""

import gc
import json
import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from sqlalchemy import Engine, event, select, update
from sqlalchemy.orm import Session

from boost_core.messages import Drill
from service.jobs.leases import Lease, Leases
from service.jobs.model import JobRecord, Request
from service.jobs.patch import JobPatch
from service.jobs.states import JobState, Reason
from service.jobs.store import JobStore
from service.jobs.tables import EventRow, LeaseRow
from service.scheduler import reconcile
from service.scheduler.loop import LEASE, LEASE_SECONDS
from service.scheduler.reconcile import Reconciler
from tests.jobs import tiny_job
from tests.service.file_cluster import FileCluster

MOST_PASSES = 200
_GANG_CALLS = frozenset({"launch", "ask", "end"})  # a poll matters by what is stored of it


class Points:
    """Counts the points at which something has been done, and kills the process at one of them."""

    def __init__(self, kill_at: int | None, log: Path) -> None:
        self._kill_at, self._log, self._count, self._wrote = kill_at, log, 0, False

    def at(self, name: str) -> None:
        self._count += 1
        if self._kill_at is None:
            with self._log.open("a") as stream:
                stream.write(f"{name}\n")
        elif self._count == self._kill_at:
            os.kill(os.getpid(), signal.SIGKILL)

    def watch_database(self, engine: Engine) -> None:
        """Between the last statement and the commit of each transaction that writes, and after it."""

        def note(_connection: object, _cursor: object, statement: str, *_: object) -> None:
            self._wrote = self._wrote or statement.startswith(("INSERT", "UPDATE", "DELETE"))

        def before_commit(_connection: object) -> None:
            if self._wrote:
                self.at("before commit")

        def begin(_connection: object) -> None:
            self._wrote = False

        event.listen(engine, "begin", begin)
        event.listen(engine, "before_cursor_execute", note)
        event.listen(engine, "commit", before_commit)

    def watch(self, part: Any) -> Any:
        """A part whose calls are points when they have done something."""
        return _Watched(part, self)

    def after_call(self, part: object, name: str, arguments: Sequence[object]) -> None:
        if self._wrote or (isinstance(part, FileCluster) and name in _GANG_CALLS):
            self._wrote = False
            self.at(" ".join(["after", name, *(argument for argument in arguments if isinstance(argument, Reason))]))


class _Watched:
    def __init__(self, part: Any, points: Points) -> None:
        self._part, self._points = part, points

    def under(self, lease: Lease) -> Any:
        return self._points.watch(self._part.under(lease))

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*arguments: Any, **named: Any) -> Any:
            done = getattr(self._part, name)(*arguments, **named)
            self._points.after_call(self._part, name, arguments)
            return done

        return call


class User:
    """Somebody who sends every request until it has been answered."""

    def __init__(self, store: JobStore, run: str) -> None:
        self.store, self._run = store, run
        self._answered: dict[str, str] = {}

    def submit(self, name: str, **changes: Any) -> JobRecord:
        if name in self._answered:
            return self.store.get(self._answered[name])
        spec = tiny_job(Path("corpus"), "unused", name=name, **{"fault_tolerance": {"max_restarts": 0}} | changes)
        job = self.store.create(spec, "file:///checkpoints", request=self.request(name))
        self._answered[name] = job.id
        return job

    def request(self, name: str) -> Request:
        return Request("default", f"{self._run} {name}"[-255:], name)


def simple(name: str, **changes: Any) -> Callable[[User], list[JobRecord]]:
    return lambda user: [user.submit(name, **changes)]


def is_cancelled(user: User) -> list[JobRecord]:
    job = user.submit("goes-on-and-on")
    if job.state is JobState.RUNNING:
        job = user.store.request_cancel(job.id)
    return [job]


def is_cancelled_while_it_waits(user: User) -> list[JobRecord]:
    first, second = user.submit("goes-on-and-on"), user.submit("succeeds")
    if first.state is JobState.RUNNING:
        second = user.store.request_cancel(second.id)
        first = user.store.request_cancel(first.id)
    return [first, second]


def is_paused_and_resumed(user: User) -> list[JobRecord]:
    job = user.submit("goes-on-and-on-at-first")
    if job.state is JobState.RUNNING and job.attempt == 1:
        user.store.request_pause(job.id)
    elif job.state is JobState.PAUSED:
        user.store.resume(job.id)
    return [job]


def is_retried(user: User) -> list[JobRecord]:
    job = user.submit("fails")
    if job.state is JobState.FAILED:
        job = user.store.retry(job.id)
    return [user.store.request_cancel(job.id) if job.reason is Reason.RETRIED_BY_USER else job]


def is_changed(user: User) -> list[JobRecord]:
    job = user.submit("recovers")
    if job.state is JobState.RUNNING:
        user.store.patch(job.id, JobPatch(priority=5))
        user.store.ask(job.id, Drill(kind="kill_rank"), user.request("drill"))
    return [job]


def is_paused_as_it_starts(user: User) -> list[JobRecord]:
    job = user.submit("goes-on-and-on-at-first")
    if job.has_gang and job.attempt == 1:
        user.store.request_pause(job.id)
    elif job.state is JobState.PAUSED:
        user.store.request_cancel(job.id)
    return [job]


def is_cancelled_as_it_starts(user: User) -> list[JobRecord]:
    job = user.submit("goes-on-and-on")
    return [user.store.request_cancel(job.id) if job.has_gang else job]


def is_paused_at_once(user: User) -> list[JobRecord]:
    job = user.submit("succeeds")
    if job.reason is Reason.SUBMITTED:
        job = user.store.request_pause(job.id)
    if job.state is JobState.PAUSED:
        job = user.store.resume(job.id)
    return [user.store.request_cancel(job.id) if job.reason is Reason.RESUMED_BY_USER else job]


def is_cancelled_at_once_and_retried(user: User) -> list[JobRecord]:
    job = user.submit("succeeds")
    if job.reason is Reason.SUBMITTED:
        job = user.store.request_cancel(job.id)
    if not user.store.count_changes(job.id, Reason.RETRIED_BY_USER, job.submitted_at):
        job = user.store.retry(job.id)
    return [user.store.request_cancel(job.id) if job.reason is Reason.RETRIED_BY_USER else job]


def makes_room(user: User) -> list[JobRecord]:
    low = user.submit("goes-on-and-on-at-first")
    return [low, user.submit("succeeds", priority=1)] if low.started_at else [low]


LIVES: dict[str, Callable[[User], list[JobRecord]]] = {
    "succeeds": simple("recovers"),
    "fails": simple("fails"),
    "is lost": simple("is-lost"),
    "is lost for good": simple("is-lost-for-good"),
    "fails as it starts": simple("fails-as-it-starts"),
    "is lost as it starts": simple("is-lost-as-it-starts"),
    "is cancelled": is_cancelled,
    "is cancelled while it waits": is_cancelled_while_it_waits,
    "is paused and resumed": is_paused_and_resumed,
    "is paused as it starts": is_paused_as_it_starts,
    "is cancelled as it starts": is_cancelled_as_it_starts,
    "is retried": is_retried,
    "is changed": is_changed,
    "is paused at once": is_paused_at_once,
    "is cancelled at once and retried": is_cancelled_at_once_and_retried,
    "makes room": makes_room,
}


def live(store: JobStore, folder: Path, life: str, kill_at: int | None = None) -> None:
    """Schedule, and be the user, until all jobs have come to their end and nothing of them is left."""
    points = Points(kill_at, folder / "points")
    store = JobStore(store.engine.execution_options())  # one of its own, to be watched
    points.watch_database(store.engine)
    lease = Leases(store.engine, f"process {os.getpid()}").take(LEASE, LEASE_SECONDS)
    assert lease is not None
    watched = points.watch(store)
    reconciler = Reconciler(watched.under(lease), points.watch(FileCluster(folder / "cluster.db")))
    user = User(watched, str(folder))
    reconcile.MOST_LOSSES = 0 if life == "is lost for good" else 1
    for _ in range(MOST_PASSES):
        ended = all(job.finished for job in LIVES[life](user))
        reconciler.tick()
        if ended:
            return
    raise AssertionError(f"{life}: not over after {MOST_PASSES} passes")


def _in_process(work: Callable[[], object], store: JobStore) -> int:
    """Do it in a process of its own, after all those before; the signal that ended it, or 0."""
    with store.engine.begin() as connection:
        connection.execute(update(LeaseRow).values(expires_at=datetime.now(UTC) - timedelta(seconds=1)))
    store.engine.dispose()  # the child inherits the compiled statements, and no connection
    child = os.fork()
    if child == 0:
        code = 1
        try:
            work()
            code = 0
        except BaseException:
            logging.exception("died")
        finally:
            os._exit(code)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, "see the log"
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def become_of(store: JobStore, folder: Path, life: str) -> list[dict[str, Any]]:
    """All about the jobs of a life: what is stored, what was started, and what is still there."""
    cluster = FileCluster(folder / "cluster.db")
    return [
        {
            "state": job.state,
            "reason": job.reason,
            "attempt": job.attempt,
            "priority": job.spec.priority,
            "launches": cluster.launches(job.id),
            "drills": cluster.drills(job.id),
            "alive": sorted(cluster.alive()),
            "events": _events(store, job.id),
        }
        for job in LIVES[life](User(store, str(folder)))
    ]


def _events(store: JobStore, job_id: str) -> list[str]:
    query = select(EventRow).where(EventRow.job_id == job_id).order_by(EventRow.id)
    with Session(store.engine) as session:
        return [
            f"{row.kind} {row.attempt} {row.data['reason'] if row.kind == 'state' else row.sequence}"
            for row in session.scalars(query)
        ]


def play(store: JobStore, folder: Path, life: str, kill_at: int | None = None) -> dict[str, Any]:
    """Live in one process, or in one that is killed and in a second one after it; say what became of the jobs."""
    folder.mkdir()
    killed = kill_at is not None and _in_process(lambda: live(store, folder, life, kill_at), store) == signal.SIGKILL
    assert _in_process(lambda: live(store, folder, life), store) == 0
    return {"killed": killed, "jobs": become_of(store, folder, life)}


def main(database_url: str, name: str, *lives: str) -> None:
    folder, store = Path(name), JobStore(database_url)
    if is_sqlite := store.engine.dialect.name == "sqlite":  # the dead are processes, not machines
        event.listen(store.engine, "connect", lambda connection, _: connection.execute("PRAGMA synchronous = OFF"))
    logging.basicConfig(filename=folder / "log", level=logging.WARNING)
    gc.freeze()  # or the children would copy all of it
    told, been_there = {}, set[tuple[str, ...]]()
    (warm_up := folder / "warm-up").mkdir()
    live(store, warm_up, "is changed")  # so that no process has to compile statements again
    for life in lives:
        (here := folder / life.replace(" ", "-")).mkdir()
        undisturbed = play(store, here / "undisturbed", life)
        points = (here / "undisturbed" / "points").read_text().splitlines()
        killed = {}
        for number in range(1, len(points) + 1):
            way = tuple(points[:number] if is_sqlite else points[max(0, number - 2) : number])
            if way not in been_there:  # lives begin alike
                been_there.add(way)
                killed[number] = play(store, here / f"killed-{number}", life, number)
        told[life] = {"points": points, "undisturbed": undisturbed, "killed": killed}
    (folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(*sys.argv[1:])
