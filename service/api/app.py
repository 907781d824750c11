"""Assembles the API: the app, its middleware from outside to inside, and its routers in the order of trial."""

from collections.abc import Callable
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from fastapi import FastAPI
from starlette.middleware.cors import CORSMiddleware
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from boost_core import __version__
from service.api.audit import Audit
from service.api.auth import SECURITY_SCHEMES, Gate, needs_key
from service.api.deps import Context
from service.api.errors import HANDLERS, MEDIA_TYPE
from service.api.examples import SPEC, examples_of_models
from service.api.middleware import REQUEST_ID, Answering
from service.api.routes import access, checkpoints, cluster, datasets, jobs, plans, sweeps
from service.jobs.outlook import Outlook
from service.jobs.store import JobStore
from service.settings import Settings
from service.telemetry.process import ProcessMetrics
from service.web import pages

if TYPE_CHECKING:
    from service.telemetry.tracing import Tracing

# Their routes are tried in turn, so those that get most requests come first. An app takes them as they are: including a
# router would build each of its routes anew, a quarter of a second in all.
_ROUTERS = (
    jobs.router, cluster.queues_router, checkpoints.router, datasets.router, sweeps.router, cluster.router,
    plans.router, cluster.profiles_router, access.router, cluster.targets_router, access.session_router,
    cluster.health_router, pages.router,
)  # fmt: skip


class _Api(FastAPI):
    """FastAPI with a complete OpenAPI document, and with middleware around every response, errors included."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request. The server's other messages, of its start and end, pass no middleware."""
        if scope["type"] == "lifespan":
            await self.router.lifespan(scope, receive, send)
        else:
            await super().__call__(scope, receive, send)

    def build_middleware_stack(self) -> ASGIApp:
        context: Context = self.state.context
        audited = Audit(super().build_middleware_stack(), context.audit)
        paths = (route.path for route in self.routes if isinstance(route, Route))
        answering = Answering(audited, context.settings, context.metrics.http, paths)
        return context.tracing.requests(answering) if context.tracing else answering

    def openapi(self) -> dict[str, Any]:
        if self.openapi_schema is None:
            document = super().openapi()
            document["components"]["securitySchemes"] = SECURITY_SCHEMES
            for path, operations in document["paths"].items():
                for operation in operations.values():
                    if needs_key(path):
                        operation["security"] = [{scheme: []} for scheme in SECURITY_SCHEMES]
                    for status, response in operation["responses"].items():
                        if int(status) >= HTTPStatus.BAD_REQUEST:  # FastAPI knows only one media type per route
                            (response["content"],) = ({MEDIA_TYPE: each} for each in response["content"].values())
            examples = {type(example).__name__: example.model_dump(mode="json") for example in examples_of_models()}
            for name, schema in document["components"]["schemas"].items():
                if (example := examples.get(name.removesuffix("-Input").removesuffix("-Output"))) is not None:
                    schema["examples"] = [SPEC if name == "JobSpec-Input" else example]
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
        title="BOOST Service", version=__version__, docs_url=None, redoc_url=None, exception_handlers=HANDLERS,
        routes=[route for router in _ROUTERS for route in router.routes],
        telemetry={"tracing": False, "metrics": False, "logs": False},
    )  # fmt: skip
    app.state.context = context = Context(store, settings, outlook, metrics, tracing)
    app.router.middleware_stack = Gate(app.router.middleware_stack, context.keys, context.limits, settings)
    if settings.cors_origins:
        # Pages of these origins may call the API with a key; only the service's own page may use cookies.
        app.add_middleware(
            CORSMiddleware, allow_origins=settings.cors_origins,
            allow_methods=["GET", "POST", "PUT", "PATCH", "DELETE"],
            allow_headers=["Authorization", "Idempotency-Key", "If-Match", "Last-Event-ID", REQUEST_ID],
            expose_headers=["ETag", "Idempotency-Replayed", "Location", "Retry-After", REQUEST_ID],
        )  # fmt: skip
    return app
