"""What every request passes through before the gate and the routes: headers of responses, HEAD, and metrics."""

import logging
import re
import time
import uuid
from collections.abc import Iterable

from starlette.datastructures import Headers
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.logs import about
from service.security.network import is_seen_over_tls
from service.settings import Settings
from service.telemetry.process import HttpMetrics

REQUEST_ID = "X-Request-ID"
UNMATCHED = "unmatched"  # in metrics, the route of a path that no route matches
OTHER = "OTHER"  # in metrics, any method that HTTP does not define

_FIT_AS_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_SOURCES = b"default-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'"
_SECURITY = [
    (b"x-content-type-options", b"nosniff"),
    (b"x-frame-options", b"DENY"),
    (b"referrer-policy", b"same-origin"),
    (b"content-security-policy", _SOURCES + b"; frame-ancestors 'none'; base-uri 'none'; form-action 'self'"),
]
_ALWAYS_TLS = (b"strict-transport-security", b"max-age=31536000")
_NOT_STORED = (b"cache-control", b"no-store")
_FAILED = 500
_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"})
_EVENT_STREAM = b"text/event-stream"
ENDLESS = re.compile(r"/v1/jobs/[^/]+/(events|logs)")  # these may never end, so they have no HEAD

_log = logging.getLogger(__name__)


class Answering:
    """An ASGI middleware around everything else, so that error responses and refused requests pass it, too.

    It adds the request's id and security headers for browsers to every response, answers HEAD wherever there is GET (as
    GET, without the body), and measures requests. A client may set the request's id by ``X-Request-ID``; otherwise one
    is generated. No path, method or other text from a client becomes a label, which bounds the number of series.

    Args:
        app: The app behind it.
        settings: The operator's settings.
        metrics: Receives the measurements: number, status and duration of requests.
        paths: The app's routes, such as ``/v1/jobs/{job_id}``, in the order in which they are tried.
    """

    def __init__(self, app: ASGIApp, settings: Settings, metrics: HttpMetrics, paths: Iterable[str]) -> None:
        self._app, self._metrics = app, metrics
        self._added = [*_SECURITY, _ALWAYS_TLS] if is_seen_over_tls(settings) else _SECURITY
        self._added_to_api = [*self._added, _NOT_STORED]
        self._routes = [(compile_path(path)[0], path) for path in dict.fromkeys(paths)]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request, add the headers to the response, and measure both."""
        # Not taken from the router, because a request may be refused before it gets there.
        route = next((route for pattern, route in self._routes if pattern.match(scope["path"])), UNMATCHED)
        labels = scope["method"] if scope["method"] in _METHODS else OTHER, route
        began, is_answered, streams = time.perf_counter(), False, False
        is_head = scope["method"] == "HEAD" and not ENDLESS.fullmatch(scope["path"])
        if is_head:
            scope = {**scope, "method": "GET"}  # all that the app sees
        sent_id = Headers(scope=scope).get(REQUEST_ID, "")
        request_id = sent_id if _FIT_AS_ID.fullmatch(sent_id) else uuid.uuid4().hex
        scope.setdefault("state", {})["request_id"] = request_id

        async def add_and_send(message: Message) -> None:
            nonlocal is_answered, streams
            if message["type"] == "http.response.start":
                own, added, status = message["headers"], self._added, message["status"]
                if scope["path"].startswith("/v1/"):
                    own, added = [header for header in own if header[0] != _NOT_STORED[0]], self._added_to_api
                message = {**message, "headers": [*own, (b"x-request-id", request_id.encode()), *added]}
                if status >= _FAILED:
                    level = logging.INFO if route == "/readyz" else logging.ERROR  # not being ready is no fault
                    _log.log(level, "request %s, %s %r: %d", request_id, scope["method"], scope["path"], status)
                is_answered = True
                self._metrics.requests.labels(*labels, str(status)).inc()
                streams = dict(own).get(b"content-type", b"").startswith(_EVENT_STREAM)
                if streams:
                    self._metrics.streams.inc()
            elif is_head and message["type"] == "http.response.body":
                message = {**message, "body": b""}
            await send(message)

        try:
            with about(request=request_id):
                await self._app(scope, receive, add_and_send)
        finally:
            # The response has been sent, or the client has left.
            if not is_answered:
                self._metrics.requests.labels(*labels, str(_FAILED)).inc()
            if streams:
                self._metrics.streams.dec()
            else:
                self._metrics.seconds.labels(*labels).observe(time.perf_counter() - began)
