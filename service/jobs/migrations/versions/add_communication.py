"""Split what jobs took beside their predictions into waiting for collectives and the rest."""

import sqlalchemy as sa
from alembic import op

revision = "0015"
down_revision = "0014"
branch_labels = None
depends_on = None

_COLUMNS = ("rest_ratio", "communication_ratio")


def upgrade() -> None:
    """Add columns that a release before leaves empty."""
    for name in _COLUMNS:
        op.add_column("observations", sa.Column(name, sa.Double(), nullable=True))


def downgrade() -> None:
    """Drop them."""
    for name in _COLUMNS:
        op.drop_column("observations", name)
