"""Writes down every request that changes something, before it is answered."""

import logging
from typing import Any
from urllib.parse import quote

from fastapi import Request
from fastapi.concurrency import run_in_threadpool
from sqlalchemy.exc import SQLAlchemyError
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.accounts.audit import AuditEvent, AuditLog

# What requests are called in the log.
ACTIONS = {
    ("POST", "/v1/jobs"): "job.submit",
    ("PATCH", "/v1/jobs/{job_id}"): "job.change",
    ("DELETE", "/v1/jobs/{job_id}"): "job.cancel",
    ("POST", "/v1/jobs/{job_id}/cancel"): "job.cancel",
    ("POST", "/v1/jobs/{job_id}/pause"): "job.pause",
    ("POST", "/v1/jobs/{job_id}/resume"): "job.resume",
    ("POST", "/v1/jobs/{job_id}/retry"): "job.retry",
    ("POST", "/v1/jobs/{job_id}/clone"): "job.clone",
    ("POST", "/v1/jobs/{job_id}/drills"): "job.drill",
    ("POST", "/v1/jobs/{job_id}/profiles"): "job.profile",
    ("POST", "/v1/jobs/{job_id}/evaluations"): "job.evaluate",
    ("PUT", "/v1/jobs/{job_id}/checkpoints/{step}/pin"): "checkpoint.pin",
    ("DELETE", "/v1/jobs/{job_id}/checkpoints/{step}/pin"): "checkpoint.unpin",
    ("DELETE", "/v1/jobs/{job_id}/checkpoints/{step}"): "checkpoint.delete",
    ("POST", "/v1/datasets"): "dataset.create",
    ("POST", "/v1/datasets/{name}/cancel"): "dataset.cancel",
    ("DELETE", "/v1/datasets/{name}"): "dataset.delete",
    ("PUT", "/v1/queues/{name}"): "queue.put",
    ("DELETE", "/v1/queues/{name}"): "queue.delete",
    ("PUT", "/v1/tenants/{name}"): "tenant.put",
    ("PUT", "/v1/profiles/{kind}"): "profile.put",
    ("DELETE", "/v1/profiles/{kind}"): "profile.delete",
    ("POST", "/v1/keys"): "key.create",
    ("DELETE", "/v1/keys/{key_id}"): "key.revoke",
    ("POST", "/session"): "session.open",
    ("DELETE", "/session"): "session.close",
}
CHANGE_NOTHING = frozenset({("POST", "/v1/jobs/dry-run"), ("POST", "/v1/plans")})

_PATTERNS = [(method, compile_path(path)[0], action) for (method, path), action in ACTIONS.items()]
_UNAUTHORIZED, _TOO_MANY = 401, 429

_log = logging.getLogger(__name__)


class Audit:
    """An ASGI middleware that records deeds.

    What was turned away because there was too much of it is left out, and so is what came without any key: anybody
    could fill the database with these.

    Args:
        app: What is behind it.
        audit: The log.
    """

    def __init__(self, app: ASGIApp, audit: AuditLog) -> None:
        self._app, self._audit = app, audit

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, and record it as soon as its status is known."""
        action = _action_of(scope) if scope["type"] == "http" else None
        if action is None:
            await self._app(scope, receive, send)
            return

        async def record_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                await self._record(Request(scope), action, message["status"])
            await send(message)

        await self._app(scope, receive, record_and_send)

    async def _record(self, request: Request, action: str, status: int) -> None:
        state: dict[str, Any] = request.scope["state"]
        if status == _TOO_MANY or (status == _UNAUTHORIZED and not state.get("came_with_key", True)):
            return
        address = request.client.host if request.client else None
        deed = AuditEvent(state.get("principal"), action, quote(request.url.path), status, address, state["request_id"])
        try:
            await run_in_threadpool(self._audit.record, deed)
        except SQLAlchemyError as error:  # it has happened by now; this log is the next best place
            _log.error("cannot be stored in the audit log: %s (%s)", deed, error)


def _action_of(scope: Scope) -> str | None:
    """What a request is called; the routes are not asked, because it may be turned away before it comes there."""
    found = (action for method, path, action in _PATTERNS if method == scope["method"] and path.match(scope["path"]))
    return next(found, None)
