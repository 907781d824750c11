"""The audit log: who changed what, or tried to."""

from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Connection, Engine, insert, select
from sqlalchemy.orm import Session

from service.accounts.keys import Principal
from service.accounts.tables import AuditRow
from service.models.access import AuditEntry, AuditPage

LOCAL = "local"  # the address recorded for direct changes to the database

_INSERT = insert(AuditRow)
_LONGEST_RESOURCE = 255
_LONGEST_ADDRESS = 64


@dataclass(frozen=True)
class AuditEvent:
    """An action that was performed or attempted.

    Attributes:
        principal: Who did it; ``None`` if unknown.
        action: The action, for example ``job.cancel``.
        resource: Its target: the path of the request.
        status: HTTP status of the response.
        address: Address that the request came from.
        request_id: ID of the request.
    """

    principal: Principal | None
    action: str
    resource: str
    status: int
    address: str | None
    request_id: str


@dataclass
class AuditLog:
    """Audit events in an SQL database whose tables are up to date; events are never changed or removed here.

    Attributes:
        engine: Engine of that database.
    """

    engine: Engine

    def record(self, *deeds: AuditEvent) -> None:
        """Store events in one transaction.

        Raises:
            sqlalchemy.exc.SQLAlchemyError: The database is unavailable.
        """
        with self.engine.begin() as connection:
            self.write(connection, *deeds)

    def write(self, connection: Connection, *deeds: AuditEvent) -> None:
        """Store events in a transaction that is under way.

        Raises:
            sqlalchemy.exc.SQLAlchemyError: The database is away.
        """
        now = datetime.now(UTC)
        rows = [
            {
                "time": now,
                "tenant": who.tenant if (who := deed.principal) else None,
                "key_id": who.key_id if who else None,
                "key_name": who.name if who else None,
                "action": deed.action,
                "resource": deed.resource[:_LONGEST_RESOURCE],
                "status": deed.status,
                "address": deed.address[:_LONGEST_ADDRESS] if deed.address else None,
                "request_id": deed.request_id,
            }
            for deed in deeds
        ]
        connection.execute(_INSERT, rows)

    def page(self, tenant: str | None = None, after: int = 0, limit: int = 100) -> AuditPage:
        """Return entries in the order in which they were stored.

        Args:
            tenant: Only this tenant's; ``None`` for all, including those of unknown senders.
            after: Only entries with IDs above this.
            limit: Maximum number of results.
        """
        query = select(AuditRow).where(AuditRow.id > after).order_by(AuditRow.id).limit(limit + 1)
        if tenant is not None:
            query = query.where(AuditRow.tenant == tenant)
        with Session(self.engine) as session:
            entries = [AuditEntry.model_validate(row, from_attributes=True) for row in session.scalars(query)]
        more = len(entries) > limit
        entries = entries[:limit]
        return AuditPage(entries=entries, next_after=entries[-1].id if more else None)
