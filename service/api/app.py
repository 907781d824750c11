"""The API put together."""

from collections.abc import Callable
from typing import Any

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from boost_core import __version__
from service import web
from service.accounts.quotas import QuotaStore
from service.api.deps import Context
from service.api.errors import document_media_type, install_error_handlers
from service.api.following import Follower
from service.api.routes import changes, checkpoints, events, health, history, jobs, nodes, plans, queues
from service.jobs.store import JobStore
from service.settings import Settings
from service.telemetry.exporter import JobCollector


class _Api(FastAPI):
    """FastAPI whose OpenAPI document has the media type of problems right."""

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document_media_type(super().openapi())
        return super().openapi()


def create_app(store: JobStore, settings: Settings, readiness: Callable[[], str | None]) -> FastAPI:
    """The API over a record.

    Args:
        store: The record.
        settings: The operator's settings.
        readiness: Gives ``None`` when jobs can be scheduled, else the reason why not. Called from any thread.
    """
    app = _Api(title="BOOST Service", version=__version__)
    metrics = CollectorRegistry()
    metrics.register(JobCollector(store))
    quotas, follower = QuotaStore(store.engine), Follower(store.versions)
    app.state.context = Context(store, settings, readiness, metrics, quotas, follower)
    install_error_handlers(app)
    for routes in (jobs, changes, events, history, checkpoints, queues, nodes, plans, health):
        app.include_router(routes.router)
    app.include_router(web.router)
    return app
