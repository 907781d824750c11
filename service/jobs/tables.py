"""The tables: jobs, and events in the order in which they were stored."""

from datetime import UTC, datetime
from typing import Any

from sqlalchemy import JSON, BigInteger, DateTime, Dialect, ForeignKey, Index, Integer, String, Text, UniqueConstraint
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column
from sqlalchemy.types import TypeDecorator


class UtcDateTime(TypeDecorator[datetime]):
    """A point in time, kept in UTC. Needed because SQLite forgets the time zone."""

    impl = DateTime(timezone=True)
    cache_ok = True

    def process_bind_param(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        """Turn to UTC what goes in."""
        return value.astimezone(UTC) if value else None

    def process_result_value(self, value: datetime | None, dialect: Dialect) -> datetime | None:  # noqa: ARG002
        """Say UTC about what comes out."""
        return value.replace(tzinfo=UTC) if value and value.tzinfo is None else value


class Table(DeclarativeBase):
    """The base of all tables."""


class JobRow(Table):
    """A job; the columns are the fields of ``service.jobs.model.JobRecord``."""

    __tablename__ = "jobs"

    id: Mapped[str] = mapped_column(String(32), primary_key=True)
    name: Mapped[str] = mapped_column(String(100))
    spec: Mapped[dict[str, Any]] = mapped_column(JSON)
    state: Mapped[str] = mapped_column(String(16), index=True)
    reason: Mapped[str] = mapped_column(String(32))
    message: Mapped[str] = mapped_column(Text)
    attempt: Mapped[int] = mapped_column(default=0)
    cancel_requested: Mapped[bool] = mapped_column(default=False)
    pause_requested: Mapped[bool] = mapped_column(default=False)
    checkpoint_url: Mapped[str] = mapped_column(Text)
    submitted_at: Mapped[datetime] = mapped_column(UtcDateTime)
    started_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    finished_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    progress: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    evaluation: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    checkpoint: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    shape: Mapped[dict[str, Any] | None] = mapped_column(JSON(none_as_null=True))
    drills: Mapped[list[dict[str, Any]]] = mapped_column(JSON, default=list)
    restarts: Mapped[list[dict[str, Any]]] = mapped_column(JSON, default=list)
    restart_counts: Mapped[dict[str, int]] = mapped_column(JSON, default=dict)
    goodput: Mapped[dict[str, Any]] = mapped_column(JSON)
    version: Mapped[int] = mapped_column(default=1)


class EventRow(Table):
    """An event; ``sequence`` numbers a gang's reports and is null for what came from elsewhere."""

    __tablename__ = "events"
    __table_args__ = (
        UniqueConstraint("job_id", "attempt", "sequence", name="uq_events_report"),
        Index("ix_events_job_id_id", "job_id", "id"),
    )

    # SQLite counts up only in columns of exactly this type.
    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True)
    job_id: Mapped[str] = mapped_column(ForeignKey("jobs.id"))
    attempt: Mapped[int]
    sequence: Mapped[int | None] = mapped_column(BigInteger)
    kind: Mapped[str] = mapped_column(String(16))
    time: Mapped[datetime] = mapped_column(UtcDateTime)
    data: Mapped[dict[str, Any]] = mapped_column(JSON)
