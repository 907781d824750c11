"""What jobs share: nodes, queues, tenants, profiles of kinds of GPU. What operators watch: targets, health, metrics."""

from collections import Counter
from http import HTTPStatus
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Path, Query, Request, Response
from fastapi.exceptions import RequestValidationError
from prometheus_client.registry import Collector

from boost_core.config.job import AcceleratorType
from boost_core.plan.machine import MeasuredProfile, ProfilePrecision
from service.accounts.keys import Principal
from service.accounts.tenants_and_queues import QuotaStore
from service.api.auth import Admin, Reader
from service.api.deps import ContextDep, context_of
from service.api.errors import BODY_REFUSED, CONFLICT, GUARDED, NOT_FOUND, NotReady, problem_responses
from service.api.requests import StrictRoute
from service.jobs.model import NODES
from service.jobs.outlook import cpus_without_rank
from service.models import cluster as models
from service.models.access import Scope, Tenant, TenantList, TenantName
from service.models.jobs import QueueSettings, TenantSettings
from service.telemetry.exporter import ServiceCollector, TenantCollector, exposition, targets

router = APIRouter(prefix="/v1/nodes", tags=["nodes"], responses=GUARDED)


@router.get("")
def list_nodes(who: Reader, context: ContextDep) -> models.NodeList:
    """List the nodes as the scheduler last saw them, and the jobs on them."""
    if (seen := context.store.snapshot(NODES)) is None:
        return models.NodeList(seen_at=None, nodes=[])
    time, nodes = seen
    running = [job for job in context.store.active() if job.has_workers and job.shape]
    build = context.datasets.building()
    shown: list[models.Node] = []
    for node in nodes:
        jobs, other_ranks, dataset = list[models.NodeJob](), 0, None
        for job in running:
            ranks = Counter(job.shape.nodes if job.shape else ())[node["node_id"]]
            if ranks and (job.tenant == who.tenant or who.may(Scope.ADMIN)):
                jobs.append(models.NodeJob(id=job.id, name=job.name, ranks=ranks))
            else:
                other_ranks += ranks
        if build is not None and build.progress is not None:
            free_of_ranks = cpus_without_rank(node["node_id"], node["total"], node["free"], running)
            if (cpus := min(build.progress.cpus, free_of_ranks)) > 0:
                is_shown = build.tenant == who.tenant or who.may(Scope.ADMIN)
                dataset = models.NodeDataset(name=build.name if is_shown else None, cpus=cpus)
        shown.append(models.Node(**node, jobs=jobs, other_ranks=other_ranks, dataset=dataset))
    return models.NodeList(seen_at=time, nodes=shown)


# Queues and tenants, and their limits.

queues_router = APIRouter(prefix="/v1", tags=["queues"], route_class=StrictRoute, responses=GUARDED)

QueuePath = Annotated[models.QueueName, Path(description="The queue.")]
TenantPath = Annotated[TenantName, Path(description="The tenant.")]


@queues_router.get("/queues", response_model=models.QueueList)
async def list_queues(_who: Reader, request: Request) -> Response:
    """List the queues with their limits and usage."""
    context = await context_of(request)
    queues = await context.reads.run(lambda store: QuotaStore(store).queues())
    return Response(models.QueueList(queues=queues).model_dump_json(), media_type="application/json")


@queues_router.get("/queues/{name}", responses=NOT_FOUND)
def show_queue(name: QueuePath, _who: Reader, context: ContextDep) -> models.Queue:
    """Show one queue."""
    return context.quotas.queue(name)


@queues_router.put("/queues/{name}", responses=BODY_REFUSED)
def put_queue(name: QueuePath, settings: QueueSettings, _who: Admin, context: ContextDep) -> models.Queue:
    """Create or change a queue. Limits below its current usage do not disturb running jobs."""
    return context.quotas.put_queue(name, settings)


@queues_router.delete("/queues/{name}", status_code=HTTPStatus.NO_CONTENT, responses=NOT_FOUND | CONFLICT)
def delete_queue(name: QueuePath, _who: Admin, context: ContextDep) -> None:
    """Delete a queue that has no active jobs."""
    context.quotas.delete_queue(name)


@queues_router.get("/tenants")
def list_tenants(_who: Admin, context: ContextDep) -> TenantList:
    """List the tenants with their limits and usage."""
    return TenantList(tenants=context.quotas.tenants())


@queues_router.put("/tenants/{name}", responses=BODY_REFUSED)
def put_tenant(name: TenantPath, settings: TenantSettings, _who: Admin, context: ContextDep) -> Tenant:
    """Set a tenant's limits. Limits below its current usage do not disturb running jobs."""
    return context.quotas.put_tenant(name, settings)


# Scrape targets of ranks for Prometheus.

targets_router = APIRouter(prefix="/v1/metrics", tags=["operations"], responses=GUARDED)


@targets_router.get("/targets")
def list_targets(who: Reader, context: ContextDep) -> list[models.TargetGroup]:
    """List the ranks of the tenant's RUNNING jobs for Prometheus' HTTP service discovery; operators see all."""
    return targets(job for job in context.store.active() if job.tenant == who.tenant or who.may(Scope.ADMIN))


# Liveness, readiness, and metrics.

health_router = APIRouter(tags=["operations"])


@health_router.get("/healthz")
async def healthz() -> dict[str, str]:
    """Whether the service is up."""
    return {"status": "ok"}


@health_router.get("/readyz", responses=problem_responses(503))
async def readyz(context: ContextDep) -> dict[str, str]:
    """Whether jobs can be scheduled."""
    if (reason := context.outlook().problem) is not None:
        raise NotReady(reason)
    return {"status": "ready"}


@health_router.get("/metrics", response_class=Response, responses=GUARDED)
async def metrics(request: Request, who: Reader, context: ContextDep) -> Response:
    """Metrics of the tenant's jobs for Prometheus; operators see all tenants' jobs and the service's own metrics."""
    collector: Collector = TenantCollector(context.store, context.quotas, who.tenant)
    if who.may(Scope.ADMIN):
        collector = ServiceCollector(context.store, context.quotas, context.metrics)
    accept, threads = request.headers.get("accept", ""), context.scrape_threads[who.tenant]
    content, media_type = await to_thread.run_sync(exposition, collector, accept, limiter=threads)
    return Response(content, media_type=media_type)


# Profiles of kinds of GPU: measured per precision, stored by operators, used for every job's predictions.

profiles_router = APIRouter(prefix="/v1/profiles", tags=["profiles"], route_class=StrictRoute, responses=GUARDED)

KindPath = Annotated[AcceleratorType, Path(description="Ray's name for the kind of GPU, for example H100.")]
PrecisionQuery = Annotated[ProfilePrecision | None, Query(description="Only the profile measured at this precision.")]


def shown(stored: models.StoredProfile, who: Principal) -> models.StoredProfile:
    """A profile as shown to a principal: only operators see the names of operators' keys."""
    return stored if who.may(Scope.ADMIN) else stored.model_copy(update={"stored_by": None})


@profiles_router.get("")
def list_profiles(who: Reader, context: ContextDep) -> models.ProfileList:
    """List the profiles of all kinds of GPU."""
    return models.ProfileList(profiles=[shown(stored, who) for stored in context.profiles.list()])


@profiles_router.get("/{kind}", responses=NOT_FOUND)
def show_profile(
    kind: KindPath, who: Reader, context: ContextDep, precision: PrecisionQuery = None
) -> models.StoredProfile:
    """Show the profile of one kind of GPU; by default the one in bf16 if there are several."""
    return shown(context.profiles.get(kind, precision), who)


@profiles_router.put("/{kind}", responses=BODY_REFUSED)
def put_profile(kind: KindPath, profile: MeasuredProfile, who: Admin, context: ContextDep) -> models.StoredProfile:
    """Store the profile of a kind of GPU, replacing any profile of the same precision."""
    try:
        profile.refuse_other_kind(kind)
    except ValueError as error:
        fault = {"type": "value_error", "loc": ("body", "device"), "msg": str(error), "input": profile.device}
        raise RequestValidationError([fault]) from error
    return context.profiles.put(kind, profile, who.name)


@profiles_router.delete("/{kind}", status_code=HTTPStatus.NO_CONTENT, responses=NOT_FOUND)
def delete_profile(kind: KindPath, _who: Admin, context: ContextDep, precision: PrecisionQuery = None) -> None:
    """Delete the profiles of a kind of GPU, or only one precision's; its jobs are then planned from data sheets."""
    context.profiles.delete(kind, precision)
