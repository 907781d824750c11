"""Scrape targets of ranks for Prometheus."""

from fastapi import APIRouter

from service.api.auth import Reader
from service.api.deps import ContextDep
from service.models.identity import Scope
from service.models.targets import TargetGroup
from service.telemetry.targets import targets

router = APIRouter(prefix="/v1/metrics", tags=["operations"])


@router.get("/targets")
def list_targets(who: Reader, context: ContextDep) -> list[TargetGroup]:
    """List the ranks of the tenant's RUNNING jobs for Prometheus' HTTP service discovery; operators see all."""
    jobs = context.store.active()
    return targets(job for job in jobs if job.tenant == who.tenant or who.may(Scope.ADMIN))
