"""What routes need: the service's parts, and the job that a path names."""

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated

from fastapi import Depends, Request
from fastapi.concurrency import run_in_threadpool

from service.accounts.audit import AuditLog
from service.accounts.keys import KeyStore
from service.accounts.principal import Principal
from service.accounts.quotas import QuotaStore
from service.api.auth import Reader
from service.api.middleware.limits import RateLimits
from service.api.searches import Searches
from service.api.store_access import StoreAccess
from service.api.streaming.following import Feeds
from service.jobs.datasets import DatasetStore
from service.jobs.model import JobRecord
from service.jobs.observations import Observations
from service.jobs.profiles import ProfileStore
from service.jobs.queries import JobNotFound
from service.jobs.store import JobStore
from service.models.identity import Scope
from service.settings import Settings
from service.telemetry.process import ProcessMetrics

if TYPE_CHECKING:
    from service.telemetry.tracing import Tracing


@dataclass(frozen=True)
class Context:
    """The parts of the service that routes work with; one for an app.

    Attributes:
        store: The record.
        settings: The operator's settings.
        readiness: Gives ``None`` when jobs can be scheduled, else the reason why not.
        datasets: Datasets that jobs may name.
        quotas: Queues, tenants and their limits.
        profiles: What was measured of kinds of GPU.
        observations: What jobs took beside their predictions.
        feeds: Gives open streams the events of jobs.
        keys: API keys.
        audit: Who has changed what.
        limits: How much may be asked, by whom.
        stores: Looks at stores and files.
        searches: Searches plans and layouts.
        metrics: What this process measures of itself.
        tracing: Makes spans; ``None``: there are none.
        stopping: Set when the server stops, so that open streams end.
    """

    store: JobStore
    settings: Settings
    readiness: Callable[[], str | None]
    datasets: DatasetStore
    quotas: QuotaStore
    profiles: ProfileStore
    observations: Observations
    feeds: Feeds
    keys: KeyStore
    audit: AuditLog
    limits: RateLimits
    stores: StoreAccess
    searches: Searches
    metrics: ProcessMetrics
    tracing: "Tracing | None"
    stopping: threading.Event


async def _context(request: Request) -> Context:
    context: Context = request.app.state.context
    return context


ContextDep = Annotated[Context, Depends(_context)]


async def _traceparent(request: Request) -> str | None:
    parent: str | None = getattr(request.state, "traceparent", None)
    return parent


TraceparentDep = Annotated[str | None, Depends(_traceparent)]  # of the request's span, if it has one


async def _job(job_id: str, request: Request, who: Reader) -> JobRecord:
    """The job, if it is the tenant's own; else there is none, as far as the tenant is told."""
    context = await _context(request)  # as a dependency it would cost a twentieth of the request
    job = await run_in_threadpool(context.store.get, job_id)
    refuse_others(job, who)
    return job


def refuse_others(job: JobRecord, who: Principal) -> None:
    """Refuse a job that is not the tenant's own.

    Raises:
        JobNotFound: It is another's; there is none, as far as the tenant is told.
    """
    if job.tenant != who.tenant and not who.may(Scope.ADMIN):
        raise JobNotFound(job.id)


JobDep = Annotated[JobRecord, Depends(_job)]
