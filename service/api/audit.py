"""Records every request that changes something in the audit log before it is answered."""

import logging
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from sqlalchemy import Connection
from sqlalchemy.exc import SQLAlchemyError
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.accounts.audit import AuditEvent, AuditLog
from service.models.access import ACTIONS

_PATTERNS = [(method, compile_path(path)[0], action) for (method, path), action in ACTIONS.items()]
_UNAUTHORIZED, _TOO_MANY = 401, 429

_log = logging.getLogger(__name__)


class NotRecorded(RuntimeError):
    """A request cannot be recorded in the transaction that carries it out; it may be carried out without that."""


@dataclass(frozen=True)
class Audit:
    """An ASGI middleware that records requests in the audit log; one that changes many things, for each of these, too.

    Requests refused for exceeding a rate limit, and those without any key, are left out: anybody could fill the
    database with them.

    Attributes:
        app: What is behind it.
        audit: The log.
    """

    app: ASGIApp
    audit: AuditLog

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, and record it as soon as its status is known."""
        # Not taken from the routes, because a request may be refused before it gets there.
        named = (each for method, path, each in _PATTERNS if method == scope["method"] and path.match(scope["path"]))
        if (action := next(named, None)) is None:
            await self.app(scope, receive, send)
            return

        state: dict[str, Any] = scope["state"]
        state["action"] = action

        async def record_and_send(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] != state.get("recorded"):
                status = message["status"]
                bad_key = status == _UNAUTHORIZED and state.get("came_with_key", True)
                if status != _TOO_MANY and (bad_key or state.get("principal") is not None):
                    request = Request(scope)
                    events = [_event_of(request, status, each) for each in (scope["path"], *state.get("changed", ()))]
                    try:
                        await run_in_threadpool(self.audit.record, *events)
                    except SQLAlchemyError as error:  # carried out by now; the process's log is the next best place
                        for event in events:
                            _log.error("cannot be stored in the audit log: %s (%s)", event, error)
            await send(message)

        await self.app(scope, receive, record_and_send)


def record_with(request: Request, audit: AuditLog, status: int, connection: Connection) -> None:
    """Record a request in the transaction that carries it out; a second would double the cost.

    If the response has another status in the end, that is recorded as for all other requests.

    Args:
        request: The request.
        audit: The log.
        status: Status of the response.
        connection: The transaction.

    Raises:
        NotRecorded: It cannot be recorded.
    """
    request.state.recorded = None
    try:
        audit.write(connection, _event_of(request, status, request.scope["path"]))
    except SQLAlchemyError as error:
        raise NotRecorded from error
    request.state.recorded = status


def _event_of(request: Request, status: int, path: str) -> AuditEvent:
    state: dict[str, Any] = request.scope["state"]
    address = request.client.host if request.client else None
    return AuditEvent(state.get("principal"), state["action"], quote(path), status, address, state["request_id"])
