"""Add what elastic jobs need: pauses, layouts, drills, restarts and the goodput ledger."""

from datetime import UTC, datetime
from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None

_COLUMNS = ("pause_requested", "shape", "drills", "restarts", "restart_counts", "goodput")
_PHASES = {"QUEUED": "waiting", "SCHEDULING": "waiting", "RUNNING": "stepping"}  # all others have ended

_JOBS = sa.table(
    "jobs",
    sa.column("id", sa.String()),
    sa.column("state", sa.String()),
    sa.column("spec", sa.JSON()),
    sa.column("progress", sa.JSON()),
    sa.column("goodput", sa.JSON()),
)


def upgrade() -> None:
    """Add the columns; in specs, move max_restarts to where it is now.

    The ledgers of jobs that there are begin now: what came before was not booked.
    """
    op.add_column("jobs", sa.Column("pause_requested", sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column("jobs", sa.Column("shape", sa.JSON(), nullable=True))
    op.add_column("jobs", sa.Column("drills", sa.JSON(), nullable=False, server_default="[]"))
    op.add_column("jobs", sa.Column("restarts", sa.JSON(), nullable=False, server_default="[]"))
    op.add_column("jobs", sa.Column("restart_counts", sa.JSON(), nullable=False, server_default="{}"))
    op.add_column("jobs", sa.Column("goodput", sa.JSON(), nullable=False, server_default="{}"))
    connection = op.get_bind()
    for job in connection.execute(sa.select(_JOBS)).all():
        values = {"spec": _with_fault_tolerance(job.spec), "goodput": _ledger(job.state, job.progress or {})}
        connection.execute(sa.update(_JOBS).where(_JOBS.c.id == job.id).values(values))


def downgrade() -> None:
    """Drop the columns."""
    for name in _COLUMNS:
        op.drop_column("jobs", name)


def _ledger(state: str, progress: dict[str, Any]) -> dict[str, Any]:
    now = datetime.now(UTC).isoformat()
    phase = _PHASES.get(state, "ended")
    return {"since": now, "booked_until": now, "phase": phase, "highest_step": progress.get("step", 0)}


def _with_fault_tolerance(spec: dict[str, Any]) -> dict[str, Any]:
    moved = {"fault_tolerance": {"max_restarts": spec.pop("max_restarts")}} if "max_restarts" in spec else {}
    return spec | moved
