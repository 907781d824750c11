"""All metrics of one scrape. Those of jobs, queues and the cluster are read from the record each time.

None of them is counted separately, so a restart loses nothing, and a job's series end with the job.
"""

from collections.abc import Iterator, Sequence
from datetime import UTC, datetime, timedelta

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from service.accounts.quotas import QuotaStore
from service.jobs.model import NODES, JobRecord
from service.jobs.store import JobStore
from service.jobs.trackers import TrackerStore
from service.telemetry.cluster import cluster_families
from service.telemetry.families import family
from service.telemetry.jobs import Seen, failed_family, job_families
from service.telemetry.process import ProcessMetrics
from service.telemetry.queues import gpu_families, queue_families
from service.telemetry.trackers import tracker_families

FAILED_FOR = timedelta(hours=1)  # that a job's failure is shown
MOST_FAILED = 200  # shown at once, the newest


class ServiceCollector(Collector):
    """Collects what an operator may see.

    Args:
        store: The record.
        quotas: Queues, tenants and their limits.
        process: This process's own metrics.
    """

    def __init__(self, store: JobStore, quotas: QuotaStore, process: ProcessMetrics) -> None:
        self._store, self._quotas, self._process = store, quotas, process

    def collect(self) -> Iterator[Metric]:
        """Yield the present metrics."""
        jobs = _seen(self._store)
        tenants, queues = self._quotas.limits()
        yield from _states(self._store)
        yield failed_family(_failed(self._store))
        yield from job_families(jobs)
        yield from tracker_families(TrackerStore(self._store.engine), jobs)
        yield from queue_families(queues, jobs)
        yield from gpu_families("queue", queues, jobs, lambda job: job.queue)
        yield from gpu_families("tenant", tenants, jobs, lambda job: job.tenant)
        yield from cluster_families(self._store.snapshot(NODES))
        yield from self._process.collect()


class TenantCollector(Collector):
    """Collects what a tenant may see: its own jobs and quota.

    Args:
        store: The record.
        quotas: Queues, tenants and their limits.
        tenant: The tenant.
    """

    def __init__(self, store: JobStore, quotas: QuotaStore, tenant: str) -> None:
        self._store, self._quotas, self._tenant = store, quotas, tenant

    def collect(self) -> Iterator[Metric]:
        """Yield the present metrics."""
        jobs = [seen for seen in _seen(self._store) if seen.job.tenant == self._tenant]
        tenants, queues = self._quotas.limits()
        yield from _states(self._store, self._tenant)
        yield failed_family([job for job in _failed(self._store) if job.tenant == self._tenant])
        yield from job_families(jobs)
        yield from tracker_families(TrackerStore(self._store.engine), jobs)
        yield from queue_families(queues, jobs)
        own = {self._tenant: tenants.get(self._tenant, {})}
        yield from gpu_families("tenant", own, jobs, lambda job: job.tenant)


def _seen(store: JobStore) -> list[Seen]:
    now = datetime.now(UTC)
    return [Seen(job, now) for job in store.active()]


def _failed(store: JobStore) -> Sequence[JobRecord]:
    return store.failed_since(datetime.now(UTC) - FAILED_FOR, MOST_FAILED)


def _states(store: JobStore, tenant: str | None = None) -> Iterator[Metric]:
    states = family("boost_jobs", "Jobs in each state.", ("state",))
    for state, count in store.counts(tenant).items():
        states.add_metric((state,), count)
    yield states
