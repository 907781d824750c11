"""All metrics of one scrape. Those of jobs, queues and the cluster are read from the record each time.

None of them is counted separately, so a restart loses nothing, and a job's series end with the job.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from service.accounts.quotas import Limit, QuotaStore
from service.jobs.model import NODES, JobRecord
from service.jobs.states import JobState
from service.jobs.store import JobStore
from service.jobs.trackers import TrackerStore
from service.models.cluster import TargetGroup, TargetLabels
from service.telemetry.families import family
from service.telemetry.jobs import LABELS, Seen, failed_family, job_families
from service.telemetry.process import ProcessMetrics

# The metrics of the cluster, as the scheduler last saw it.

_RESOURCES = ("CPU", "GPU")


def cluster_families(snapshot: tuple[datetime, Sequence[Mapping[str, Any]]] | None) -> Iterator[Metric]:
    """Yield the metrics of the nodes.

    Args:
        snapshot: When the nodes were seen, and each in the form of ``service.models.cluster.Node``; ``None``: not yet.
    """
    seen_at = family("boost_cluster_seen_timestamp_seconds", "When the scheduler last saw the cluster.")
    nodes = family("boost_cluster_nodes", "Nodes that stay, and nodes about to leave.", ("condition",))
    resources = family(
        "boost_cluster_resources", "Resources of all nodes, and the unused part.", ("resource", "condition")
    )
    if snapshot is not None:
        time, found = snapshot
        seen_at.add_metric((), time.timestamp())
        draining = sum(node["draining"] for node in found)
        nodes.add_metric(("alive",), len(found) - draining)
        nodes.add_metric(("draining",), draining)
        for resource in _RESOURCES:
            for condition in ("total", "free"):
                amount = sum(node[condition].get(resource, 0) for node in found)
                resources.add_metric((resource, condition), amount)
    yield from (seen_at, nodes, resources)


# The metrics of queues and tenants.

_STATES = (JobState.QUEUED, JobState.SCHEDULING, JobState.RUNNING)


def queue_families(queues: Collection[str], jobs: Sequence[Seen]) -> Iterator[Metric]:
    """Yield the number of jobs in each queue, and how long they have waited.

    Args:
        queues: Names of all queues.
        jobs: All active jobs.
    """
    depth = family("boost_queue_jobs", "Waiting and running jobs of each queue.", ("queue", "state"))
    counts = Counter((seen.job.queue, seen.job.state) for seen in jobs)
    for queue in queues:
        for state in _STATES:
            depth.add_metric((queue, state), counts[queue, state])
    yield depth
    oldest = family("boost_queue_oldest_wait_seconds", "Waiting time of the job that has waited longest.", ("queue",))
    waits: dict[str, float] = dict.fromkeys(queues, 0.0)
    for seen in jobs:
        waits[seen.job.queue] = max(waits.get(seen.job.queue, 0.0), seen.waited_seconds or 0.0)
    for queue, seconds in waits.items():
        oldest.add_metric((queue,), seconds)
    yield oldest


def gpu_families(
    what: str, limits: Mapping[str, Limit], jobs: Sequence[Seen], of: Callable[[JobRecord], str]
) -> Iterator[Metric]:
    """Yield the GPUs that the gangs of each queue or tenant hold, and how many they may hold.

    Args:
        what: ``queue`` or ``tenant``.
        limits: Limits by name; empty for those without any.
        jobs: All active jobs.
        of: Returns the name that a job counts towards.
    """
    held: dict[str, float] = defaultdict(float, dict.fromkeys(limits, 0.0))
    for seen in jobs:
        held[of(seen.job)] += seen.job.held.get("GPU", 0)
    holding = family(f"boost_{what}_gpus_held", f"GPUs that the gangs of each {what} hold.", (what,))
    for name, gpus in held.items():
        holding.add_metric((name,), gpus)
    yield holding
    limit = family(f"boost_{what}_gpus_limit", f"GPUs that the gangs of each {what} may hold, if limited.", (what,))
    for name, limited in limits.items():
        if "GPU" in limited:
            limit.add_metric((name,), limited["GPU"])
    yield limit


# The metrics of trackers' progress with each active job.


def tracker_families(trackers: TrackerStore, jobs: Sequence[Seen]) -> Iterator[Metric]:
    """Yield the metrics of some jobs' trackers."""
    labels = (*LABELS, "tracker")
    untold = "Events not sent to the tracker yet; capped at 10000."
    behind = family("boost_job_tracker_events_behind", untold, labels)
    failures = family("boost_job_tracker_failures_total", "Number of failed deliveries to the tracker.", labels)
    by_id = {seen.job.id: seen.job for seen in jobs}
    for tracked, count in trackers.of_jobs(by_id):
        job = by_id[tracked.job_id]
        values = (job.id, job.name, job.tenant, tracked.kind)
        behind.add_metric(values, count)
        failures.add_metric(values, tracked.failures)
    yield behind
    yield failures


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


# Service discovery: where the ranks of jobs serve their metrics.


def targets(jobs: Iterable[JobRecord]) -> list[TargetGroup]:
    """Return the ranks of RUNNING jobs that serve metrics."""
    return [group for job in jobs if job.state is JobState.RUNNING for group in _ranks(job)]


def _ranks(job: JobRecord) -> Iterator[TargetGroup]:
    gang, layout = job.shape, job.present_layout
    if gang is None:
        return
    for rank, endpoint in enumerate(gang.metrics_endpoints):
        if endpoint is not None:
            at = layout.coordinates(rank)
            labels = TargetLabels(
                job_id=job.id, job_name=job.name, tenant=job.tenant, rank=str(rank), tensor_parallel_rank=str(at.tp),
                pipeline_parallel_rank=str(at.pp), data_parallel_rank=str(at.dp), context_parallel_rank=str(at.cp),
                node=gang.nodes[rank],
            )  # fmt: skip
            yield TargetGroup(targets=[endpoint], labels=labels)
