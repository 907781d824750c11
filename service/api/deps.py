"""Dependencies of routes: the service's parts, and the job that a path names."""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Annotated

from anyio import CapacityLimiter
from fastapi import Depends, Request

from service.accounts.audit import AuditLog
from service.accounts.keys import KeyStore, Principal
from service.accounts.tenants_and_queues import QuotaStore
from service.api.auth import Reader
from service.api.event_streams import Feeds
from service.api.limits import SLOW_THREADS, PlanThreads, RateLimits, ShortReads, StoreAccess
from service.api.searches import Searches
from service.jobs.datasets import DatasetStore
from service.jobs.downsampled_curves import CurveCache
from service.jobs.model import JobRecord
from service.jobs.observations import Observations
from service.jobs.outlook import Outlook
from service.jobs.profiles import ProfileStore
from service.jobs.queries import JobNotFound
from service.jobs.store import JobStore
from service.jobs.sweep_study import Studies
from service.jobs.sweeps import SweepStore
from service.models.access import Scope
from service.settings import Settings
from service.telemetry.process import ProcessMetrics

if TYPE_CHECKING:
    from service.telemetry.tracing import Tracing


class Context:
    """The parts of the service that routes work with; one per app.

    Attributes:
        store: The record.
        reads: Short reads of it.
        settings: The operator's settings.
        curves: Downsampled curves of its jobs.
        slow_threads: The threads in which requests that may take a minute read the record, by tenant.
        scrape_threads: The same for those that take a moment, ``/metrics`` among them.
        plans: The threads in which plans are made, and trials checked.
        outlook: Returns whether jobs are being scheduled, and what is not known of them.
        datasets: Datasets that jobs may name.
        sweeps: Sweeps.
        studies: Their trials.
        quotas: Queues, tenants and their limits.
        profiles: Measured profiles of kinds of GPU.
        observations: Measured times of jobs relative to their predictions.
        feeds: Jobs' events for open streams.
        keys: API keys.
        audit: The audit log.
        limits: Rate limits.
        stores: Access to stores and files.
        searches: Searches for plans and layouts.
        metrics: This process's metrics.
        tracing: Creates spans; ``None``: no tracing.
        stopping: Set when the server stops, so that open streams end.
    """

    def __init__(
        self, store: JobStore, settings: Settings, outlook: Callable[[], Outlook], metrics: ProcessMetrics | None,
        tracing: "Tracing | None",
    ) -> None:  # fmt: skip
        self.store, self.settings, self.outlook = store, settings, outlook
        self.reads = ShortReads(store, 2 * settings.database_seconds)
        self.curves = CurveCache(store.engine)
        self.slow_threads: Mapping[str, CapacityLimiter] = defaultdict(partial(CapacityLimiter, SLOW_THREADS))
        self.scrape_threads: Mapping[str, CapacityLimiter] = defaultdict(partial(CapacityLimiter, SLOW_THREADS))
        self.plans, self.datasets, self.quotas = PlanThreads(), DatasetStore(store), QuotaStore(store)
        self.sweeps, self.studies = SweepStore(store), Studies(store.engine)
        self.profiles, self.observations = ProfileStore(store.engine), Observations(store.engine)
        self.keys, self.audit, self.limits = KeyStore(store.engine), AuditLog(store.engine), RateLimits(settings)
        self.stopping = threading.Event()
        self.feeds = Feeds(store, self.keys, self.stopping)
        self.stores, self.searches = StoreAccess(settings.store_seconds), Searches()
        self.metrics, self.tracing = metrics or ProcessMetrics(), tracing


async def context_of(request: Request) -> Context:
    """The parts of the service; busy routes call this directly, because each dependency costs time."""
    context: Context = request.app.state.context
    return context


ContextDep = Annotated[Context, Depends(context_of)]


async def _job(job_id: str, request: Request, who: Reader) -> JobRecord:
    """The job, if it belongs to the tenant; others' jobs are reported as not found."""
    context = await context_of(request)
    return shown_to(who, await context.reads.run(lambda store: store.get(job_id)))


def shown_to(who: Principal, job: JobRecord) -> JobRecord:
    """Return a job, unless it does not belong to the tenant.

    Raises:
        JobNotFound: It belongs to another tenant, which is not disclosed.
    """
    if job.tenant != who.tenant and not who.may(Scope.ADMIN):
        raise JobNotFound(job.id)
    return job


JobDep = Annotated[JobRecord, Depends(_job)]
