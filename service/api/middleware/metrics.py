"""Metrics of requests: number, status and duration."""

import re
import time
from collections.abc import Iterable

from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from service.telemetry.process import HttpMetrics

UNMATCHED = "unmatched"
OTHER = "OTHER"

_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"})
_STREAM = b"text/event-stream"
_FAILED = 500  # the server's response when the app has sent none


class Measuring:
    """An ASGI middleware around everything else, so that refused requests are measured, too.

    No path, method or other text from a client becomes a label, which bounds the number of series.

    Args:
        app: The app behind it.
        metrics: Receives the measurements.
        paths: The app's routes, such as ``/v1/jobs/{job_id}``, in the order in which they are tried.
    """

    def __init__(self, app: ASGIApp, metrics: HttpMetrics, paths: Iterable[str]) -> None:
        self._app, self._metrics = app, metrics
        self._routes: list[tuple[re.Pattern[str], str]] = [
            (compile_path(path)[0], path) for path in dict.fromkeys(paths)
        ]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request and measure it."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        exchange = _Exchange(self._metrics, scope["method"], self._route_of(scope["path"]), send)
        try:
            await self._app(scope, receive, exchange.send)
        finally:
            exchange.end()

    def _route_of(self, path: str) -> str:
        """The route of a path; not taken from the router, because a request may be refused before it gets there."""
        return next((route for pattern, route in self._routes if pattern.match(path)), UNMATCHED)


class _Exchange:
    """One request and its response."""

    def __init__(self, metrics: HttpMetrics, method: str, route: str, send: Send) -> None:
        self._metrics, self._send = metrics, send
        self._labels = method if method in _METHODS else OTHER, route
        self._began = time.perf_counter()
        self._status: int | None = None
        self._streams = False

    async def send(self, message: Message) -> None:
        """Pass on a part of the response; the first has its status."""
        if message["type"] == "http.response.start":
            self._answered(message["status"])
            if any(name == b"content-type" and value.startswith(_STREAM) for name, value in message["headers"]):
                self._streams = True
                self._metrics.streams.inc()
        await self._send(message)

    def end(self) -> None:
        """Finish measuring: the response has been sent, or the client has left."""
        if self._status is None:
            self._answered(_FAILED)
        if self._streams:
            self._metrics.streams.dec()
        else:
            self._metrics.seconds.labels(*self._labels).observe(time.perf_counter() - self._began)

    def _answered(self, status: int) -> None:
        self._status = status
        self._metrics.requests.labels(*self._labels, str(status)).inc()
