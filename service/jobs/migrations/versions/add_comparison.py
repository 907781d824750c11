"""Add how a job's newest gang compares with its plan."""

import sqlalchemy as sa
from alembic import op

revision = "0009"
down_revision = "0008"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; a release before leaves it empty."""
    op.add_column("jobs", sa.Column("comparison", sa.JSON(), nullable=True))


def downgrade() -> None:
    """Drop it."""
    op.drop_column("jobs", "comparison")
