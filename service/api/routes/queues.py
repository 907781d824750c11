"""Queues and tenants, and their limits."""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response

from service.accounts.quotas import QuotaStore
from service.api.auth import Admin, Reader
from service.api.deps import ContextDep, context_of
from service.api.errors import problem_responses
from service.api.requests import StrictRoute
from service.models.identity import TenantName
from service.models.queues import Queue, QueueList, QueueName
from service.models.requests import QueueSettings, TenantSettings
from service.models.tenants import Tenant, TenantList

router = APIRouter(prefix="/v1", tags=["queues"], route_class=StrictRoute)

QueuePath = Annotated[QueueName, Path(description="The queue.")]
TenantPath = Annotated[TenantName, Path(description="The tenant.")]

_NOT_FOUND = problem_responses(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY)
_BODY_REFUSED = problem_responses(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)


@router.get("/queues", response_model=QueueList)
async def list_queues(_who: Reader, request: Request) -> Response:
    """List the queues with their limits and usage."""
    queues = await context_of(request).reads.run(lambda store: QuotaStore(store).queues())
    return Response(QueueList(queues=queues).model_dump_json(), media_type="application/json")


@router.get("/queues/{name}", responses=_NOT_FOUND)
def show_queue(name: QueuePath, _who: Reader, context: ContextDep) -> Queue:
    """Show one queue."""
    return context.quotas.queue(name)


@router.put("/queues/{name}", responses=_BODY_REFUSED)
def put_queue(name: QueuePath, settings: QueueSettings, _who: Admin, context: ContextDep) -> Queue:
    """Create or change a queue. Limits below its current usage do not disturb running jobs."""
    return context.quotas.put_queue(name, settings)


@router.delete(
    "/queues/{name}",
    status_code=HTTPStatus.NO_CONTENT,
    responses=_NOT_FOUND | problem_responses(HTTPStatus.CONFLICT),
)
def delete_queue(name: QueuePath, _who: Admin, context: ContextDep) -> None:
    """Delete a queue that has no active jobs."""
    context.quotas.delete_queue(name)


@router.get("/tenants")
def list_tenants(_who: Admin, context: ContextDep) -> TenantList:
    """List the tenants with their limits and usage."""
    return TenantList(tenants=context.quotas.tenants())


@router.put("/tenants/{name}", responses=_BODY_REFUSED)
def put_tenant(name: TenantPath, settings: TenantSettings, _who: Admin, context: ContextDep) -> Tenant:
    """Set a tenant's limits. Limits below its current usage do not disturb running jobs."""
    return context.quotas.put_tenant(name, settings)
