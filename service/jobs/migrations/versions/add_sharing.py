"""Add what several people and several processes need: tenants, queues, keys, an audit log, leases."""

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

_FIRST = "default"  # the queue and the tenant of all jobs that there are


def upgrade() -> None:
    """Create the tables, and add to jobs whose they are and where they queue."""
    _extend_jobs()
    _create_shared_tables()
    _create_account_tables()


def _extend_jobs() -> None:
    op.add_column("jobs", sa.Column("tenant", sa.String(32), nullable=False, server_default=_FIRST))
    op.add_column("jobs", sa.Column("queue", sa.String(63), nullable=False, server_default=_FIRST))
    op.add_column("jobs", sa.Column("submitted_by", sa.String(100), nullable=False, server_default="anonymous"))
    op.add_column("jobs", sa.Column("cloned_from", sa.String(32), nullable=True))
    op.add_column("jobs", sa.Column("waiting_for", sa.Text(), nullable=True))
    op.add_column(
        "jobs",
        sa.Column("queued_at", sa.DateTime(timezone=True), nullable=False, server_default="2000-01-01 00:00:00.000000"),
    )
    op.execute("UPDATE jobs SET queued_at = submitted_at")
    op.create_index("ix_jobs_queue", "jobs", ["queue"])
    op.create_index("ix_jobs_tenant_id", "jobs", ["tenant", "id"])


def _create_shared_tables() -> None:
    op.create_table(
        "requests",
        sa.Column("tenant", sa.String(32), primary_key=True),
        sa.Column("key", sa.String(255), primary_key=True),
        sa.Column("fingerprint", sa.String(64), nullable=False),
        sa.Column("resource", sa.String(64), nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_index("ix_requests_time", "requests", ["time"])
    op.create_table(
        "leases",
        sa.Column("name", sa.String(32), primary_key=True),
        sa.Column("holder", sa.String(64), nullable=False),
        sa.Column("token", sa.BigInteger(), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_table(
        "snapshots",
        sa.Column("name", sa.String(32), primary_key=True),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("data", sa.JSON(), nullable=False),
    )


def _create_account_tables() -> None:
    op.create_table(
        "tenants",
        sa.Column("name", sa.String(32), primary_key=True),
        sa.Column("gpus", sa.Float(), nullable=True),
        sa.Column("cpus", sa.Float(), nullable=True),
    )
    queues = op.create_table(
        "queues",
        sa.Column("name", sa.String(63), primary_key=True),
        sa.Column("description", sa.Text(), nullable=False),
        sa.Column("gpus", sa.Float(), nullable=True),
        sa.Column("cpus", sa.Float(), nullable=True),
    )
    op.bulk_insert(queues, [{"name": _FIRST, "description": "Where jobs go that name no other."}])
    op.create_table(
        "keys",
        sa.Column("id", sa.String(8), primary_key=True),
        sa.Column("name", sa.String(100), nullable=False),
        sa.Column("tenant", sa.String(32), nullable=False),
        sa.Column("scopes", sa.JSON(), nullable=False),
        sa.Column("sha256", sa.String(64), nullable=False),
        sa.Column("created_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("expires_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("revoked_at", sa.DateTime(timezone=True), nullable=True),
        sa.Column("last_used_at", sa.DateTime(timezone=True), nullable=True),
    )
    op.create_table(
        "audit",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), primary_key=True, autoincrement=True),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
        sa.Column("tenant", sa.String(32), nullable=True),
        sa.Column("key_id", sa.String(8), nullable=True),
        sa.Column("key_name", sa.String(100), nullable=True),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("resource", sa.String(255), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("address", sa.String(64), nullable=True),
        sa.Column("request_id", sa.String(64), nullable=False),
    )
    op.create_index("ix_audit_tenant_id", "audit", ["tenant", "id"])


def downgrade() -> None:
    """Drop them."""
    for table in ("audit", "keys", "queues", "tenants", "snapshots", "leases", "requests"):
        op.drop_table(table)
    op.drop_index("ix_jobs_tenant_id", "jobs")
    op.drop_index("ix_jobs_queue", "jobs")
    for column in ("queued_at", "waiting_for", "cloned_from", "submitted_by", "queue", "tenant"):
        op.drop_column("jobs", column)
