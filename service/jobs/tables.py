"""The tables of the record: jobs, their events in the order of storing, and state shared by several processes."""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, DateTime, ForeignKey, Index, Integer, String, Text, UniqueConstraint, text
from sqlalchemy.engine import Dialect
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator

from boost_core.config import JobSpec


class UtcDateTime(TypeDecorator[datetime]):
    """A point in time, in UTC. SQLite drops the time zone, and PostgreSQL returns its session's."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        """Convert values to UTC before storing them."""
        return value.astimezone(UTC) if value else None

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        """Mark values as UTC after reading them."""
        if value is None:
            return None
        return value.astimezone(UTC) if value.tzinfo else value.replace(tzinfo=UTC)


class Table(DeclarativeBase):
    """The base of all tables."""


class _Requested:
    """What jobs, datasets and sweeps have in common: who asked for what, and what has become of it."""

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(32))
    submitted_by: Mapped[str] = mapped_column(String(100))
    spec: Mapped[dict[str, Any]] = mapped_column(JSON)
    message: Mapped[str] = mapped_column(Text)
    finished_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class JobRow(_Requested, Table):
    """A job; the columns are the fields of ``service.jobs.model.JobRecord``, and what of its spec is searched."""

    __tablename__ = "jobs"
    __table_args__ = (
        Index("ix_jobs_tenant_id", "tenant", "id"),
        # For lists, the newest first, and for counts, which then need not read the jobs.
        Index("ix_jobs_tenant_state_id", "tenant", "state", "id"),
        Index("ix_jobs_queue_state_id", "queue", "state", "id"),
        Index("ix_jobs_state_id", "state", "id"),
        Index("ix_jobs_queue_id", "queue", "id"),
        Index("ix_jobs_submitted_by_id", "submitted_by", "id"),
        Index("ix_jobs_state_finished_at", "state", "finished_at"),  # for jobs that have just failed
        Index("ix_jobs_backlog", "state", "queue", "tenant", "waiting_since"),  # for how many wait, and since when
        Index("ix_jobs_state_arrival", "state", "arrival"),  # for the first of those that wait
        Index("ix_jobs_group_id", "group", "id"),
    )

    queue: Mapped[str] = mapped_column(String(63))
    cloned_from: Mapped[str | None] = mapped_column(String(32))
    name: Mapped[str] = mapped_column(String(100))
    group: Mapped[str | None] = mapped_column(String(63))
    tags: Mapped[str | None] = mapped_column(Text)
    notes: Mapped[str | None] = mapped_column(Text)
    state: Mapped[str] = mapped_column(String(16))
    reason: Mapped[str] = mapped_column(String(32))
    waiting_for: Mapped[str | None] = mapped_column(Text)
    attempt: Mapped[int] = mapped_column(default=0)
    cancel_requested: Mapped[bool] = mapped_column(default=False)
    pause_requested: Mapped[bool] = mapped_column(default=False)
    checkpoint_url: Mapped[str] = mapped_column(Text)
    submitted_at: Mapped[datetime] = mapped_column(UtcDateTime)
    queued_at: Mapped[datetime] = mapped_column(UtcDateTime)
    arrival: Mapped[int | None] = mapped_column(BigInteger, index=True)  # null from a release before
    waiting_since: Mapped[datetime | None] = mapped_column(UtcDateTime)
    started_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    progress: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    progress_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    evaluation: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    checkpoint: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    checkpoint_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    shape: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    spare: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    comparison: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    profile: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    fitted: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    node_gpus: Mapped[int | None]
    node_memory_bytes: Mapped[int | None] = mapped_column(BigInteger)
    # Named when drills were the only commands. While an upgrade migrates, replicas of the release before still serve,
    # and a new name would break them.
    commands: Mapped[list[dict[str, Any]]] = mapped_column("drills", JSON, default=list)
    steers: Mapped[list[dict[str, Any]]] = mapped_column(JSON, default=list)
    restarts: Mapped[list[dict[str, Any]]] = mapped_column(JSON, default=list)
    restart_counts: Mapped[dict[str, int]] = mapped_column(JSON, default=dict)
    fault_counts: Mapped[dict[str, int]] = mapped_column(JSON, default=dict)
    goodput: Mapped[dict[str, Any]] = mapped_column(JSON)
    traceparent: Mapped[str | None] = mapped_column(String(64))
    version: Mapped[int] = mapped_column(default=1)


_NEW, _NEW_IN_TRAINING = ("group", "tags", "notes", "steered"), ("tokens", "evaluate_at_start")


def spec_columns(spec: JobSpec) -> dict[str, Any]:
    """A job's spec, without what it lacks that the release before would refuse, and what of it jobs are found by.

    Tags stand between blanks.
    """
    written = spec.model_dump(mode="json")
    for section, names in ((written, _NEW), (written["training"], _NEW_IN_TRAINING)):
        for name in names:
            if not section[name]:
                del section[name]
    tags = f" {' '.join(spec.tags)} "
    return {"spec": written, "name": spec.name, "group": spec.group, "tags": tags, "notes": spec.notes}


RESULTS = text("kind IN ('evaluation', 'shape', 'state')")  # the few events from which a job's results are read


class EventRow(Table):
    """An event; ``sequence`` numbers a gang's reports and is null for events from elsewhere."""

    __tablename__ = "events"
    __table_args__ = (
        UniqueConstraint("job_id", "attempt", "sequence", name="uq_events_report"),
        Index("ix_events_job_id_id", "job_id", "id"),
        Index("ix_events_results", "job_id", "id", sqlite_where=RESULTS, postgresql_where=RESULTS),
    )

    # SQLite counts up only in columns of exactly this type.
    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    attempt: Mapped[int]
    sequence: Mapped[int | None] = mapped_column(BigInteger)
    kind: Mapped[str] = mapped_column(String(16))
    time: Mapped[datetime] = mapped_column(UtcDateTime)
    data: Mapped[dict[str, Any]] = mapped_column(JSON)


class RequestRow(Table):
    """A request that was carried out under an Idempotency-Key, and its result."""

    __tablename__ = "requests"

    tenant: Mapped[str] = mapped_column(String(32), primary_key=True)
    key: Mapped[str] = mapped_column(String(255), primary_key=True)
    fingerprint: Mapped[str] = mapped_column(String(64))
    resource: Mapped[str] = mapped_column(String(64))
    time: Mapped[datetime] = mapped_column(UtcDateTime, index=True)


class LeaseRow(Table):
    """Work that one process at a time does. The token increases each time it changes hands."""

    __tablename__ = "leases"

    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    holder: Mapped[str] = mapped_column(String(64))
    token: Mapped[int] = mapped_column(BigInteger)
    expires_at: Mapped[datetime] = mapped_column(UtcDateTime)


class _Named(_Requested):
    """What datasets and sweeps have in common."""

    name: Mapped[str] = mapped_column(String(63))
    state: Mapped[str] = mapped_column(String(16), index=True)
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)


_SHOWN = text("NOT deleted")


class DatasetRow(_Named, Table):
    """A dataset that jobs may name: ``service.models.datasets.DatasetDetail`` and the progress of its build.

    A deleted one is no longer shown, and is kept until no build of it runs.
    """

    __tablename__ = "datasets"
    __table_args__ = (
        Index("ix_datasets_tenant_name", "tenant", "name", unique=True, sqlite_where=_SHOWN, postgresql_where=_SHOWN),
    )

    url: Mapped[str] = mapped_column(Text)
    progress: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    lineage: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    counts: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))  # of the lineage, as the next
    fingerprint: Mapped[str | None] = mapped_column(String(64))
    attempt: Mapped[int]  # how often it was asked for
    launches: Mapped[int]  # of this attempt
    launched_at: Mapped[datetime | None] = mapped_column(UtcDateTime)  # the last time, of any attempt
    deleted: Mapped[bool] = mapped_column(default=False)


class SweepRow(_Named, Table):
    """A sweep: ``service.models.sweeps.Sweep``. Optuna has its trials' parameters and values (``sweep_study``)."""

    __tablename__ = "sweeps"
    __table_args__ = (UniqueConstraint("tenant", "name", name="uq_sweeps_tenant_name"),)

    trials: Mapped[dict[str, int]] = mapped_column(JSON)
    best: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))


class SweepTrialRow(Table):
    """The job of a trial, written in the transaction that creates the job, so that there is never a second one."""

    __tablename__ = "sweep_trials"

    sweep_id: Mapped[str] = mapped_column(ForeignKey("sweeps.id"), primary_key=True)
    number: Mapped[int] = mapped_column(primary_key=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))


class ProfileRow(Table):
    """A profile of a kind of GPU at a precision: ``service.models.cluster.StoredProfile``."""

    __tablename__ = "profiles"

    kind: Mapped[str] = mapped_column(String(63), primary_key=True)
    precision: Mapped[str] = mapped_column(String(8), primary_key=True)
    stored_at: Mapped[datetime] = mapped_column(UtcDateTime)
    stored_by: Mapped[str] = mapped_column(String(100))
    profile: Mapped[dict[str, Any]] = mapped_column(JSON)


class ObservationRow(Table):
    """Ratios of a job's measured to predicted step time in one shape; see ``service.jobs.observations``.

    ``ratio`` is of whole steps. ``rest_ratio`` is null in rows of versions that knew no other, and
    ``communication_ratio`` also where a job says nothing about collectives.
    """

    __tablename__ = "observations"
    __table_args__ = (
        Index("ix_observations_newest", "kind", "precision", "base", "time"),
        Index("ix_observations_tenant", "tenant", "kind", "precision"),
    )

    job_id: Mapped[str] = mapped_column(String(32), primary_key=True)
    shape: Mapped[str] = mapped_column(String(16), primary_key=True)
    tenant: Mapped[str] = mapped_column(String(32))
    kind: Mapped[str] = mapped_column(String(63))
    precision: Mapped[str] = mapped_column(String(8))
    base: Mapped[str] = mapped_column(String(16))
    model: Mapped[str] = mapped_column(String(16))
    ratio: Mapped[float]
    rest_ratio: Mapped[float | None]
    communication_ratio: Mapped[float | None]
    time: Mapped[datetime] = mapped_column(UtcDateTime)


class SnapshotRow(Table):
    """Something that the scheduler sees and that other processes show, such as the cluster's nodes."""

    __tablename__ = "snapshots"

    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    time: Mapped[datetime] = mapped_column(UtcDateTime)
    data: Mapped[Any] = mapped_column(JSON)


class TrackerRow(Table):
    """A tracker's progress with a job; the columns are the fields of ``service.jobs.trackers.Tracked``."""

    __tablename__ = "trackers"

    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    kind: Mapped[str] = mapped_column(String(16), primary_key=True)
    event_id: Mapped[int] = mapped_column(BigInteger, default=0)
    version: Mapped[int] = mapped_column(default=0)
    open: Mapped[bool] = mapped_column(default=True, index=True)
    marks: Mapped[dict[str, int]] = mapped_column(JSON, default=dict)
    kept: Mapped[dict[str, Any]] = mapped_column(JSON, default=dict)
    failures: Mapped[int] = mapped_column(default=0)
    failures_in_row: Mapped[int] = mapped_column(default=0)
    failing_since: Mapped[datetime | None] = mapped_column(UtcDateTime)
    problem: Mapped[str | None] = mapped_column(Text)
