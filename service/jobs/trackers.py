"""Trackers' progress with jobs, in the record, so that nothing is sent twice."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from sqlalchemy import ColumnElement, Engine, and_, func, select, update

from service.jobs.database import read_rows
from service.jobs.leases import Lease, permitted
from service.jobs.queries import ACTIVE_STATES
from service.jobs.tables import EventRow, JobRow, TrackerRow

SENT_KINDS = ("progress", "evaluation", "checkpoint", "restart", "state")  # of events; the others are not for trackers
MOST_COUNTED = 10_000  # events that a tracker is behind; counting stops here
MOST_COUNTED_OF_EACH = 200  # the same for each of many jobs, as each event counted is read

_OF_EVENT = and_(EventRow.job_id == TrackerRow.job_id, EventRow.id > TrackerRow.event_id, EventRow.kind.in_(SENT_KINDS))


@dataclass(frozen=True)
class Tracked:
    """One tracker's progress with a job.

    Attributes:
        job_id: The job.
        kind: Kind of the tracker.
        event_id: The newest event that has been sent.
        version: The job's version when all its events were last sent.
        marks: The last step sent, by name of the curve.
        kept: The tracker's own state for the next time.
        failures: Number of failures so far.
        failures_in_row: Number of failures since the last success.
        failing_since: Time of the first of these; ``None`` if the last attempt succeeded.
        problem: Why the last attempt failed.
    """

    job_id: str
    kind: str
    event_id: int = 0
    version: int = 0
    marks: Mapping[str, int] = field(default_factory=dict)
    kept: Mapping[str, Any] = field(default_factory=dict)
    failures: int = 0
    failures_in_row: int = 0
    failing_since: datetime | None = None
    problem: str | None = None


_FIELDS = tuple(Tracked.__dataclass_fields__)


@dataclass(frozen=True)
class TrackerStore:
    """Reads and writes trackers' progress.

    Attributes:
        engine: The record's database.
        lease: Write only while this is the newest of its name; ``None`` for readers.
    """

    engine: Engine
    lease: Lease | None = None

    def pending(self) -> set[tuple[str, str, str]]:
        """Tenants, kinds of trackers and jobs for which there may be something to send.

        That is each job that was written to since all had been sent.
        """
        unsent = and_(TrackerRow.job_id == JobRow.id, TrackerRow.version != JobRow.version)
        query = select(JobRow.tenant, TrackerRow.kind, TrackerRow.job_id)
        # A job that had ended, and was retried, is not open and has a state of those that have not.
        conditions = (TrackerRow.open, JobRow.state.in_(ACTIVE_STATES))
        return {row for each in conditions for row in read_rows(self.engine, query.where(each, unsent))}

    def one(self, job_id: str, kind: str) -> Tracked:
        """A tracker's progress with a job."""
        ((tracked, _),) = self._select(0, TrackerRow.job_id == job_id, TrackerRow.kind == kind)
        return tracked

    def of_job(self, job_id: str) -> Sequence[tuple[Tracked, int]]:
        """A job's trackers by kind, and how many events each is behind, counted up to ``MOST_COUNTED``."""
        return self._select(MOST_COUNTED, TrackerRow.job_id == job_id)

    def of_jobs(self, job_ids: Collection[str]) -> Sequence[tuple[Tracked, int]]:
        """The same for several jobs, counted up to ``MOST_COUNTED_OF_EACH``."""
        return self._select(MOST_COUNTED_OF_EACH, TrackerRow.job_id.in_(job_ids)) if job_ids else []

    def _select(self, most: int, *conditions: ColumnElement[bool]) -> Sequence[tuple[Tracked, int]]:
        unsent = select(EventRow.id).where(_OF_EVENT).limit(most).correlate(TrackerRow).subquery()
        behind = select(func.count()).select_from(unsent).scalar_subquery()
        query = select(behind, *(getattr(TrackerRow, name) for name in _FIELDS)).where(*conditions)
        rows = read_rows(self.engine, query.order_by(TrackerRow.job_id, TrackerRow.kind))
        return [(Tracked(*fields), count) for count, *fields in rows]

    def write(self, before: Tracked, after: Tracked, *, open_: bool) -> bool:
        """Note what has been sent, or that sending has failed; return whether this process was still in charge.

        Args:
            before: The progress as it was read.
            after: The new progress.
            open_: Whether there will be more events, or sending is tried again even if the job has ended.
        """
        unmoved = update(TrackerRow).filter_by(job_id=before.job_id, kind=before.kind, event_id=before.event_id)
        values = {name: getattr(after, name) for name in _FIELDS} | {"open": open_}
        with self.engine.begin() as connection:
            return connection.execute(unmoved.where(permitted(self.lease)).values(values)).rowcount == 1
