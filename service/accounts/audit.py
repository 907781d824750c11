"""The audit log: who has changed what, or tried to."""

from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Engine, insert, select
from sqlalchemy.orm import Session

from service.accounts.principal import Principal
from service.accounts.tables import AuditRow
from service.jobs.database import open_engine
from service.models.audit import AuditEntry, AuditPage

LOCAL = "local"  # the address of those who work on the database itself

_INSERT = insert(AuditRow)
_LONGEST_RESOURCE = 255
_LONGEST_ADDRESS = 64


@dataclass(frozen=True)
class AuditEvent:
    """What somebody did, or tried.

    Attributes:
        principal: Who; ``None`` if that is not known.
        action: What, for example ``job.cancel``.
        resource: Of what: the path of the request.
        status: The HTTP status that came of it.
        address: Where the request came from.
        request_id: Names the request.
    """

    principal: Principal | None
    action: str
    resource: str
    status: int
    address: str | None
    request_id: str


class AuditLog:
    """Deeds in an SQL database whose tables are up to date; nothing here changes or removes one.

    Args:
        database: A URL of SQLAlchemy, or an engine.
    """

    def __init__(self, database: str | Engine) -> None:
        self._engine = open_engine(database) if isinstance(database, str) else database

    def record(self, deed: AuditEvent) -> None:
        """Store a deed.

        Raises:
            sqlalchemy.exc.SQLAlchemyError: The database is away.
        """
        who = deed.principal
        row = {
            "time": datetime.now(UTC),
            "tenant": who.tenant if who else None,
            "key_id": who.key_id if who else None,
            "key_name": who.name if who else None,
            "action": deed.action,
            "resource": deed.resource[:_LONGEST_RESOURCE],
            "status": deed.status,
            "address": deed.address[:_LONGEST_ADDRESS] if deed.address else None,
            "request_id": deed.request_id,
        }
        with self._engine.begin() as connection:
            connection.execute(_INSERT, row)

    def page(self, tenant: str | None = None, after: int = 0, limit: int = 100) -> AuditPage:
        """Entries in the order in which they were stored.

        Args:
            tenant: Only of this tenant; ``None`` for all, those of nobody known too.
            after: Only with ids above this.
            limit: Maximum number of results.
        """
        query = select(AuditRow).where(AuditRow.id > after).order_by(AuditRow.id).limit(limit + 1)
        if tenant is not None:
            query = query.where(AuditRow.tenant == tenant)
        with Session(self._engine) as session:
            entries = [AuditEntry.model_validate(row, from_attributes=True) for row in session.scalars(query)]
        more = len(entries) > limit
        entries = entries[:limit]
        return AuditPage(entries=entries, next_after=entries[-1].id if more else None)
