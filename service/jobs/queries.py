"""Reading the record: queries, functions on a session, a cache of records, and a job's curves."""

import math
import threading
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from functools import cache
from itertools import islice
from statistics import fmean
from typing import Any, NamedTuple
from weakref import WeakValueDictionary

from pydantic import BaseModel
from sqlalchemy import ColumnElement, Connection, Integer, Select, bindparam, case, func, insert, or_, select, union_all
from sqlalchemy.orm import Session, aliased
from sqlalchemy.sql import false

from boost_core.messages import perplexity_of
from service.jobs.database import SHORT_READS
from service.jobs.model import EventKind, IdempotencyKeyReused, JobEvent, JobFilter, JobRecord, Request, one_set
from service.jobs.states import TERMINAL_STATES, JobState, Reason
from service.jobs.tables import RESULTS, EventRow, JobRow, RequestRow
from service.models.jobs import EvaluationPoint, MetricsHistory, MetricsSample, NamedValidationPoint, RankTimes

ACTIVE_STATES = frozenset(JobState) - TERMINAL_STATES

_Earlier = aliased(JobRow)
NEXT_ARRIVAL = select(func.coalesce(func.max(_Earlier.arrival), 0) + 1).scalar_subquery()  # of a job that queues now

Heads = Select[str, int, str | None]  # of jobs: the id, and what tells whether a record of it is still the newest
HEADS: Heads = select(JobRow.id, JobRow.version, JobRow.waiting_for)
_RECORDS = select(*(getattr(JobRow, name).label(name) for name in JobRecord.model_fields if hasattr(JobRow, name)))
ONE = HEADS.where(JobRow.id == bindparam("job_id"))
_ACTIVE = HEADS.where(JobRow.state.in_(ACTIVE_STATES))
UNFINISHED = _ACTIVE.order_by(JobRow.arrival.nulls_last(), JobRow.queued_at, JobRow.id)
FAILED = HEADS.where(JobRow.state == JobState.FAILED).order_by(JobRow.finished_at.desc(), JobRow.id)
FIRST_IN_STATE = HEADS.where(JobRow.state == bindparam("state")).order_by(JobRow.arrival).limit(bindparam("limit"))
WITH_GANGS = HEADS.where(JobRow.state.in_((JobState.SCHEDULING, JobState.RUNNING)))  # as far as the state tells
BACKLOG = select(JobRow.queue, JobRow.tenant, JobRow.state, func.count(), func.min(JobRow.waiting_since))
BACKLOG = BACKLOG.where(JobRow.state.in_(ACTIVE_STATES)).group_by(JobRow.state, JobRow.queue, JobRow.tenant)
ENDED = select(JobRow.state, func.count()).where(JobRow.state.in_(TERMINAL_STATES))
_ALIKE = (JobRow.tenant, JobRow.queue, JobRow.submitted_by, JobRow.group)  # fields of ``JobFilter``, too
_CONDITIONS = {column.key: column == bindparam(column.key) for column in _ALIKE}
_CONDITIONS |= {"cursor": JobRow.id < bindparam("cursor"), "end": JobRow.id >= bindparam("end")}
MOST_SEARCHED = 10_000  # jobs in each state that are read for a page of a search; more are read for the next page

MEANS = tuple(name for name in MetricsSample.model_fields if name not in ("step", "time", "loss_min", "loss_max"))
_NO_NUMBERS = ("NaN", "Infinity", "-Infinity")  # how events store numbers that JSON lacks
MOST_RANK_TIMES = 100_000  # in an answer, which then has about 2 MB and is drawn within a tenth of a second
LOSS_STEPS = 20  # over which a job's last loss is averaged: one batch's differs from the next's by tenths
_CHUNK = 500
_MOST_IN_SHORT_READ = 2  # records to make or change; each takes up to a third of a millisecond


class JobNotFound(LookupError):
    """There is no job with this id."""

    def __init__(self, job_id: str) -> None:
        super().__init__(f"there is no job {job_id!r}; list the jobs to see their ids")


class EventFilter(NamedTuple):
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


class Position(NamedTuple):
    """The position of a job in its history.

    Attributes:
        version: Increases with every write to the job.
        finished: Whether it has ended.
        newest: Id of its newest event.
    """

    version: int
    finished: bool
    newest: int


class TooManyUnknown(RuntimeError):
    """A short read would have to make too many records."""


@dataclass
class JobCache:
    """Reads jobs, making records only of those that have changed. Threads may share it.

    Making a record from a row takes longer than everything else in listing jobs. Each time, the current versions are
    read from the database, because other processes write to it, too.

    Equal parts of specs are one object: most jobs are like others, and specs are most of a record.

    Attributes:
        most: Maximum number of records kept, those read last.
    """

    most: int = 25_000
    _known: dict[str, JobRecord] = field(default_factory=dict, init=False)
    _lock: threading.Lock = field(default_factory=threading.Lock, init=False)
    _parts: WeakValueDictionary[tuple[str, str], BaseModel] = field(default_factory=WeakValueDictionary, init=False)

    def read(
        self, connection: Connection, query: Heads, parameters: Mapping[str, Any] | None = None
    ) -> list[JobRecord]:
        """Return the jobs that a query selects, in its order.

        Args:
            connection: Connection to the database.
            query: The query.
            parameters: Values of its parameters.

        Raises:
            TooManyUnknown: It is a connection for short reads, and too many of the jobs are not cached as they are now.
        """
        heads = connection.execute(query, parameters).all()
        with self._lock:
            jobs = {job_id: self._known.pop(job_id) for job_id, _, _ in heads if job_id in self._known}
            self._known |= jobs  # so that they come last
        waiting: dict[str, str | None] = {}
        unknown: list[str] = []
        for job_id, version, waiting_for in heads:
            job = jobs.get(job_id)
            if job is None or job.version != version:
                unknown.append(job_id)
            elif job.waiting_for != waiting_for:
                waiting[job_id] = waiting_for  # which changes without the version
        if len(unknown) + len(waiting) > _MOST_IN_SHORT_READ and SHORT_READS in connection.get_execution_options():
            raise TooManyUnknown
        changed = {job_id: jobs[job_id].with_values({"waiting_for": what}) for job_id, what in waiting.items()}
        for begin in range(0, len(unknown), _CHUNK):
            chunk = _RECORDS.where(JobRow.id.in_(unknown[begin : begin + _CHUNK]))
            for row in map(dict, connection.execute(chunk).mappings()):
                # Parts of its spec that were made of the same JSON before are not made and checked again.
                content: dict[str, Any] = row["spec"]
                keys = {name: (name, repr(part)) for name, part in content.items() if isinstance(part, dict)}
                with self._lock:
                    known = {name: part for name, key in keys.items() if (part := self._parts.get(key)) is not None}
                record = JobRecord.model_validate({**row, "spec": {**content, **known}})
                with self._lock:
                    for name in keys.keys() - known.keys():
                        self._parts[keys[name]] = getattr(record.spec, name)
                for each in (record, record.spec):
                    object.__setattr__(each, "__pydantic_fields_set__", one_set(each.model_fields_set))
                changed[record.id] = record
        self.remember(changed, jobs)
        jobs |= changed
        return [jobs[job_id] for job_id, _, _ in heads]

    def remember(self, jobs: Mapping[str, JobRecord], others: Collection[str] = ()) -> None:
        """Remember records, by id, as they are in the database now.

        Args:
            jobs: The records.
            others: Jobs that were found with them. They are not forgotten for these, or reading more jobs than are kept
                would forget each before it is read again.
        """
        with self._lock:
            for job_id in jobs:
                self._known.pop(job_id, None)  # so that it comes last
            self._known |= jobs
            if (excess := len(self._known) - self.most) > 0:
                old = (job_id for job_id in self._known if job_id not in jobs and job_id not in others)
                forgotten = list(islice(old, excess))
                forgotten += list(jobs)[len(jobs) - (excess - len(forgotten)) :]
                for job_id in forgotten:
                    del self._known[job_id]


def load(session: Session, job_id: str) -> JobRecord:
    """One job.

    Raises:
        JobNotFound: There is none with this id.
    """
    job = session.get(JobRow, job_id, populate_existing=True)
    if job is None:
        raise JobNotFound(job_id)
    return JobRecord.model_validate(job, from_attributes=True)


def search_end(jobs: JobFilter, cursor: str | None) -> tuple[Select[str | None], dict[str, Any]]:
    """The query for the oldest job that is read for a page of a search, null if all are; and its parameters."""
    named, states, parameters = _parameters(jobs, cursor, None)
    return _search_end(named, states), parameters | {"others": MOST_SEARCHED - 1}


@cache
def _search_end(conditions: frozenset[str], states: int | None) -> Select[str | None]:
    query = select(JobRow.id).where(*(_CONDITIONS[name] for name in conditions)).order_by(JobRow.id.desc())
    query = query.offset(bindparam("others", type_=Integer)).limit(1)
    of_each = [query.where(JobRow.state == bindparam(f"state_{number}")) for number in range(states or 0)]
    ends = union_all(*(select(each.subquery()) for each in of_each or [query])).subquery()
    return select(func.max(ends.c.id))


def _parameters(
    jobs: JobFilter, cursor: str | None, end: str | None
) -> tuple[frozenset[str], int | None, dict[str, Any]]:
    """Those of ``_CONDITIONS`` that apply, how many states are wanted if not all, and their parameters."""
    wanted = jobs.states
    if jobs.cancellable:
        wanted = ACTIVE_STATES.intersection(ACTIVE_STATES if wanted is None else wanted)
    fields = {column.key: getattr(jobs, column.key) for column in _ALIKE} | {"cursor": cursor, "end": end}
    parameters = {name: value for name, value in fields.items() if value is not None}
    states = None if wanted is None else sorted(set(wanted))
    of_states = {f"state_{number}": state for number, state in enumerate(states or ())}
    return frozenset(parameters), None if states is None else len(states), parameters | of_states


def listed(jobs: JobFilter, limit: int, cursor: str | None, end: str | None = None) -> tuple[Heads, dict[str, Any]]:
    """The query for jobs, newest first, and its parameters.

    Args:
        jobs: Which.
        limit: Maximum number of results.
        cursor: Only jobs older than the one with this id.
        end: Only it and newer ones.
    """
    named, states, parameters = _parameters(jobs, cursor, end)
    more = [JobRow.tags.icontains(f" {tag} ", autoescape=True) for tag in jobs.tags]
    if jobs.name is not None:
        more.append(JobRow.name.icontains(jobs.name, autoescape=True))
    if jobs.text is not None:
        columns = (JobRow.name, JobRow.group, JobRow.tags, JobRow.notes)
        more.append(or_(*(column.icontains(jobs.text, autoescape=True) for column in columns)))
    if jobs.ids is not None:
        more.append(JobRow.id.in_(jobs.ids))
    if jobs.cancellable:
        more.append(JobRow.cancel_requested.is_(False))
    return _listed(named, states, *more) if more else _composed(named, states), parameters | {"limit": limit}


def _listed(conditions: frozenset[str], states: int | None, *more: ColumnElement[bool]) -> Heads:
    newest, limit = JobRow.id.desc(), bindparam("limit", type_=Integer)
    query = HEADS.where(*(_CONDITIONS[name] for name in conditions), *more)
    if states is None:
        return query.order_by(newest).limit(limit)
    # The newest of each state, each read from an index, and of these the newest: an index of several states is not in
    # the order of ids.
    each = [query.where(JobRow.state == bindparam(f"state_{number}")) for number in range(states)]
    if states <= 1:
        return (each or [query.where(false())])[0].order_by(newest).limit(limit)
    of_each = union_all(*(select(one.order_by(newest).limit(limit).subquery()) for one in each)).subquery()
    heads: Heads = select(of_each.c.id, of_each.c.version, of_each.c.waiting_for)
    return heads.order_by(of_each.c.id.desc()).limit(limit)


_composed = cache(_listed)  # there are few, and composing one takes longer than running it


def newest_events(session: Session, job_id: str, kind: EventKind, limit: int) -> Sequence[JobEvent]:
    """A job's events of a kind, newest first, at most ``limit``."""
    query = select(EventRow).where(EventRow.job_id == job_id, EventRow.kind == kind)
    rows = session.scalars(query.order_by(EventRow.id.desc()).limit(limit))
    return [JobEvent.model_validate(row, from_attributes=True) for row in rows]


class Backlog(NamedTuple):
    """Jobs of a tenant in a queue that have not ended and are in one state.

    Attributes:
        jobs: Their number.
        since: Since when the first of them has waited; ``None`` if none does.
    """

    queue: str
    tenant: str
    state: JobState
    jobs: int
    since: datetime | None


def backlog(connection: Connection, tenant: str | None = None) -> list[Backlog]:
    """The jobs that have not ended, of a tenant or of all."""
    rows = connection.execute(BACKLOG if tenant is None else BACKLOG.where(JobRow.tenant == tenant))
    return [Backlog(queue, holder, JobState(state), jobs, since) for queue, holder, state, jobs, since in rows]


def earlier_result(session: Session | Connection, request: Request, result: str | None = None) -> str | None:
    """The result of the request if it was carried out before; ``None`` if it was not.

    Args:
        session: The database.
        request: The request.
        result: Stored if it was not, together with the request's effect; fails if another process was faster.

    Raises:
        IdempotencyKeyReused: The key belongs to another request.
    """
    same = (RequestRow.tenant == request.tenant) & (RequestRow.key == request.key)
    row = session.execute(select(RequestRow.fingerprint, RequestRow.resource).where(same)).one_or_none()
    if row is not None and row.fingerprint != request.fingerprint:
        problem = "was sent with another request before; use a new one for each request"
        raise IdempotencyKeyReused(f"Idempotency-Key {request.key!r} {problem}")
    if row is None and result is not None:
        session.execute(insert(RequestRow).values(**asdict(request), resource=result, time=datetime.now(UTC)))
    return None if row is None else str(row.resource)


def history(session: Session, job_id: str, first: int, last: int, points: int, ranks: bool = True) -> MetricsHistory:
    """A job's steps from ``first`` to ``last`` in at most ``points`` points per curve.

    A repeated step counts both times.

    Args:
        session: The database.
        job_id: The job.
        first: The first step.
        last: The last step.
        points: Maximum number of points; steps are averaged to get there.
        ranks: Whether to read the ranks' times, too: with many ranks at fewer points, about ``MOST_RANK_TIMES`` in all.
    """
    width = max(1, math.ceil((last - first + 1) / points))
    step = EventRow.data["step"].as_integer()
    bucket: ColumnElement[int] = (step - first) // width
    # From the first step on includes an evaluation before it.
    within = EventRow.job_id == job_id, step.between(0 if first == 1 else first, last)
    loss, means = _finite("loss"), [func.avg(_finite(name)).label(name) for name in MEANS]
    extremes = func.min(loss).label("loss_min"), func.max(loss).label("loss_max")
    samples = select(func.max(step).label("step"), func.max(EventRow.time).label("time"), *extremes, *means)
    samples = samples.where(*within, EventRow.kind == "progress").group_by(bucket).order_by(func.max(step))
    # The newest evaluation and the newest times of ranks for each point, in order of steps.
    newest: dict[str, list[dict[str, Any]]] = {"ranks": []}
    event, size = func.max(EventRow.id), func.max(func.json_array_length(EventRow.data["busy_seconds"]))
    heads = select(event, func.max(step), size).where(*within).group_by(bucket).order_by(event)
    for kind in ("evaluation", "ranks") if ranks else ("evaluation",):
        of_buckets = session.execute(heads.where(EventRow.kind == kind)).all()
        times = (last - first + 1) / width * max((each or 0 for *_, each in of_buckets), default=0)
        wider = width * max(1, math.ceil(times / MOST_RANK_TIMES))
        ids = {(at - first) // wider: event_id for event_id, at, _ in of_buckets}.values()
        query: Select[Any] = select(EventRow.data).where(EventRow.id.in_(ids)).order_by(EventRow.id)
        newest[kind] = sorted(session.scalars(query), key=lambda data: int(data["step"]))
    scored = []
    for data in newest["evaluation"]:
        sets = [NamedValidationPoint(name=each["name"], **_validation(each)) for each in data.get("sets", ())]
        scored.append(EvaluationPoint(step=data["step"], **_validation(data), sets=sets))
    rows = [MetricsSample.model_validate(row._mapping) for row in session.execute(samples)]
    of_ranks = ((data["step"], [_number(each) for each in data["busy_seconds"]]) for data in newest["ranks"])
    busy = [RankTimes(step=at, busy_seconds=seconds) for at, seconds in of_ranks]
    return MetricsHistory(
        job_id=job_id, from_step=first, to_step=last, bucket_steps=width, samples=rows, evaluations=scored, ranks=busy
    )


def results_of(
    session: Session, job_ids: Collection[str]
) -> tuple[dict[str, float | None], dict[str, list[tuple[datetime, int]]]]:
    """The lowest validation loss of each of some jobs, and how many ranks have held resources since when, in order.

    Events of gangs also name the node of every rank, so of them only sizes are read.
    """
    of_jobs, is_loss = (EventRow.job_id.in_(job_ids), RESULTS), EventRow.kind == "evaluation"
    lowest = select(EventRow.job_id, func.min(_finite("loss"))).where(*of_jobs, is_loss).group_by(EventRow.job_id)
    sizes = (EventRow.data[f"{each}_parallel_size"].as_integer() for each in ("tensor", "pipeline", "context", "data"))
    state, reason = (EventRow.data[each].as_string() for each in ("state", "reason"))
    keeps = EventRow.data["keeps"].as_boolean()
    columns = select(EventRow.job_id, EventRow.time, EventRow.kind, state, reason, keeps, *sizes)
    changes = session.execute(columns.where(*of_jobs, ~is_loss).order_by(EventRow.id))
    ranks: dict[str, list[tuple[datetime, int]]] = defaultdict(list)
    for job_id, at, kind, to, why, kept, *shape in changes:
        if kind == "shape":
            ranks[job_id].append((at, 0 if kept else math.prod(size or 1 for size in shape)))
        # A gang that has formed is starting for a while; one that has lost its workers waits, perhaps for hours.
        elif to not in (JobState.RUNNING, JobState.SCHEDULING) or why == Reason.WAITING_FOR_RESOURCES:
            ranks[job_id].append((at, 0))
        elif why == Reason.GANG_RECOVERING and ranks[job_id][-1:] and not ranks[job_id][-1][1]:  # it has waited
            ranks[job_id].append((at, next((size for _, size in reversed(ranks[job_id]) if size), 0)))
    return {row[0]: row[1] for row in session.execute(lowest)}, ranks


class Course(NamedTuple):
    """What the reports of a job's steps say of its whole course.

    Attributes:
        first: The step that it began with.
        tokens: Tokens trained on after that step, those before the checkpoint that it began from included.
        loss: Mean loss of its newest ``LOSS_STEPS`` steps, in nats per token; perhaps not finite.
    """

    first: int
    tokens: int
    loss: float


def course_of(session: Session, job_id: str) -> Course | None:
    """What a job's first and newest steps say; ``None`` before the first."""
    of_steps = EventRow.job_id == job_id, EventRow.kind == "progress"
    first = session.scalar(select(EventRow.data).where(*of_steps).order_by(EventRow.id).limit(1))
    if first is None:
        return None
    newest = select(EventRow.data["loss"].as_string()).where(*of_steps).order_by(EventRow.id.desc()).limit(LOSS_STEPS)
    return Course(first["step"], first["tokens"], fmean(map(float, session.scalars(newest))))


def _finite(name: str) -> ColumnElement[float | None]:
    """A number in an event's data; null where JSON has no such number."""
    number = EventRow.data[name]
    return case((number.as_string().in_(_NO_NUMBERS), None), else_=number.as_float())


def _validation(data: Mapping[str, Any]) -> dict[str, float | None]:
    loss, bits = _number(data["loss"]), data.get("bits_per_byte")
    perplexity = None if loss is None else _number(perplexity_of(loss))
    return {"loss": loss, "perplexity": perplexity, "bits_per_byte": None if bits is None else _number(bits)}


def _number(value: Any) -> float | None:
    number = float(value)
    return number if math.isfinite(number) else None
