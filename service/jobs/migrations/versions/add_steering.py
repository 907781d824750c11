"""Let the values of jobs be changed while they train."""

import sqlalchemy as sa
from alembic import op

revision = "0021"
down_revision = "0020"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Add the changes that gangs have not made yet, none to begin with."""
    op.add_column("jobs", sa.Column("steers", sa.JSON(), nullable=False, server_default="[]"))


def downgrade() -> None:
    """Drop them."""
    op.drop_column("jobs", "steers")
