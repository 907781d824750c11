"""Add indexes by which unfinished jobs are counted and listed without reading those that have ended."""

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the indexes."""
    op.create_index("ix_jobs_backlog", "jobs", ["state", "queue", "tenant", "waiting_since"])
    op.create_index("ix_jobs_state_arrival", "jobs", ["state", "arrival"])


def downgrade() -> None:
    """Drop them."""
    op.drop_index("ix_jobs_state_arrival", "jobs")
    op.drop_index("ix_jobs_backlog", "jobs")
