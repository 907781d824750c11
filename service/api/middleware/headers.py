"""Headers of every response: the request's id, and security headers for browsers."""

import logging
import re
import uuid
from collections.abc import Sequence

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.logs import about
from service.security.network import is_seen_over_tls
from service.settings import Settings

REQUEST_ID = "X-Request-ID"

_FIT_AS_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SECURITY = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
    (
        b"content-security-policy",
        b"default-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        b"frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    ),
]
_ALWAYS_TLS = (b"strict-transport-security", b"max-age=31536000")
_NOT_STORED = (b"cache-control", b"no-store")
_FAILED = 500

_log = logging.getLogger(__name__)


class AnswerHeaders:
    """An ASGI middleware around everything else, so that error responses get the headers, too.

    A client may set the request's id by ``X-Request-ID``; otherwise one is generated.

    Args:
        app: The app behind it.
        settings: The operator's settings.
    """

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._added = [*_SECURITY, _ALWAYS_TLS] if is_seen_over_tls(settings) else _SECURITY
        self._added_to_api = [*self._added, _NOT_STORED]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request and add the headers to the response."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request_id = _id_of(scope)
        scope.setdefault("state", {})["request_id"] = request_id

        async def add_and_send(message: Message) -> None:
            if message["type"] == "http.response.start":
                own, added = message["headers"], self._added
                if scope["path"].startswith("/v1/"):
                    own, added = [header for header in own if header[0] != _NOT_STORED[0]], self._added_to_api
                message = {**message, "headers": [*own, (b"x-request-id", request_id.encode()), *added]}
                if message["status"] >= _FAILED:
                    _log.error("request %s, %s %r: %d", request_id, scope["method"], scope["path"], message["status"])
            await send(message)

        with about(request=request_id):
            await self._app(scope, receive, add_and_send)


def allow_origins(app: FastAPI, origins: Sequence[str]) -> None:
    """Allow pages of these origins to call the API with a key; only the service's own page may use cookies."""
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=origins,
            allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
            allow_headers=["Authorization", "Idempotency-Key", "If-Match", "Last-Event-ID", REQUEST_ID],
            expose_headers=["ETag", "Idempotency-Replayed", "Location", "Retry-After", REQUEST_ID],
        )


def _id_of(scope: Scope) -> str:
    given = Headers(scope=scope).get(REQUEST_ID, "")
    return given if _FIT_AS_ID.fullmatch(given) else uuid.uuid4().hex
