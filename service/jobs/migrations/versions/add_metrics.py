"""Add what metrics and traces need: faults by kind, times of the newest reports, since when a job waits."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

_COLUMNS = ("fault_counts", "progress_at", "checkpoint_at", "waiting_since", "traceparent")


def upgrade() -> None:
    """Add the columns, and fill them in for jobs that have not ended; faults before now are not counted."""
    op.add_column("jobs", sa.Column("fault_counts", sa.JSON(), nullable=False, server_default="{}"))
    for name in ("progress_at", "checkpoint_at", "waiting_since"):
        op.add_column("jobs", sa.Column(name, sa.DateTime(timezone=True), nullable=True))
    op.add_column("jobs", sa.Column("traceparent", sa.String(64), nullable=True))
    for kind in ("progress", "checkpoint"):
        op.execute(
            f"UPDATE jobs SET {kind}_at = "
            f"(SELECT MAX(time) FROM events WHERE events.job_id = jobs.id AND events.kind = '{kind}') "
            "WHERE state IN ('QUEUED', 'SCHEDULING', 'RUNNING', 'PAUSED')"
        )
    op.execute("UPDATE jobs SET waiting_since = queued_at WHERE state IN ('QUEUED', 'SCHEDULING')")


def downgrade() -> None:
    """Drop the columns."""
    for name in _COLUMNS:
        op.drop_column("jobs", name)
