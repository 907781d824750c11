"""Add profiles of kinds of GPU, and to each job the one that it is planned with."""

import sqlalchemy as sa
from alembic import op

revision = "0010"
down_revision = "0009"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the table, and a column that a release before leaves empty."""
    op.create_table(
        "profiles",
        sa.Column("kind", sa.String(63), primary_key=True),
        sa.Column("stored_at", sa.DateTime(timezone=True), nullable=False),
        sa.Column("stored_by", sa.String(100), nullable=False),
        sa.Column("profile", sa.JSON(), nullable=False),
    )
    op.add_column("jobs", sa.Column("profile", sa.JSON(), nullable=True))


def downgrade() -> None:
    """Drop both."""
    op.drop_column("jobs", "profile")
    op.drop_table("profiles")
