"""Add the times of jobs relative to their predictions, and to each job the correction of its own."""

import sqlalchemy as sa
from alembic import op

revision = "0011"
down_revision = "0010"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table, and a column that a release before leaves empty."""
    op.create_table(
        "observations",
        sa.Column("job_id", sa.String(32), primary_key=True),
        sa.Column("shape", sa.String(16), primary_key=True),
        sa.Column("tenant", sa.String(32), nullable=False),
        sa.Column("kind", sa.String(63), nullable=False),
        sa.Column("precision", sa.String(8), nullable=False),
        sa.Column("base", sa.String(16), nullable=False),
        sa.Column("model", sa.String(16), nullable=False),
        sa.Column("ratio", sa.Double(), nullable=False),
        sa.Column("time", sa.DateTime(timezone=True), nullable=False),
    )
    op.create_index("ix_observations_newest", "observations", ["kind", "precision", "base", "time"])
    op.create_index("ix_observations_tenant", "observations", ["tenant", "kind", "precision"])
    op.add_column("jobs", sa.Column("fitted", sa.JSON(), nullable=True))


def downgrade() -> None:
    """Drop both."""
    op.drop_column("jobs", "fitted")
    op.drop_table("observations")
