"""Add indexes by which jobs are counted and listed in time that does not grow with how many have ended."""

from alembic import op

revision = "0017"
down_revision = "0016"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the indexes; three of the old ones are part of them."""
    op.create_index("ix_jobs_backlog", "jobs", ["state", "queue", "tenant", "waiting_since"])
    op.create_index("ix_jobs_state_arrival", "jobs", ["state", "arrival"])
    op.create_index("ix_jobs_queue_id", "jobs", ["queue", "id"])
    op.create_index("ix_jobs_submitted_by_id", "jobs", ["submitted_by", "id"])
    op.create_index("ix_jobs_state_id", "jobs", ["state", "id"])
    op.create_index("ix_jobs_tenant_state_id", "jobs", ["tenant", "state", "id"])
    op.create_index("ix_jobs_queue_state_id", "jobs", ["queue", "state", "id"])
    op.drop_index("ix_jobs_state", "jobs")
    op.drop_index("ix_jobs_tenant_state", "jobs")
    op.drop_index("ix_jobs_queue_state", "jobs")


def downgrade() -> None:
    """Drop them."""
    op.create_index("ix_jobs_queue_state", "jobs", ["queue", "state"])
    op.create_index("ix_jobs_tenant_state", "jobs", ["tenant", "state"])
    op.create_index("ix_jobs_state", "jobs", ["state"])
    op.drop_index("ix_jobs_queue_state_id", "jobs")
    op.drop_index("ix_jobs_tenant_state_id", "jobs")
    op.drop_index("ix_jobs_state_id", "jobs")
    op.drop_index("ix_jobs_submitted_by_id", "jobs")
    op.drop_index("ix_jobs_queue_id", "jobs")
    op.drop_index("ix_jobs_state_arrival", "jobs")
    op.drop_index("ix_jobs_backlog", "jobs")
