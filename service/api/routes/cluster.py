"""What jobs share: nodes, queues, tenants and their limits. What operators watch: scrape targets, health, metrics."""

from collections import Counter
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path, Request, Response
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder

from service.accounts.quotas import QuotaStore
from service.api.auth import Admin, Reader
from service.api.deps import ContextDep, context_of
from service.api.errors import GUARDED, NotReady, problem_responses
from service.api.requests import StrictRoute
from service.jobs.model import NODES
from service.jobs.outlook import cpus_without_rank
from service.models.access import Scope, Tenant, TenantList, TenantName
from service.models.cluster import Node, NodeDataset, NodeJob, NodeList, Queue, QueueList, QueueName, TargetGroup
from service.models.jobs import QueueSettings, TenantSettings
from service.telemetry.exporter import ServiceCollector, TenantCollector, targets

router = APIRouter(prefix="/v1/nodes", tags=["nodes"])


@router.get("")
def list_nodes(who: Reader, context: ContextDep) -> NodeList:
    """List the nodes as the scheduler last saw them, and the jobs on them."""
    seen = context.store.snapshot(NODES)
    if seen is None:
        return NodeList(seen_at=None, nodes=[])
    time, nodes = seen
    running = [job for job in context.store.active() if job.has_gang and job.shape]
    build = context.datasets.building()
    shown: list[Node] = []
    for node in nodes:
        jobs, other_ranks, dataset = list[NodeJob](), 0, None
        for job in running:
            ranks = Counter(job.shape.nodes if job.shape else ())[node["node_id"]]
            if ranks and (job.tenant == who.tenant or who.may(Scope.ADMIN)):
                jobs.append(NodeJob(id=job.id, name=job.name, ranks=ranks))
            else:
                other_ranks += ranks
        if build is not None and build.progress is not None:
            free_of_ranks = cpus_without_rank(node["node_id"], node["total"], node["free"], running)
            if (cpus := min(build.progress.cpus, free_of_ranks)) > 0:
                is_shown = build.tenant == who.tenant or who.may(Scope.ADMIN)
                dataset = NodeDataset(name=build.name if is_shown else None, cpus=cpus)
        shown.append(Node(**node, jobs=jobs, other_ranks=other_ranks, dataset=dataset))
    return NodeList(seen_at=time, nodes=shown)


# Queues and tenants, and their limits.

queues_router = APIRouter(prefix="/v1", tags=["queues"], route_class=StrictRoute)

QueuePath = Annotated[QueueName, Path(description="The queue.")]
TenantPath = Annotated[TenantName, Path(description="The tenant.")]

_NOT_FOUND = problem_responses(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY)
_BODY_REFUSED = problem_responses(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)


@queues_router.get("/queues", response_model=QueueList)
async def list_queues(_who: Reader, request: Request) -> Response:
    """List the queues with their limits and usage."""
    queues = await context_of(request).reads.run(lambda store: QuotaStore(store).queues())
    return Response(QueueList(queues=queues).model_dump_json(), media_type="application/json")


@queues_router.get("/queues/{name}", responses=_NOT_FOUND)
def show_queue(name: QueuePath, _who: Reader, context: ContextDep) -> Queue:
    """Show one queue."""
    return context.quotas.queue(name)


@queues_router.put("/queues/{name}", responses=_BODY_REFUSED)
def put_queue(name: QueuePath, settings: QueueSettings, _who: Admin, context: ContextDep) -> Queue:
    """Create or change a queue. Limits below its current usage do not disturb running jobs."""
    return context.quotas.put_queue(name, settings)


@queues_router.delete(
    "/queues/{name}",
    status_code=HTTPStatus.NO_CONTENT,
    responses=_NOT_FOUND | problem_responses(HTTPStatus.CONFLICT),
)
def delete_queue(name: QueuePath, _who: Admin, context: ContextDep) -> None:
    """Delete a queue that has no active jobs."""
    context.quotas.delete_queue(name)


@queues_router.get("/tenants")
def list_tenants(_who: Admin, context: ContextDep) -> TenantList:
    """List the tenants with their limits and usage."""
    return TenantList(tenants=context.quotas.tenants())


@queues_router.put("/tenants/{name}", responses=_BODY_REFUSED)
def put_tenant(name: TenantPath, settings: TenantSettings, _who: Admin, context: ContextDep) -> Tenant:
    """Set a tenant's limits. Limits below its current usage do not disturb running jobs."""
    return context.quotas.put_tenant(name, settings)


# Scrape targets of ranks for Prometheus.

targets_router = APIRouter(prefix="/v1/metrics", tags=["operations"])


@targets_router.get("/targets")
def list_targets(who: Reader, context: ContextDep) -> list[TargetGroup]:
    """List the ranks of the tenant's RUNNING jobs for Prometheus' HTTP service discovery; operators see all."""
    jobs = context.store.active()
    return targets(job for job in jobs if job.tenant == who.tenant or who.may(Scope.ADMIN))


# Liveness, readiness, and metrics.

health_router = APIRouter(tags=["operations"])


@health_router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Whether the service is up."""
    return {"status": "ok"}


@health_router.get("/readyz", responses=problem_responses(HTTPStatus.SERVICE_UNAVAILABLE))
async def readyz(context: ContextDep) -> dict[str, str]:
    """Whether jobs can be scheduled."""
    reason = context.outlook().problem
    if reason is not None:
        raise NotReady(reason)
    return {"status": "ready"}


@health_router.get("/metrics", response_class=Response, responses=GUARDED)
def metrics(request: Request, who: Reader, context: ContextDep) -> Response:
    """Metrics of the tenant's jobs for Prometheus; operators see all tenants' jobs and the service's own metrics."""
    registry = CollectorRegistry()
    if who.may(Scope.ADMIN):
        registry.register(ServiceCollector(context.store, context.quotas, context.metrics))
    else:
        registry.register(TenantCollector(context.store, context.quotas, who.tenant))
    encode, media_type = choose_encoder(request.headers.get("accept", ""))
    return Response(encode(registry), media_type=media_type)
