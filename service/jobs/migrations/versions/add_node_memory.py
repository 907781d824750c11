"""Add to each job the memory of the hosts of the nodes for which its layouts are chosen."""

import sqlalchemy as sa
from alembic import op

revision = "0014"
down_revision = "0013"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add a column that a release before leaves empty."""
    op.add_column("jobs", sa.Column("node_memory_bytes", sa.BigInteger(), nullable=True))


def downgrade() -> None:
    """Drop it."""
    op.drop_column("jobs", "node_memory_bytes")
