"""Reading the record: functions on a session."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from typing import Any

from sqlalchemy import Connection, Select, bindparam, func, select
from sqlalchemy.orm import InstrumentedAttribute, Session

from service.jobs.model import EventKind, JobEvent, JobFilter, JobRecord
from service.jobs.states import TERMINAL_STATES, JobState
from service.jobs.tables import EventRow, JobRow

ACTIVE_STATES = frozenset(JobState) - TERMINAL_STATES

Heads = Select[str, int, str | None]  # of jobs: the id, and what tells whether a record of it is still the newest
_HEADS: Heads = select(JobRow.id, JobRow.version, JobRow.waiting_for)
ONE = _HEADS.where(JobRow.id == bindparam("job_id"))
UNFINISHED = _HEADS.where(JobRow.state.in_(ACTIVE_STATES)).order_by(
    JobRow.arrival.nulls_last(), JobRow.queued_at, JobRow.id
)
FAILED = _HEADS.where(JobRow.state == JobState.FAILED).order_by(JobRow.finished_at.desc(), JobRow.id)
WITH_GANGS = _HEADS.where(JobRow.state.in_((JobState.SCHEDULING, JobState.RUNNING)))  # as far as the state tells
_CONDITIONS = {
    "states": JobRow.state.in_(bindparam("states", expanding=True)),
    "tenant": JobRow.tenant == bindparam("tenant"),
    "queue": JobRow.queue == bindparam("queue"),
    "submitted_by": JobRow.submitted_by == bindparam("submitted_by"),
    "cursor": JobRow.id < bindparam("cursor"),
}


class JobNotFound(LookupError):
    """There is no job with this id."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"there is no job {job_id!r}; list the jobs to see their ids")


@dataclass(frozen=True)
class EventFilter:
    """Which events of a job to read; ``None`` for any.

    Attributes:
        kinds: Of one of these kinds.
        since: Not older than this.
        rank: Of this rank; of log lines only.
        levels: Of one of these levels; of log lines only.
    """

    kinds: Collection[str] | None = None
    since: datetime | None = None
    rank: int | None = None
    levels: Collection[str] | None = None

    def matches(self, event: JobEvent) -> bool:
        """Whether an event matches."""
        return (
            (self.kinds is None or event.kind in self.kinds)
            and (self.since is None or event.time >= self.since)
            and (self.rank is None or event.data.get("rank") == self.rank)
            and (self.levels is None or event.data.get("level") in self.levels)
        )


@dataclass(frozen=True)
class Position:
    """The position of a job in its history.

    Attributes:
        version: Increases with every write to the job.
        finished: Whether it has ended.
        newest: Id of its newest event.
    """

    version: int
    finished: bool
    newest: int


def record_of(job: JobRow) -> JobRecord:
    """Convert a row to a record."""
    return JobRecord.model_validate(job, from_attributes=True)


def load(session: Session, job_id: str) -> JobRecord:
    """One job.

    Raises:
        JobNotFound: There is none with this id.
    """
    job = session.get(JobRow, job_id, populate_existing=True)
    if job is None:
        raise JobNotFound(job_id)
    return record_of(job)


def listed(wanted: JobFilter, limit: int, cursor: str | None) -> tuple[Heads, dict[str, Any]]:
    """The query for jobs, newest first, and its parameters."""
    filters: dict[str, Any] = {
        "states": None if wanted.states is None else list(wanted.states),
        "tenant": wanted.tenant,
        "queue": wanted.queue,
        "submitted_by": wanted.submitted_by,
        "cursor": cursor,
    }
    given = {name: value for name, value in filters.items() if value is not None}
    query = _listed(frozenset(given))
    if wanted.name is not None:
        query = query.where(JobRow.name.icontains(wanted.name, autoescape=True))
    return query, given | {"limit": limit}


@cache  # there are few, and composing one takes longer than running it
def _listed(conditions: frozenset[str]) -> Heads:
    query = _HEADS.where(*(_CONDITIONS[name] for name in conditions))
    return query.order_by(JobRow.id.desc()).limit(bindparam("limit"))


def events(session: Session, job_id: str, after_id: int, limit: int, wanted: EventFilter) -> Sequence[JobEvent]:
    """Events of a job with ids above ``after_id``, in order, at most ``limit``."""
    query = select(EventRow).where(EventRow.job_id == job_id, EventRow.id > after_id)
    if wanted.kinds is not None:
        query = query.where(EventRow.kind.in_(wanted.kinds))
    if wanted.since is not None:
        query = query.where(EventRow.time >= wanted.since)
    if wanted.rank is not None:
        query = query.where(EventRow.data["rank"].as_integer() == wanted.rank)
    if wanted.levels is not None:
        query = query.where(EventRow.data["level"].as_string().in_(wanted.levels))
    found = session.scalars(query.order_by(EventRow.id).limit(limit))
    return [JobEvent.model_validate(event, from_attributes=True) for event in found]


def newest_events(session: Session, job_id: str, kind: EventKind, limit: int) -> Sequence[JobEvent]:
    """A job's events of a kind, newest first, at most ``limit``."""
    query = select(EventRow).where(EventRow.job_id == job_id, EventRow.kind == kind)
    found = session.scalars(query.order_by(EventRow.id.desc()).limit(limit))
    return [JobEvent.model_validate(event, from_attributes=True) for event in found]


def position(session: Session, job_id: str) -> Position:
    """How far a job is.

    Raises:
        JobNotFound: There is none with this id.
    """
    newest = select(func.max(EventRow.id)).where(EventRow.job_id == job_id).scalar_subquery()
    found = session.execute(select(JobRow.version, JobRow.state, newest).where(JobRow.id == job_id)).one_or_none()
    if found is None:
        raise JobNotFound(job_id)
    version, state, event_id = found
    return Position(version, JobState(state) in TERMINAL_STATES, event_id or 0)


def last_sequence(session: Session, job_id: str, attempt: int) -> int:
    """Sequence number of the newest stored report of a gang; 0 if there is none."""
    query = select(func.max(EventRow.sequence)).where(EventRow.job_id == job_id, EventRow.attempt == attempt)
    return session.scalar(query) or 0


def last_sequences(session: Session, job_ids: Collection[str]) -> dict[str, int]:
    """The same for some jobs' newest gangs."""
    of_newest = (EventRow.job_id == JobRow.id) & (EventRow.attempt == JobRow.attempt)
    newest = select(func.max(EventRow.sequence)).where(of_newest).correlate(JobRow).scalar_subquery()
    found = session.execute(select(JobRow.id, newest).where(JobRow.id.in_(job_ids)))
    return {job_id: sequence or 0 for job_id, sequence in found}


def count_by(connection: Connection, column: InstrumentedAttribute[str]) -> dict[str, dict[str, int]]:
    """Number of jobs by a column's value and by state."""
    counts: dict[str, dict[str, int]] = defaultdict(dict)
    for value, state, number in connection.execute(_counted_by(column)):
        counts[value][state] = number
    return counts


@cache
def _counted_by(column: InstrumentedAttribute[str]) -> Select[str, str, int]:
    return select(column, JobRow.state, func.count()).group_by(column, JobRow.state)
