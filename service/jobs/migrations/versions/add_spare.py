"""Add a job's spare copy."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the column; a release before leaves it empty."""
    op.add_column("jobs", sa.Column("spare", sa.JSON(), nullable=True))


def downgrade() -> None:
    """Drop it."""
    op.drop_column("jobs", "spare")
