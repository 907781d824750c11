"""The tables of accounts. Jobs refer to tenants and queues by name; their settings are stored here."""

from datetime import datetime

from sqlalchemy import JSON, BigInteger, Float, Index, Integer, String, Text
from sqlalchemy.orm import Mapped, mapped_column

from service.jobs.tables import Table, UtcDateTime


class TenantRow(Table):
    """Limits on what a tenant's gangs hold together; no row, or null: no limit."""

    __tablename__ = "tenants"

    name: Mapped[str] = mapped_column(String(32), primary_key=True)
    gpus: Mapped[float | None] = mapped_column(Float)
    cpus: Mapped[float | None] = mapped_column(Float)


class QueueRow(Table):
    """A queue, and limits on what the gangs of its jobs hold together."""

    __tablename__ = "queues"

    name: Mapped[str] = mapped_column(String(63), primary_key=True)
    description: Mapped[str] = mapped_column(Text)
    gpus: Mapped[float | None] = mapped_column(Float)
    cpus: Mapped[float | None] = mapped_column(Float)


class KeyRow(Table):
    """An API key, by its SHA-256; the key itself is not stored anywhere."""

    __tablename__ = "keys"

    id: Mapped[str] = mapped_column(String(8), primary_key=True)
    name: Mapped[str] = mapped_column(String(100))
    tenant: Mapped[str] = mapped_column(String(32))
    scopes: Mapped[list[str]] = mapped_column(JSON)
    sha256: Mapped[str] = mapped_column(String(64))
    created_at: Mapped[datetime] = mapped_column(UtcDateTime)
    expires_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    revoked_at: Mapped[datetime | None] = mapped_column(UtcDateTime)
    last_used_at: Mapped[datetime | None] = mapped_column(UtcDateTime)


class AuditRow(Table):
    """An action that was performed or attempted; tenant and key are null for requests without a valid key."""

    __tablename__ = "audit"
    __table_args__ = (Index("ix_audit_tenant_id", "tenant", "id"),)

    # SQLite autoincrements only columns of exactly this type.
    id: Mapped[int] = mapped_column(BigInteger().with_variant(Integer, "sqlite"), primary_key=True, autoincrement=True)
    time: Mapped[datetime] = mapped_column(UtcDateTime)
    tenant: Mapped[str | None] = mapped_column(String(32))
    key_id: Mapped[str | None] = mapped_column(String(8))
    key_name: Mapped[str | None] = mapped_column(String(100))
    action: Mapped[str] = mapped_column(String(64))
    resource: Mapped[str] = mapped_column(String(255))
    status: Mapped[int]
    address: Mapped[str | None] = mapped_column(String(64))
    request_id: Mapped[str] = mapped_column(String(64))
