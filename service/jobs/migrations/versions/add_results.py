"""Let jobs' results be read from a few of their events."""

import sqlalchemy as sa
from alembic import op

revision = "0019"
down_revision = "0018"
branch_labels = None
depends_on = None


def upgrade() -> None:
    """Make the index."""
    results = sa.text("kind IN ('evaluation', 'shape', 'state')")
    op.create_index("ix_events_results", "events", ["job_id", "id"], sqlite_where=results, postgresql_where=results)


def downgrade() -> None:
    """Drop it."""
    op.drop_index("ix_events_results", "events")
