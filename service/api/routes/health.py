"""Liveness, readiness, and metrics."""

from http import HTTPStatus

from fastapi import APIRouter, Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from service.api.auth import Reader
from service.api.deps import ContextDep
from service.api.errors import GUARDED, NotReady, problem_responses
from service.models.identity import Scope
from service.telemetry.exporter import ServiceCollector, TenantCollector

router = APIRouter(tags=["operations"])


@router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Whether the service is up."""
    return {"status": "ok"}


@router.get("/readyz", responses=problem_responses(HTTPStatus.SERVICE_UNAVAILABLE))
async def readyz(context: ContextDep) -> dict[str, str]:
    """Whether jobs can be scheduled."""
    reason = context.outlook().problem
    if reason is not None:
        raise NotReady(reason)
    return {"status": "ready"}


@router.get("/metrics", response_class=Response, responses=GUARDED)
def metrics(request: Request, who: Reader, context: ContextDep) -> Response:
    """Metrics of the tenant's jobs for Prometheus; operators see all tenants' jobs and the service's own metrics."""
    registry = CollectorRegistry()
    if who.may(Scope.ADMIN):
        registry.register(ServiceCollector(context.store, context.quotas, context.metrics))
    else:
        registry.register(TenantCollector(context.store, context.quotas, who.tenant))
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(registry), media_type=media_type)
