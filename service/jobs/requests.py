"""Requests that take effect once, however often they are sent (Idempotency-Key)."""

from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from sqlalchemy import Connection, delete, select
from sqlalchemy.orm import Session

from service.jobs.tables import RequestRow

KEPT = timedelta(days=7)


class IdempotencyKeyReused(ValueError):
    """A key was reused for another request."""

    def __init__(self, key: str) -> None:
        super().__init__(
            f"Idempotency-Key {key!r} was sent with another request before; use a new one for each request"
        )


@dataclass(frozen=True)
class Request:
    """A request that may be repeated.

    Attributes:
        tenant: The sender's tenant.
        key: Its Idempotency-Key.
        fingerprint: Digest of its content.
    """

    tenant: str
    key: str
    fingerprint: str


def find(session: Session | Connection, request: Request) -> str | None:
    """The result of the request if it was carried out before; ``None`` if it was not.

    Raises:
        IdempotencyKeyReused: The key belongs to another request.
    """
    same = (RequestRow.tenant == request.tenant) & (RequestRow.key == request.key)
    row = session.execute(select(RequestRow.fingerprint, RequestRow.resource).where(same)).one_or_none()
    if row is None:
        return None
    if row.fingerprint != request.fingerprint:
        raise IdempotencyKeyReused(request.key)
    resource: str = row.resource
    return resource


def row_of(request: Request, resource: str) -> RequestRow:
    """The row to be stored together with the request's effect, which fails if another process was faster."""
    return RequestRow(**values_of(request, resource))


def values_of(request: Request, resource: str) -> dict[str, Any]:
    """The same by columns."""
    return {
        "tenant": request.tenant,
        "key": request.key,
        "fingerprint": request.fingerprint,
        "resource": resource,
        "time": datetime.now(UTC),
    }


def forget_old(session: Session) -> None:
    """Delete requests that are too old to be repeated."""
    session.execute(delete(RequestRow).where(RequestRow.time < datetime.now(UTC) - KEPT))
