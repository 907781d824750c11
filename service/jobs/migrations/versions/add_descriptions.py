"""Let jobs be found by their group, tags and notes."""

import sqlalchemy as sa
from alembic import op

revision = "0018"
down_revision = "0017"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add columns, which a release before leaves empty."""
    op.add_column("jobs", sa.Column("group", sa.String(63), nullable=True))
    op.add_column("jobs", sa.Column("tags", sa.Text(), nullable=True))
    op.add_column("jobs", sa.Column("notes", sa.Text(), nullable=True))
    op.create_index("ix_jobs_group_id", "jobs", ["group", "id"])


def downgrade() -> None:
    """Drop them."""
    op.drop_index("ix_jobs_group_id", "jobs")
    for column in ("notes", "tags", "group"):
        op.drop_column("jobs", column)
