"""The audit log: who changed what, or tried to."""

from dataclasses import dataclass
from datetime import UTC, datetime

from sqlalchemy import Connection, Engine, insert, select

from service.accounts.keys import Principal
from service.accounts.tables import AuditRow
from service.jobs.database import read_models
from service.models.access import AuditEntry, AuditPage

LOCAL = "local"  # the address recorded for direct changes to the database

_INSERT = insert(AuditRow)
_LONGEST_RESOURCE = 255
_LONGEST_ADDRESS = 64
_NOBODY: dict[str, str | None] = dict.fromkeys(("tenant", "key_id", "key_name"))


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
        rows = []
        for deed in deeds:
            who, address = deed.principal, deed.address[:_LONGEST_ADDRESS] if deed.address else None
            sender = {"tenant": who.tenant, "key_id": who.key_id, "key_name": who.name} if who else _NOBODY
            target = {"action": deed.action, "resource": deed.resource[:_LONGEST_RESOURCE], "status": deed.status}
            rows.append({"time": now, **sender, **target, "address": address, "request_id": deed.request_id})
        connection.execute(_INSERT, rows)

    def page(self, tenant: str | None = None, after: int = 0, limit: int = 100) -> AuditPage:
        """Return entries in the order in which they were stored.

        Args:
            tenant: Only this tenant's; ``None`` for all, including those of unknown senders.
            after: Only entries with IDs above this.
            limit: Maximum number of results.
        """
        query = select(AuditRow.__table__).where(AuditRow.id > after).order_by(AuditRow.id).limit(limit + 1)
        if tenant is not None:
            query = query.where(AuditRow.tenant == tenant)
        entries = read_models(self.engine, AuditEntry, query)
        return AuditPage(entries=entries[:limit], next_after=entries[limit - 1].id if len(entries) > limit else None)
