"""Assembles the API."""

import logging
import re
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import compile_path
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from boost_core import __version__
from service import web
from service.accounts.audit import AuditLog
from service.accounts.keys import KeyStore
from service.accounts.quotas import QuotaStore
from service.api.audit import Audit
from service.api.auth import Gate, document_security
from service.api.deps import Context
from service.api.errors import GUARDED, Heads, document_media_type, install_error_handlers
from service.api.examples import document_examples
from service.api.following import Feeds
from service.api.limits import RateLimits, ShortReads, StoreAccess
from service.api.routes import access, checkpoints, cluster, datasets, events, jobs, plans, profiles
from service.api.searches import Searches
from service.jobs.datasets import DatasetStore
from service.jobs.observations import Observations
from service.jobs.outlook import Outlook
from service.jobs.profiles import ProfileStore
from service.jobs.store import JobStore
from service.logs import about
from service.security.network import is_seen_over_tls
from service.settings import Settings
from service.telemetry.process import HttpMetrics, ProcessMetrics

if TYPE_CHECKING:
    from service.telemetry.tracing import Tracing


# Headers of every response: the request's id, and security headers for browsers.

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


# Metrics of requests: number, status and duration.

UNMATCHED = "unmatched"
OTHER = "OTHER"

_METHODS = frozenset({"GET", "HEAD", "OPTIONS", "POST", "PUT", "PATCH", "DELETE"})
_STREAM = b"text/event-stream"


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


class _Api(FastAPI):
    """FastAPI with a complete OpenAPI document, and with middleware around every response, errors included."""

    def build_middleware_stack(self) -> ASGIApp:
        context: Context = self.state.context
        answering = AnswerHeaders(Audit(super().build_middleware_stack(), context.audit), context.settings)
        paths = (str(route.path) for route in iter_route_contexts(self.routes))
        measuring = Measuring(Heads(answering), context.metrics.http, paths)
        return context.tracing.requests(measuring) if context.tracing else measuring

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            document_media_type(document)
            document_security(document)
            document_examples(document)
        return super().openapi()


def create_app(
    store: JobStore,
    settings: Settings,
    outlook: Callable[[], Outlook],
    metrics: ProcessMetrics | None = None,
    tracing: "Tracing | None" = None,
) -> FastAPI:
    """Create the API over a record.

    Args:
        store: The record.
        settings: The operator's settings.
        outlook: Returns whether jobs are being scheduled, and what is not known of them. Called from any thread.
        metrics: The process's metrics, if it has more than the API's own.
        tracing: Creates spans; ``None``: no tracing.
    """
    # FastAPI's documentation pages load scripts from third parties; /openapi.json has all that they show.
    # Its spans and metrics are off as well: the service has its own.
    app = _Api(
        title="BOOST Service",
        version=__version__,
        docs_url=None,
        redoc_url=None,
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )
    known_keys, limits, stopping = KeyStore(store.engine), RateLimits(settings), threading.Event()
    app.state.context = Context(
        store,
        ShortReads(store, 2 * settings.database_seconds),
        settings,
        outlook,
        DatasetStore(store),
        QuotaStore(store),
        ProfileStore(store.engine),
        Observations(store.engine),
        Feeds(store, known_keys, stopping),
        known_keys,
        AuditLog(store.engine),
        limits,
        StoreAccess(settings.store_seconds),
        Searches(),
        metrics or ProcessMetrics(),
        tracing,
        stopping,
    )
    install_error_handlers(app)
    app.router.middleware_stack = Gate(app.router.middleware_stack, known_keys, limits, settings)
    allow_origins(app, settings.cors_origins)
    # Routers are tried in turn, so those that get most requests come first.
    others = (
        checkpoints.router,
        datasets.router,
        jobs.trackers_router,
        jobs.evaluations_router,
        cluster.router,
        plans.router,
        profiles.router,
        access.router,
        access.audit_router,
        access.identity_router,
        cluster.targets_router,
    )
    for routes in (
        jobs.router,
        cluster.queues_router,
        jobs.changes_router,
        events.router,
        jobs.history_router,
        *others,
    ):
        app.include_router(routes, responses=GUARDED)
    for open_routes in (access.session_router, cluster.health_router, web.router):
        app.include_router(open_routes)
    return app
