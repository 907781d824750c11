"""Number jobs in the order in which they came, so that the queue's order does not follow clocks; find failed ones."""

import sqlalchemy as sa
from alembic import op

revision = "0016"
down_revision = "0015"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add a column that a release before leaves empty, and number the jobs that there are as they have queued."""
    op.add_column("jobs", sa.Column("arrival", sa.BigInteger(), nullable=True))
    op.execute(
        "UPDATE jobs SET arrival = numbered.number FROM"
        " (SELECT id, row_number() OVER (ORDER BY queued_at, id) AS number FROM jobs) AS numbered"
        " WHERE jobs.id = numbered.id"
    )
    op.create_index("ix_jobs_arrival", "jobs", ["arrival"])
    op.create_index("ix_jobs_state_finished_at", "jobs", ["state", "finished_at"])


def downgrade() -> None:
    """Drop it."""
    op.drop_index("ix_jobs_state_finished_at", "jobs")
    op.drop_index("ix_jobs_arrival", "jobs")
    op.drop_column("jobs", "arrival")
