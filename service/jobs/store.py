"""The store: the one place that reads and writes job records and their events."""

import time
from collections import Counter, defaultdict
from collections.abc import AsyncGenerator, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any, Self
from urllib.parse import urlsplit

from psycopg import AsyncConnection
from sqlalchemy import ARRAY, Connection, Engine, Text, bindparam, delete, func, insert, literal, select, true, update
from sqlalchemy.orm import InstrumentedAttribute, Session

from boost_core.config import JobSpec
from boost_core.messages import CheckpointReport, FaultReport, Scores, WorkerCommand
from boost_core.plan.machine import Fitted
from boost_core.plan.resolve import ChosenLayouts
from service.jobs import database, model, observations, queries, writes
from service.jobs.database import WAIT_SECONDS, open_engine, read_models, read_rows, retried_once
from service.jobs.goodput import Goodput
from service.jobs.leases import Lease, permitted, refuse_if_lost
from service.jobs.model import JobEvent, JobFilter, JobRecord, Owner, Request, new_id
from service.jobs.patch import JobPatch
from service.jobs.queries import NEXT_ARRIVAL, Backlog, EventFilter, JobCache, JobNotFound, Position
from service.jobs.states import TERMINAL_STATES, JobState, Reason
from service.jobs.tables import EventRow, JobRow, RequestRow, SnapshotRow, SweepTrialRow, TrackerRow, spec_columns
from service.jobs.writes import NumberedReport, Overtaken, TakenBack, Write
from service.models.cluster import StoredProfile

# Notifications of writes. Followers in the same process are called directly, other processes on the same PostgreSQL by
# NOTIFY in the writing transaction. They may be lost, so followers must also poll the record now and then.

Subscriber = Callable[[str, int], None]  # called with a job's id and its version after the write

_CHANNEL = "boost_jobs"
# Otherwise a connection on which nothing is sent would not detect that the other side is gone.
_KEEPALIVES = {"keepalives_idle": 10, "keepalives_interval": 5, "keepalives_count": 2}


@dataclass(frozen=True)
class Notifications:
    """Calls all subscribers after each write of this process to a job. Threads may share it.

    Attributes:
        subscribers: Functions to be called in the thread that has written; they must not raise or block.
    """

    subscribers: list[Subscriber] = field(default_factory=list)

    def publish(self, versions: Mapping[str, int]) -> None:
        """Announce that writes to jobs have been committed."""
        for job_id, version in versions.items():
            for subscriber in self.subscribers:
                subscriber(job_id, version)


def send_probe(engine: Engine, name: str) -> None:
    """Notify listeners of version 0 of a job of this name, on a connection other than theirs.

    A pooler may silently accept LISTEN and then pass nothing on.
    """
    with engine.begin() as connection:
        notify(connection, {name: 0})


def notify(connection: Connection, versions: Mapping[str, int]) -> None:
    """Notify other processes of writes to jobs on commit, if the database can do that."""
    if connection.dialect.name == "postgresql":
        payloads = [f"{job_id} {version}" for job_id, version in versions.items()]
        connection.execute(select(func.pg_notify(_CHANNEL, func.unnest(literal(payloads, ARRAY(Text))))))


@asynccontextmanager
async def listening(engine: Engine) -> AsyncGenerator[AsyncGenerator[tuple[str, int]]]:
    """Listen for the writes of all processes on a separate connection; yields jobs' ids and versions.

    Args:
        engine: Engine of a database that can notify.

    Raises:
        psycopg.OperationalError: The database cannot be reached.
    """
    _, arguments = engine.dialect.create_connect_args(engine.url)
    arguments = {**arguments, **database.TO_POSTGRESQL, **_KEEPALIVES}
    async with await AsyncConnection.connect(autocommit=True, **arguments) as connection:
        # The database queues what this process does not read, for all; so it must end a stopped process's connection.
        await connection.execute(f"SET tcp_user_timeout = {database.TO_POSTGRESQL['tcp_user_timeout']}")
        await connection.execute(f"LISTEN {_CHANNEL}")

        async def notifications() -> AsyncGenerator[tuple[str, int]]:
            async for notification in connection.notifies():
                job_id, _, version = notification.payload.partition(" ")
                with suppress(ValueError):  # anyone with an account on the database may send anything
                    yield job_id, int(version)

        yield notifications()


_LOST_RACES = 100
_MANY_ENDED, _ENDED_SECONDS = 10_000, 1.0  # from how many on, and for how long, their number is remembered
_CANCELLED_TOGETHER = 250
_NEWEST_CHECKPOINTS, _LARGE_CHECKPOINT = 64, 1 << 28  # jobs, bytes
_INSERT_JOB = insert(JobRow).values(arrival=NEXT_ARRIVAL).returning(JobRow.arrival)
MOST_UNFINISHED = 20_000  # jobs of a tenant: each pass of the scheduler is about all of them
_UNFINISHED = select(JobRow.id).where(JobRow.tenant == bindparam("tenant"), JobRow.state.in_(queries.ACTIVE_STATES))
_ONE_TOO_MANY = _UNFINISHED.offset(bindparam("others")).limit(1)
_ANYBODY = Owner()
_ALL_JOBS = JobFilter()
_ALL_EVENTS = EventFilter()


class JobStore:
    """Jobs and their events in an SQL database whose tables are up to date (``service.jobs.database.migrate``).

    Threads may share a store, and processes a database: every write to a job is guarded by its version
    and done again on the newer record when another writer was faster.

    Args:
        database: A URL of SQLAlchemy, for example ``sqlite:////var/lib/boost/boost.db``, or an engine.
        lease: Write only while this is the newest of its name.
        notifications: Notified of each write to a job; default: new ones.
        known: Caches the records read; default: a cache of its own.
        seconds: How long to wait for the database of a URL, as in ``open_engine``.
    """

    def __init__(
        self, database: str | Engine, lease: Lease | None = None, notifications: Notifications | None = None,
        known: JobCache | None = None, seconds: float = WAIT_SECONDS,
    ) -> None:  # fmt: skip
        self.engine = open_engine(database, seconds) if isinstance(database, str) else database
        self.notifications = notifications or Notifications()
        self._lease = lease
        self._known = known or JobCache()
        self._ended: dict[str, tuple[float, list[tuple[str, int, str]]]] = {}  # by column: until when, and its counts

    def close(self) -> None:
        """Close all connections."""
        self.engine.dispose()

    def under(self, lease: Lease) -> Self:
        """The same store for writing under a lease. Its writes raise ``LeaseLost`` once the lease is gone."""
        return type(self)(self.engine, lease, self.notifications, self._known)

    def for_short_reads(self) -> Self | None:
        """The same store for reads in an event loop; ``None`` if only threads may read its database.

        It raises ``OperationalError`` or ``TooManyUnknown`` rather than take long.
        """
        engine = database.open_for_short_reads(self.engine)
        return type(self)(engine, known=self._known) if engine else None

    def create(
        self, spec: JobSpec, checkpoint_root: str, owner: Owner = _ANYBODY, *, cloned_from: str | None = None,
        request: Request | None = None, traceparent: str | None = None, trackers: Collection[str] = (),
        chosen: ChosenLayouts | None = None, profile: StoredProfile | None = None, fitted: Fitted | None = None,
        node_gpus: int | None = None, alongside: Callable[[Connection], object] = lambda _: None,
        node_memory_bytes: int | None = None, trial: tuple[str, int] | None = None,
    ) -> JobRecord:  # fmt: skip
        """Store a new QUEUED job; repeating the same request returns the same job.

        Args:
            spec: What to train.
            checkpoint_root: Folder for checkpoints if the spec names none; tenant and job id are added to it, to
                another one the job's id.
            owner: Its owner.
            cloned_from: The job that it was cloned from.
            request: The request for it, if it may be repeated.
            traceparent: The parent span of the job's spans, in W3C's format.
            trackers: Kinds of its trackers.
            chosen: Why the layouts of the spec were chosen, which is stored as an event.
            profile: The profile that predicts its seconds.
            fitted: Correction of such predictions by earlier jobs.
            node_gpus: GPUs per node, for which these predictions hold.
            alongside: Writes more in the same transaction; called again if the transaction is retried.
            node_memory_bytes: Host memory of these nodes.
            trial: The sweep, by its id, and the number of the trial that this is the job of.

        Raises:
            IdempotencyKeyReused: The request's key came with another one before.
            TooManyJobs: The tenant has too many jobs that have not ended.
            sqlalchemy.exc.IntegrityError: The trial has a job.
        """
        job_id, now = new_id("job"), datetime.now(UTC)
        folder = spec.checkpoint.url or f"{checkpoint_root.rstrip('/')}/{owner.tenant}"
        record = JobRecord(
            id=job_id, tenant=owner.tenant, queue=spec.queue, submitted_by=owner.name, cloned_from=cloned_from,
            name=spec.name, spec=spec, state=JobState.QUEUED, reason=Reason.SUBMITTED, message="waits for its turn",
            attempt=0, cancel_requested=False, checkpoint_url=f"{folder.rstrip('/')}/{job_id}", submitted_at=now,
            queued_at=now, waiting_since=now, started_at=None, finished_at=None, progress=None, evaluation=None,
            checkpoint=None, profile=profile, fitted=fitted, node_gpus=node_gpus, node_memory_bytes=node_memory_bytes,
            goodput=Goodput(since=now, booked_until=now), traceparent=traceparent, version=1,
        )  # fmt: skip
        job = {name: getattr(record, name) for name in record.model_fields_set} | spec_columns(spec)
        about = {"job_id": job_id, "attempt": 0, "time": now}
        state = {"state": record.state, "reason": record.reason, "message": record.message}
        events = [{**about, "kind": "state", "data": state}]
        if chosen is not None:
            events.append({**about, "kind": "layouts", "data": chosen})

        def write() -> JobRecord:
            # Plain statements take a fraction of the time of a session's objects.
            with self.engine.begin() as connection:
                if request is not None and (known := queries.earlier_result(connection, request, record.id)):
                    alongside(connection)
                    return self._known.read(connection, queries.ONE, {"job_id": known})[0]
                if connection.execute(_ONE_TOO_MANY, {"tenant": owner.tenant, "others": MOST_UNFINISHED - 1}).first():
                    problem = f"has {MOST_UNFINISHED} jobs that have not ended, which is the maximum"
                    raise model.TooManyJobs(f"the tenant {owner.tenant!r} {problem}; wait, or cancel some")
                arrival = connection.execute(_INSERT_JOB, job).scalar_one()
                connection.execute(insert(EventRow), events)
                if trial is not None:
                    of_sweep = {"sweep_id": trial[0], "number": trial[1], "job_id": record.id}
                    connection.execute(insert(SweepTrialRow), of_sweep)
                if trackers:
                    connection.execute(insert(TrackerRow), [{"job_id": record.id, "kind": kind} for kind in trackers])
                alongside(connection)
            return record.with_values({"arrival": arrival})

        return retried_once(write)

    def known(self, request: Request) -> JobRecord | None:
        """The job that a request has already created; ``None`` if it has not.

        Raises:
            IdempotencyKeyReused: The request's key came with another one before.
        """
        with self.engine.connect() as connection:
            job_id = queries.earlier_result(connection, request)
        return self.get(job_id) if job_id else None

    def get(self, job_id: str) -> JobRecord:
        """One job.

        Raises:
            JobNotFound: There is none with this id.
        """
        jobs = self.read(queries.ONE, {"job_id": job_id})
        if not jobs:
            raise JobNotFound(job_id)
        return jobs[0]

    def page(
        self, wanted: JobFilter = _ALL_JOBS, limit: int = 100, cursor: str | None = None
    ) -> tuple[Sequence[JobRecord], str | None]:
        """Jobs, the newest first, and the cursor for older ones; ``None`` if there are none.

        A search, by name, tags or text, reads only so many jobs: its page may have few or none although others follow.

        Args:
            wanted: Which.
            limit: Maximum number of results.
            cursor: Only jobs older than the one with this id.
        """
        searches = wanted.name is not None or wanted.tags or wanted.text is not None  # which no index has
        with self.engine.connect() as connection:
            end = connection.scalar(*queries.search_end(wanted, cursor)) if searches else None
            jobs = self._known.read(connection, *queries.listed(wanted, limit + 1, cursor, end))
        return jobs[:limit], jobs[limit - 1].id if len(jobs) > limit else end

    def ids(self, wanted: JobFilter, limit: int) -> Sequence[str]:
        """Ids of jobs, the newest first, at most ``limit``; of a search, whatever number of jobs has to be read."""
        return [job_id for job_id, _, _ in read_rows(self.engine, *queries.listed(wanted, limit, None))]

    def active(self) -> Sequence[JobRecord]:
        """All jobs that have not ended, in queue order."""
        return [job for job in self.read(queries.UNFINISHED) if not job.finished]  # one may have ended meanwhile

    def failed_since(self, moment: datetime, limit: int, tenant: str | None = None) -> Sequence[JobRecord]:
        """Jobs of a tenant, or of all, that have FAILED since a point in time, the newest first, at most ``limit``."""
        ours = true() if tenant is None else JobRow.tenant == tenant
        return self.read(queries.FAILED.where(JobRow.finished_at >= moment, ours).limit(limit))

    def some(self, job_ids: Collection[str]) -> Sequence[JobRecord]:
        """Those of some jobs that have not ended."""
        return self.read(queries.UNFINISHED.where(JobRow.id.in_(job_ids)))

    def read(self, query: queries.Heads, parameters: Mapping[str, Any] | None = None) -> Sequence[JobRecord]:
        """The jobs that a query with these parameters selects, in its order."""
        with self.engine.connect() as connection:
            return self._known.read(connection, query, parameters)

    def of_sweep(self, sweep_id: str) -> dict[int, JobRecord]:
        """The jobs of a sweep's trials, by the trials' numbers."""
        trials = select(SweepTrialRow.job_id, SweepTrialRow.number).where(SweepTrialRow.sweep_id == sweep_id)
        with self.engine.connect() as connection:
            numbers = {row.job_id: row.number for row in connection.execute(trials)}
            jobs = self._known.read(connection, queries.HEADS.where(JobRow.id.in_(numbers)))
        return {numbers[job.id]: job for job in jobs}

    def versions(self, job_ids: Sequence[str]) -> dict[str, int]:
        """The versions of some jobs, which increase with every write to a job."""
        return dict(read_rows(self.engine, select(JobRow.id, JobRow.version).where(JobRow.id.in_(job_ids))))

    def first_active(self, most: int, tenant: str | None = None) -> Sequence[JobRecord]:
        """Jobs that have not ended, of a tenant or of all: those with gangs, then others that came first.

        Args:
            most: Maximum number of jobs without a gang.
            tenant: Whose.
        """
        ours = true() if tenant is None else JobRow.tenant == tenant
        with self.engine.connect() as connection:
            jobs = self._known.read(connection, queries.WITH_GANGS.where(ours))
            jobs = [job for job in jobs if job.has_gang] + [job for job in jobs if not (job.has_gang or job.finished)]
            for state in (JobState.QUEUED, JobState.PAUSED):
                waiting = {"state": state, "limit": max(0, most - len(jobs))}
                jobs += self._known.read(connection, queries.FIRST_IN_STATE.where(ours), waiting)
        return [job for job in {job.id: job for job in jobs}.values() if not job.finished]

    def counts(self, tenant: str | None = None) -> dict[JobState, int]:
        """Number of jobs in each state, of a tenant or of all; zeros included."""
        counts = Counter[str]()
        for name, numbers in self.count_by(JobRow.tenant).items():
            if tenant in (None, name):
                counts.update(numbers)
        return {state: counts[state] for state in JobState}

    def count_by(self, column: InstrumentedAttribute[str]) -> dict[str, dict[str, int]]:
        """Number of jobs by the value of a column, ``queue`` or ``tenant``, and by state.

        Those that have not ended are counted each time. Many that have ended are counted once a second at most, because
        that takes longer the more there are.
        """
        now, counts = time.monotonic(), defaultdict[str, dict[str, int]](Counter)
        until, ended = self._ended.get(column.key, (0.0, []))
        with self.engine.connect() as connection:
            if now >= until:
                query = queries.ENDED.add_columns(column).group_by(column, JobRow.state)
                ended = [(state, number, value) for state, number, value in connection.execute(query)]
                if sum(number for _, number, _ in ended) >= _MANY_ENDED:
                    self._ended[column.key] = now + _ENDED_SECONDS, ended
            for state, number, value in ended:
                counts[value][state] = number
            for each in queries.backlog(connection):
                counts[getattr(each, column.key)][each.state] += each.jobs
        return counts

    def backlog(self, tenant: str | None = None) -> Sequence[Backlog]:
        """How many jobs have not ended, of a tenant or of all, by queue, tenant and state."""
        with self.engine.connect() as connection:
            return queries.backlog(connection, tenant)

    def change(self, job_id: str, reason: Reason, message: str, *, attempt: int | None = None) -> JobRecord:
        """Move a job to the state that a reason leads to, and store the event.

        A reason to go on waiting that says nothing new writes nothing.

        Args:
            job_id: The job.
            reason: Why it changes.
            message: The same in words.
            attempt: The number of the gang that this starts, if it starts one.

        Raises:
            JobNotFound: There is no such job.
            IllegalTransition: The reason leads nowhere from the job's state.
            TakenBack: It was to be paused for its user, who has resumed it in the meantime.
        """

        def plan(record: JobRecord, _session: Session) -> Write | None:
            if reason is Reason.PAUSED_BY_USER and not record.pause_requested:
                raise TakenBack(f"the user of job {record.id} has withdrawn the pause")
            return writes.changed(record, reason, message, record.attempt if attempt is None else attempt)

        return self._write(job_id, plan)

    def request_cancel(self, job_id: str, why: str | None = None) -> JobRecord:
        """Request that a job be cancelled; one without a gang is CANCELLED immediately, with the message ``why``.

        Cancelling a job again changes nothing.

        Raises:
            JobNotFound: There is no such job.
            AlreadyFinished: The job has SUCCEEDED or FAILED.
        """
        return self._write(job_id, lambda record, _: writes.cancelled(record, why))

    def cancel_many(self, job_ids: Collection[str]) -> Iterator[str]:
        """Request that jobs be cancelled, each as ``request_cancel`` does it, with a transaction for hundreds of them.

        Yields:
            Those that this has cancelled, as it does so. The others had ended or were being cancelled already, or do
            not exist.
        """
        planned: dict[str, Write | None] = {}

        def plan(record: JobRecord, _session: Session | None = None) -> Write | None:
            planned[record.id] = None if record.finished else writes.cancelled(record)
            return planned[record.id]

        for begin in range(0, len(ids := sorted(job_ids)), _CANCELLED_TOGETHER):
            left = {*ids[begin : begin + _CANCELLED_TOGETHER]}
            with suppress(Overtaken):
                with self.engine.begin() as connection:
                    # Waiting for others' locks while holding some could end in a deadlock.
                    unlocked = queries.HEADS.where(JobRow.id.in_(left)).order_by(JobRow.id)
                    jobs = self._known.read(connection, unlocked.with_for_update(skip_locked=True))
                    versions = self._store(connection, [(job, write) for job in jobs if (write := plan(job))])
                left.difference_update(job.id for job in jobs)
                self.notifications.publish(versions)
                yield from versions
            for job_id in left:  # another writer had it, or was faster
                with suppress(JobNotFound):
                    self._write(job_id, plan)
                    if planned[job_id]:
                        yield job_id

    def request_pause(self, job_id: str) -> JobRecord:
        """Request that a job be paused; one without a gang is PAUSED immediately.

        Pausing a job again changes nothing.

        Raises:
            JobNotFound: There is no such job.
            AlreadyFinished: The job has come to its end.
        """
        return self._write(job_id, lambda record, _: writes.paused(record))

    def resume(self, job_id: str) -> JobRecord:
        """Put a paused job back in the queue; one that has not paused yet keeps training.

        Raises:
            JobNotFound: There is no such job.
            AlreadyFinished: The job has come to its end.
            WrongState: The job is not paused, and no pause was requested.
        """
        return self._write(job_id, lambda record, _: writes.resumed(record))

    def retry(self, job_id: str, alongside: Callable[[Connection], object] = lambda _: None) -> JobRecord:
        """Put a job that has FAILED or was CANCELLED back in the queue.

        Args:
            job_id: The job.
            alongside: Called within the transaction once the job is in the queue.

        Raises:
            JobNotFound: There is no such job.
            WrongState: The job is in another state.
        """
        return self._write(job_id, lambda record, _: writes.retried(record), alongside)

    def number(self, job_id: str) -> JobRecord:
        """Give a job its number in the queue if a replica of a release before, which knows none, has submitted it.

        Raises as ``change`` does.
        """
        return self._write(job_id, lambda job, _: Write({"arrival": NEXT_ARRIVAL}) if job.arrival is None else None)

    def patch(
        self, job_id: str, changes: JobPatch, expected: str | None = None, chosen: ChosenLayouts | None = None,
        by: str = "anonymous",
    ) -> JobRecord:  # fmt: skip
        """Change a job's spec for its user, and store an event with the changes.

        What its ranks have to change between two steps waits in ``steers`` until its gang has done so.

        Args:
            job_id: The job.
            changes: The changes.
            expected: The entity tag that the job must have; ``None`` for any.
            chosen: Layouts chosen for the changed job, and why; stored as an event, too.
            by: Name of the user's key.

        Raises:
            JobNotFound: There is no such job.
            AlreadyFinished: The job has come to its end, and more than its group, tags and notes would change.
            Outdated: The job has another tag.
            WrongState: The job has no step left to do, or has been steered too often.
            pydantic.ValidationError: The changed job is not legal; names the fields of the spec.
        """
        return self._write(job_id, lambda record, _: writes.patched(record, changes, expected, chosen, by))

    def ask(self, job_id: str, command: WorkerCommand, request: Request | None = None) -> JobRecord:
        """Request a drill, which is also stored as an event, or a profile of a job's gang; see ``take_commands``.

        Args:
            job_id: The job.
            command: The drill or profile.
            request: What asks for it, if that may come again; it takes effect once.

        Raises:
            JobNotFound: There is no such job.
            WrongState: The job is not RUNNING, or too many wait to be given to its gang.
            IdempotencyKeyReused: The request's key came with another one before.
            pydantic.ValidationError: The gang has no such rank.
        """
        return self._write_requested(job_id, request, lambda record: writes.commanded(record, command))

    def add_scores(self, job_id: str, scores: Scores, request: Request | None = None) -> JobRecord:
        """Store the scores of one of a job's checkpoints on tasks as an event.

        Args:
            job_id: The job.
            scores: The evaluation.
            request: What asks for it, if that may come again; it takes effect once.

        Raises:
            JobNotFound: There is no such job.
            IdempotencyKeyReused: The request's key came with another one before.
        """
        return self._write_requested(job_id, request, lambda job: Write({}, [writes.event(job, "scores", scores)]))

    def add_fault(self, job_id: str, fault: FaultReport) -> JobRecord:
        """Store a fault of a job that was found by others than its gang.

        Raises:
            JobNotFound: There is no such job.
            LeaseLost: Another process does the work now for which this one had a lease.
        """
        return self._write(job_id, lambda record, _: writes.add_fault(record, fault))

    def take_commands(self, job_id: str) -> Sequence[WorkerCommand]:
        """Return the drills and profiles requested since the last call, each once.

        Raises:
            JobNotFound: There is no such job.
        """
        commands: list[WorkerCommand] = []

        def plan(record: JobRecord, _session: Session) -> Write | None:
            commands[:] = record.commands
            return Write({"commands": []}) if commands else None

        self._write(job_id, plan)
        return commands

    def append_reports(self, job_id: str, attempt: int, reports: Sequence[NumberedReport]) -> JobRecord:
        """Store a gang's reports as events, each exactly once, and the newest ones with the job.

        Reports already stored are left out, and so are all of a gang that a newer one has replaced.

        Args:
            job_id: The job.
            attempt: Number of the gang.
            reports: In order.

        Raises:
            JobNotFound: There is no such job.
        """

        def plan(record: JobRecord, session: Session) -> Write | None:
            newest = select(func.max(EventRow.sequence))
            stored = session.scalar(newest.where(EventRow.job_id == job_id, EventRow.attempt == attempt)) or 0
            fresh = [report for report in reports if report[0] > stored]
            if not fresh or attempt < record.attempt:
                return None
            return writes.reported(record, attempt, fresh)[1]

        return self._write(job_id, plan)

    def checkpoint_removed(self, job_id: str, step: int, newest: int | None) -> JobRecord:
        """Make a job's record name its newest remaining checkpoint if it names one that has been removed.

        Args:
            job_id: The job.
            step: Step of the checkpoint that has been removed.
            newest: Step of the newest remaining checkpoint; ``None`` if none remains.

        Raises:
            JobNotFound: There is no such job.
        """

        def plan(record: JobRecord, session: Session) -> Write | None:
            if record.checkpoint is None or record.checkpoint.step != step:
                return None
            of_job = (EventRow.job_id == job_id) & (EventRow.kind == "checkpoint")
            reports = select(EventRow).where(of_job, EventRow.data["step"].as_integer() == newest)
            report = session.scalar(reports.order_by(EventRow.id.desc()).limit(1))
            return Write({"checkpoint": report and report.data, "checkpoint_at": report and report.time})

        return self._write(job_id, plan)

    def append_many(self, reported: Sequence[tuple[JobRecord, Sequence[NumberedReport]]]) -> None:
        """Store reports of the newest gangs of many jobs in one transaction, without reading the jobs again.

        Args:
            reported: Each job as it was read last, and reports of its newest gang that are not stored yet, in order.

        Raises:
            Overtaken: Some of the jobs have been changed since; nothing is stored.
            sqlalchemy.exc.IntegrityError: Some of the reports have been stored already; nothing is stored.
            LeaseLost: Another process does the work now for which this one had a lease.
        """
        changes = [(record, *writes.reported(record, record.attempt, reports)) for record, reports in reported]
        with self.engine.begin() as connection:
            versions = self._store(connection, [(record, write) for record, _, write in changes])
        self.notifications.publish(versions)
        self._known.remember({after.id: after for _, after, _ in changes})

    def _store(self, connection: Connection, changes: Sequence[tuple[JobRecord, Write]]) -> dict[str, int]:
        """Write new values of jobs, each as it was read, and their events; return the jobs' new versions.

        Raises:
            Overtaken: Some of the jobs have been changed since.
            LeaseLost: Another process does the work now for which this one had a lease.
        """
        by_columns: dict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
        for job, write in changes:
            row = {"of_job": job.id, "read": job.version, "new_version": job.version + 1}
            row |= {f"new_{name}": value for name, value in write.values.items()}
            by_columns[tuple(sorted(write.values))].append(row)
        unmoved = (JobRow.id == bindparam("of_job")) & (JobRow.version == bindparam("read")) & permitted(self._lease)
        # Jobs are written before their events: this locks them, so that events' ids follow the order of commits.
        for columns, alike in sorted(by_columns.items(), key=itemgetter(0)):
            new: dict[str, Any] = {name: bindparam(f"new_{name}") for name in (*columns, "version")}
            if "arrival" in new:  # always the next one
                new["arrival"] = NEXT_ARRIVAL
            if connection.execute(update(JobRow).where(unmoved).values(new), alike).rowcount != len(alike):
                refuse_if_lost(connection, self._lease)
                raise Overtaken(f"at least one of {len(alike)} jobs has been changed since it was read")
        if events := [event for _, write in changes for event in write.events]:
            connection.execute(insert(EventRow), events)
        observations.add(connection, [each for _, write in changes for each in write.observed])
        versions = {job.id: job.version + 1 for job, _ in changes}
        notify(connection, versions)
        return versions

    def last_sequences(self, job_ids: Collection[str]) -> dict[str, int]:
        """Sequence number of the newest stored report of each job's newest gang; 0 if there is none."""
        of_newest = (EventRow.job_id == JobRow.id) & (EventRow.attempt == JobRow.attempt)
        newest = select(func.max(EventRow.sequence)).where(of_newest).correlate(JobRow).scalar_subquery()
        query = select(JobRow.id, func.coalesce(newest, 0)).where(JobRow.id.in_(job_ids))
        return dict(read_rows(self.engine, query))

    def count_changes(self, job_id: str, reason: Reason, since: datetime) -> int:
        """Number of changes of a job's state for a reason since a time."""
        of_reason = (EventRow.kind == "state") & (EventRow.data["reason"].as_string() == reason)
        query = select(func.count()).where(EventRow.job_id == job_id, EventRow.time >= since, of_reason)
        return read_rows(self.engine, query)[0][0]

    def events(
        self, job_id: str, after_id: int = 0, limit: int = 1000, wanted: EventFilter = _ALL_EVENTS
    ) -> Sequence[JobEvent]:
        """Events of a job with ids above ``after_id``, in order, at most ``limit``."""
        query = select(EventRow.__table__).where(EventRow.job_id == job_id, EventRow.id > after_id)
        if wanted.kinds is not None:
            query = query.where(EventRow.kind.in_(wanted.kinds))
        if wanted.since is not None:
            query = query.where(EventRow.time >= wanted.since)
        if wanted.rank is not None:
            query = query.where(EventRow.data["rank"].as_integer() == wanted.rank)
        if wanted.levels is not None:
            query = query.where(EventRow.data["level"].as_string().in_(wanted.levels))
        return read_models(self.engine, JobEvent, query.order_by(EventRow.id).limit(limit))

    def position(self, job_id: str) -> Position:
        """How far a job is.

        Raises:
            JobNotFound: There is none with this id.
        """
        newest = select(func.max(EventRow.id)).where(EventRow.job_id == job_id).scalar_subquery()
        rows = read_rows(self.engine, select(JobRow.version, JobRow.state, newest).where(JobRow.id == job_id))
        for version, state, event_id in rows:
            return Position(version, state in TERMINAL_STATES, event_id or 0)
        raise JobNotFound(job_id)

    def explain(self, messages: Mapping[str, str]) -> None:
        """Store what queued jobs wait for. This does not count as a change: the version stays, and there is no event.

        Args:
            messages: By job.

        Raises:
            LeaseLost: Another process does the work now for which this one had a lease.
        """
        queued = (JobRow.id == bindparam("job_id")) & (JobRow.state == JobState.QUEUED)
        new = JobRow.waiting_for.is_distinct_from(bindparam("waits_for"))
        statement = update(JobRow).where(queued, new, permitted(self._lease)).values(waiting_for=bindparam("waits_for"))
        # All processes lock rows in the same order.
        parameters = [{"job_id": job_id, "waits_for": message} for job_id, message in sorted(messages.items())]
        with self.engine.begin() as connection:
            if parameters:
                connection.execute(statement, parameters)
            refuse_if_lost(connection, self._lease)

    def keep_snapshot(self, name: str, data: Any) -> None:
        """Store what the scheduler sees, for other processes to show.

        Raises:
            LeaseLost: Another process does the work now for which this one had a lease.
        """
        with Session(self.engine) as session, session.begin():
            session.merge(SnapshotRow(name=name, time=datetime.now(UTC), data=data))
            session.flush()
            refuse_if_lost(session.connection(), self._lease)

    def snapshot(self, name: str) -> tuple[datetime, Any] | None:
        """The value last stored under a name, and when; ``None`` if there is none."""
        query = select(SnapshotRow.time, SnapshotRow.data).where(SnapshotRow.name == name)
        return next(iter(read_rows(self.engine, query)), None)

    def checkpoint_bandwidth(self, tenant: str, folder: str) -> float | None:
        """Return the bytes per second at which a tenant's checkpoints have been written to a store.

        Args:
            tenant: The tenant.
            folder: URL or path of a folder in the store: a bucket, or all disks.

        Returns:
            That of the largest among the newest of its newest jobs; ``None`` if none is large enough to tell the
            bandwidth from the time that a request takes.
        """
        theirs = JobRow.tenant == tenant, JobRow.checkpoint.is_not(None)
        newest = select(JobRow.checkpoint, JobRow.checkpoint_url).where(*theirs).order_by(JobRow.id.desc())
        rows, place = read_rows(self.engine, newest.limit(_NEWEST_CHECKPOINTS)), urlsplit(folder, "file")[:2]
        reports = [CheckpointReport.model_validate(each) for each, url in rows if urlsplit(url, "file")[:2] == place]
        largest = max(reports, key=lambda report: report.bytes, default=None)
        if largest is None or largest.bytes < _LARGE_CHECKPOINT or largest.commit_seconds <= 0:
            return None
        return largest.bytes / largest.commit_seconds

    def forget_old_requests(self) -> None:
        """Delete requests that are too old to be repeated."""
        with self.engine.begin() as connection:
            connection.execute(delete(RequestRow).where(RequestRow.time < datetime.now(UTC) - model.KEPT))

    def _write_requested(self, job_id: str, request: Request | None, change: Callable[[JobRecord], Write]) -> JobRecord:
        """Carry out a request once, however often it is repeated."""
        if request is None:
            return self._write(job_id, lambda record, _: change(record))

        def plan(record: JobRecord, session: Session) -> Write | None:
            return None if queries.earlier_result(session, request, job_id) else change(record)

        return retried_once(lambda: self._write(job_id, plan))

    def _write(
        self, job_id: str, plan: Callable[[JobRecord, Session], Write | None],
        alongside: Callable[[Connection], object] = lambda _: None,
    ) -> JobRecord:  # fmt: skip
        """Carry out ``plan`` on the newest record in one transaction; plan again if another writer was faster."""
        for _ in range(_LOST_RACES):
            with suppress(Overtaken):
                with Session(self.engine) as session, session.begin():
                    record = queries.load(session, job_id)
                    if (write := plan(record, session)) is not None:
                        self._store(session.connection(), [(record, write)])
                        alongside(session.connection())
                        record = queries.load(session, job_id)
                self.notifications.publish({job_id: record.version})
                return record
        raise RuntimeError(f"{_LOST_RACES} writes to job {job_id} lost the race against other writers")
