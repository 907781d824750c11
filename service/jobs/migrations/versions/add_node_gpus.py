"""Add to each job how many GPUs the nodes had for which its steps are predicted."""

import sqlalchemy as sa
from alembic import op

revision = "0013"
down_revision = "0012"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add a column that a release before leaves empty."""
    op.add_column("jobs", sa.Column("node_gpus", sa.Integer(), nullable=True))


def downgrade() -> None:
    """Drop it."""
    op.drop_column("jobs", "node_gpus")
