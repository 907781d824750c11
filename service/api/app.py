"""Assembles the API."""

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from fastapi.routing import iter_route_contexts
from starlette.types import ASGIApp

from boost_core import __version__
from service import web
from service.accounts.audit import AuditLog
from service.accounts.keys import KeyStore
from service.accounts.quotas import QuotaStore
from service.api.audit import Audit
from service.api.auth import document_security
from service.api.deps import Context
from service.api.errors import GUARDED, document_media_type, install_error_handlers
from service.api.examples import document_examples
from service.api.middleware.auth import Gate
from service.api.middleware.headers import AnswerHeaders, allow_origins
from service.api.middleware.heads import Heads
from service.api.middleware.limits import RateLimits
from service.api.middleware.metrics import Measuring
from service.api.routes import (
    audit,
    changes,
    checkpoints,
    datasets,
    evaluations,
    events,
    health,
    history,
    identity,
    jobs,
    keys,
    nodes,
    plans,
    profiles,
    queues,
    session,
    targets,
    trackers,
)
from service.api.searches import Searches
from service.api.short_reads import ShortReads
from service.api.store_access import StoreAccess
from service.api.streaming.following import Feeds
from service.jobs.datasets import DatasetStore
from service.jobs.observations import Observations
from service.jobs.outlook import Outlook
from service.jobs.profiles import ProfileStore
from service.jobs.store import JobStore
from service.settings import Settings
from service.telemetry.process import ProcessMetrics

if TYPE_CHECKING:
    from service.telemetry.tracing import Tracing


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
    others = (checkpoints, datasets, trackers, evaluations, nodes, plans, profiles, keys, audit, identity, targets)
    for routes in (jobs, queues, changes, events, history, *others):
        app.include_router(routes.router, responses=GUARDED)
    for open_routes in (session, health, web):
        app.include_router(open_routes.router)
    return app
