"""The store: the one place that reads and writes job records and their events."""

from collections.abc import Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import Any

from sqlalchemy import CursorResult, func, select, update
from sqlalchemy.orm import Session

from boost_core.config import Drill, JobSpec
from boost_core.config.reports import Report
from service.jobs import writes
from service.jobs.database import open_engine
from service.jobs.goodput import Goodput
from service.jobs.ids import new_job_id
from service.jobs.model import JobEvent, JobRecord
from service.jobs.patch import JobPatch
from service.jobs.states import TERMINAL_STATES, JobState, Reason
from service.jobs.tables import EventRow, JobRow
from service.jobs.writes import Write

ACTIVE_STATES = frozenset(JobState) - TERMINAL_STATES

_LOST_RACES = 100


class JobNotFound(LookupError):
    """There is no job with this id."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"there is no job {job_id!r}; list the jobs to see their ids")
        self.job_id = job_id


class JobStore:
    """Jobs and their events in an SQL database whose tables are up to date (``service.jobs.database.migrate``).

    Threads may share a store, and processes a database: every write to a job is guarded by its version
    and done again on the newer record when another writer was faster.

    Args:
        database_url: A URL of SQLAlchemy, for example ``sqlite:////var/lib/boost/boost.db``.
    """

    def __init__(self, database_url: str) -> None:
        self._engine = open_engine(database_url)

    def close(self) -> None:
        """Close all connections."""
        self._engine.dispose()

    def create(self, spec: JobSpec, checkpoint_root: str) -> JobRecord:
        """Store a new job, QUEUED.

        Args:
            spec: What to train.
            checkpoint_root: Folder for checkpoints if the spec names none; the job's id is added to either.
        """
        job_id, now = new_job_id(), datetime.now(UTC)
        job = JobRow(
            id=job_id,
            name=spec.name,
            spec=spec.model_dump(mode="json"),
            state=JobState.QUEUED,
            reason=Reason.SUBMITTED,
            message="waits for its turn",
            checkpoint_url=f"{(spec.checkpoint.url or checkpoint_root).rstrip('/')}/{job_id}",
            submitted_at=now,
            goodput=Goodput.begin(now).model_dump(mode="json"),
        )
        with Session(self._engine) as session, session.begin():
            session.add(job)
            session.flush()
            session.add(writes.state_event(job_id, 0, now, JobState.QUEUED, Reason.SUBMITTED, job.message))
            return _record(job)

    def get(self, job_id: str) -> JobRecord:
        """One job.

        Raises:
            JobNotFound: There is none with this id.
        """
        with Session(self._engine) as session:
            return _load(session, job_id)

    def list(
        self, states: Collection[JobState] | None = None, limit: int = 100, cursor: str | None = None
    ) -> Sequence[JobRecord]:
        """Jobs, the newest first.

        Args:
            states: Only jobs in one of these.
            limit: At most so many.
            cursor: Only jobs older than the one with this id.
        """
        query = select(JobRow).order_by(JobRow.id.desc()).limit(limit)
        if states is not None:
            query = query.where(JobRow.state.in_(states))
        if cursor is not None:
            query = query.where(JobRow.id < cursor)
        with Session(self._engine) as session:
            return [_record(job) for job in session.scalars(query)]

    def active(self) -> Sequence[JobRecord]:
        """All jobs that have not come to their end, the oldest first."""
        query = select(JobRow).where(JobRow.state.in_(ACTIVE_STATES)).order_by(JobRow.id)
        with Session(self._engine) as session:
            return [_record(job) for job in session.scalars(query)]

    def counts(self) -> dict[JobState, int]:
        """How many jobs are in each state; zeros included."""
        query = select(JobRow.state, func.count()).group_by(JobRow.state)
        with Session(self._engine) as session:
            found = {JobState(state): count for state, count in session.execute(query)}
        return {state: found.get(state, 0) for state in JobState}

    def change(self, job_id: str, reason: Reason, message: str, *, attempt: int | None = None) -> JobRecord:
        """Take a job to the state that a reason leads to, and store the event with it.

        A reason to go on waiting that says nothing new writes nothing.

        Args:
            job_id: The job.
            reason: Why it changes.
            message: The same for people.
            attempt: The number of the gang that this starts, if it starts one.

        Raises:
            JobNotFound: There is no such job.
            IllegalTransition: The reason leads nowhere from the job's state.
        """

        def plan(record: JobRecord) -> Write | None:
            return writes.changed(record, reason, message, record.attempt if attempt is None else attempt)

        return self._write(job_id, plan)

    def request_cancel(self, job_id: str) -> JobRecord:
        """Ask for a job to be cancelled; one that has no gang yet is CANCELLED at once.

        Cancelling a job again changes nothing.

        Raises:
            JobNotFound: There is no such job.
            AlreadyFinished: The job has SUCCEEDED or FAILED.
        """
        return self._write(job_id, writes.cancelled)

    def request_pause(self, job_id: str) -> JobRecord:
        """Ask for a job to be paused; one that has no gang is PAUSED at once.

        Pausing a job again changes nothing.

        Raises:
            JobNotFound: There is no such job.
            AlreadyFinished: The job has come to its end.
        """
        return self._write(job_id, writes.paused)

    def resume(self, job_id: str) -> JobRecord:
        """Put a paused job in the queue again; one that was not paused yet as it was asked for goes on.

        Raises:
            JobNotFound: There is no such job.
            AlreadyFinished: The job has come to its end.
            WrongState: The job is not paused, and nobody has asked for that.
        """
        return self._write(job_id, writes.resumed)

    def patch(self, job_id: str, changes: JobPatch) -> JobRecord:
        """Change what the user said about a job, and store an event with what is different.

        Raises:
            JobNotFound: There is no such job.
            AlreadyFinished: The job has come to its end.
            pydantic.ValidationError: The changed job is not legal; names the fields of the spec.
        """
        return self._write(job_id, lambda record: writes.patched(record, changes))

    def request_drill(self, job_id: str, drill: Drill) -> JobRecord:
        """Ask for a fault in a job, and store an event with it; ``take_drills`` hands it on.

        Raises:
            JobNotFound: There is no such job.
            WrongState: The job is not RUNNING.
            pydantic.ValidationError: The gang has no such rank.
        """
        return self._write(job_id, lambda record: writes.drilled(record, drill))

    def take_drills(self, job_id: str) -> Sequence[Drill]:
        """The faults asked for since the last call, each told once.

        Raises:
            JobNotFound: There is no such job.
        """
        taken: list[Drill] = []

        def plan(record: JobRecord) -> Write | None:
            taken[:] = record.drills
            return Write({"drills": []}) if taken else None

        self._write(job_id, plan)
        return taken

    def append_reports(self, job_id: str, attempt: int, reports: Sequence[tuple[int, datetime, Report]]) -> JobRecord:
        """Store a gang's reports as events, each exactly once, and the newest ones with the job.

        Reports already stored are left out, and so are all of a gang that a newer one has replaced.

        Args:
            job_id: The job.
            attempt: Number of the gang.
            reports: Sequence number in the attempt, time and report of each, in order.

        Raises:
            JobNotFound: There is no such job.
        """

        def plan(session: Session, record: JobRecord) -> Write | None:
            stored = _last_sequence(session, job_id, attempt)
            fresh = {number: (time, report) for number, time, report in reports if number > stored}
            if not fresh or attempt < record.attempt:
                return None
            return writes.reported(record, attempt, fresh)

        return self._write_with(job_id, plan)

    def last_sequence(self, job_id: str, attempt: int) -> int:
        """Sequence number of the newest stored report of a gang; 0 if there is none."""
        with Session(self._engine) as session:
            return _last_sequence(session, job_id, attempt)

    def count_changes(self, job_id: str, reason: Reason, since: datetime) -> int:
        """How often a job's state has changed for a reason since then."""
        of_reason = (EventRow.kind == "state") & (EventRow.data["reason"].as_string() == reason)
        query = select(func.count()).where(EventRow.job_id == job_id, EventRow.time >= since, of_reason)
        with Session(self._engine) as session:
            return session.scalar(query) or 0

    def events(self, job_id: str, after_id: int = 0, limit: int = 1000) -> Sequence[JobEvent]:
        """Events of a job with ids above ``after_id``, in order, at most ``limit``."""
        query = (
            select(EventRow).where(EventRow.job_id == job_id, EventRow.id > after_id).order_by(EventRow.id).limit(limit)
        )
        with Session(self._engine) as session:
            return [JobEvent.model_validate(event, from_attributes=True) for event in session.scalars(query)]

    def _write(self, job_id: str, plan: Callable[[JobRecord], Write | None]) -> JobRecord:
        return self._write_with(job_id, lambda _session, record: plan(record))

    def _write_with(self, job_id: str, plan: Callable[[Session, JobRecord], Write | None]) -> JobRecord:
        """Do what ``plan`` says of the newest record, in one transaction; plan anew when another was faster."""
        for _ in range(_LOST_RACES):
            with Session(self._engine) as session, session.begin():
                record = _load(session, job_id)
                write = plan(session, record)
                if write is None:
                    return record
                # The job comes before its events: it is locked then, and their ids grow in the order of commits.
                if _update(session, record, write.values):
                    session.add_all(write.events)
                    return _load(session, job_id)
        raise RuntimeError(f"{_LOST_RACES} writes to job {job_id} lost the race against other writers")


def _update(session: Session, record: JobRecord, values: dict[str, Any]) -> bool:
    """Write to a job unless its version has moved on; say whether it was written."""
    unmoved = (JobRow.id == record.id) & (JobRow.version == record.version)
    result = session.execute(update(JobRow).where(unmoved).values(**values, version=record.version + 1))
    assert isinstance(result, CursorResult)
    return result.rowcount == 1


def _load(session: Session, job_id: str) -> JobRecord:
    job = session.get(JobRow, job_id, populate_existing=True)
    if job is None:
        raise JobNotFound(job_id)
    return _record(job)


def _record(job: JobRow) -> JobRecord:
    return JobRecord.model_validate(job, from_attributes=True)


def _last_sequence(session: Session, job_id: str, attempt: int) -> int:
    query = select(func.max(EventRow.sequence)).where(EventRow.job_id == job_id, EventRow.attempt == attempt)
    return session.scalar(query) or 0
