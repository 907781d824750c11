"""Add indexes by which jobs are counted without being read."""

from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the indexes; the one of queues alone is part of one of them."""
    op.create_index("ix_jobs_tenant_state", "jobs", ["tenant", "state"])
    op.create_index("ix_jobs_queue_state", "jobs", ["queue", "state"])
    op.drop_index("ix_jobs_queue", "jobs")


def downgrade() -> None:
    """Drop them."""
    op.create_index("ix_jobs_queue", "jobs", ["queue"])
    op.drop_index("ix_jobs_queue_state", "jobs")
    op.drop_index("ix_jobs_tenant_state", "jobs")
