"""Keep a profile of each kind of GPU for each precision, in place of one for all."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0012"
down_revision = "0011"
branch_labels = None
depends_on = None

_DATA: dict[str, sa.types.TypeEngine[Any]] = {
    "stored_at": sa.DateTime(timezone=True),
    "stored_by": sa.String(100),
    "profile": sa.JSON(),
}


def upgrade() -> None:
    """Create the table again, as SQLite cannot change a key. No release has contained the previous one."""
    rows = _read("kind")
    _make(["kind", "precision"], [{**row, "precision": row["profile"]["precision"]} for row in rows])


def downgrade() -> None:
    """Keep one of each kind, that in bf16 before others."""
    rows = sorted(_read("kind", "precision"), key=lambda row: row["precision"], reverse=True)
    first = {row["kind"]: {name: row[name] for name in ("kind", *_DATA)} for row in rows}
    _make(["kind"], list(first.values()))


def _read(*key: str) -> list[dict[str, Any]]:
    columns = [*map(sa.column, key), *(sa.column(name, kind) for name, kind in _DATA.items())]
    rows = op.get_bind().execute(sa.select(*columns).select_from(sa.table("profiles"))).mappings()
    return [dict(row) for row in rows]


def _make(key: list[str], rows: list[dict[str, Any]]) -> None:
    op.drop_table("profiles")
    lengths = {"kind": 63, "precision": 8}
    table = op.create_table(
        "profiles",
        *(sa.Column(name, sa.String(lengths[name]), primary_key=True) for name in key),
        *(sa.Column(name, kind, nullable=False) for name, kind in _DATA.items()),
    )
    if rows:
        op.bulk_insert(table, rows)
