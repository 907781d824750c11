"""All metrics of one scrape. Those of jobs, queues and the cluster are read from the record each time.

None of them is counted separately, so a restart loses nothing, and a job's series end with the job.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from service.accounts.quotas import QuotaStore
from service.jobs.model import NODES, JobRecord
from service.jobs.states import JobState
from service.jobs.store import JobStore
from service.jobs.trackers import TrackerStore
from service.models.cluster import TargetGroup, TargetLabels
from service.telemetry.jobs import LABELS, OF_ALL, OF_STARTED, Seen, families, family
from service.telemetry.process import ProcessMetrics

_RESOURCES = ("CPU", "GPU")
_QUEUE_STATES = (JobState.QUEUED, JobState.SCHEDULING, JobState.RUNNING)
FAILED_FOR = timedelta(hours=1)  # that a job's failure is shown
MOST_FAILED = 200  # shown at once, the newest


@dataclass(frozen=True, eq=False)
class TenantCollector(Collector):
    """Collects the metrics of jobs, queues and tenants, or what a tenant may see: its own jobs and quota.

    Attributes:
        store: The record.
        quotas: Queues, tenants and their limits.
        tenant: The tenant; ``None`` for all of them.
    """

    store: JobStore
    quotas: QuotaStore
    tenant: str | None = None

    def collect(self) -> Iterator[Metric]:
        """Yield the present metrics."""
        store, quotas, tenant = self.store, self.quotas, self.tenant
        now = datetime.now(UTC)
        jobs = [Seen(job, now) for job in store.active() if tenant in (None, job.tenant)]
        tenants, queues = quotas.limits()

        states = family("boost_jobs", "Jobs in each state.", ("state",))
        for state, count in store.counts(tenant).items():
            states.add_metric((state,), count)
        yield states
        reason_labels = (*LABELS, "reason")
        failed = family("boost_job_failed_timestamp_seconds", "When the job FAILED; for an hour.", reason_labels)
        for job in store.failed_since(now - FAILED_FOR, MOST_FAILED):
            if tenant in (None, job.tenant) and job.finished_at is not None:
                failed.add_metric((job.id, job.name, job.tenant, job.reason), job.finished_at.timestamp())
        yield failed

        # Active jobs.
        labelled = [((seen.job.id, seen.job.name, seen.job.tenant), seen) for seen in jobs]
        info_labels = (*LABELS, "queue", "family", "state")
        infos = family("boost_job_info", "A job that has not ended; always 1.", info_labels)
        for of_job, seen in labelled:
            infos.add_metric((*of_job, seen.job.queue, seen.job.spec.model.family, seen.job.state), 1)
        yield infos
        yield from families(OF_ALL, LABELS, labelled)
        yield from families(OF_STARTED, LABELS, [(of_job, seen) for of_job, seen in labelled if seen.job.attempt])

        # Trackers' progress with each active job.
        labels = (*LABELS, "tracker")
        unsent = "Events not sent to the tracker yet; capped at 10000."
        behind = family("boost_job_tracker_events_behind", unsent, labels)
        failures = family("boost_job_tracker_failures_total", "Number of failed deliveries to the tracker.", labels)
        by_id = {seen.job.id: seen.job for seen in jobs}
        for tracked, count in TrackerStore(store.engine).of_jobs(by_id):
            job = by_id[tracked.job_id]
            values = (job.id, job.name, job.tenant, tracked.kind)
            behind.add_metric(values, count)
            failures.add_metric(values, tracked.failures)
        yield behind
        yield failures

        # The number of jobs in each queue, and how long they have waited.
        depth = family("boost_queue_jobs", "Waiting and running jobs of each queue.", ("queue", "state"))
        counts = Counter((seen.job.queue, seen.job.state) for seen in jobs)
        for queue in queues:
            for state in _QUEUE_STATES:
                depth.add_metric((queue, state), counts[queue, state])
        yield depth
        oldest = family(
            "boost_queue_oldest_wait_seconds", "Waiting time of the job that has waited longest.", ("queue",)
        )
        waits: dict[str, float] = dict.fromkeys(queues, 0.0)
        for seen in jobs:
            waits[seen.job.queue] = max(waits.get(seen.job.queue, 0.0), seen.waited_seconds or 0.0)
        for queue, seconds in waits.items():
            oldest.add_metric((queue,), seconds)
        yield oldest

        # The GPUs that the gangs of each queue and tenant hold, and how many they may hold.
        limited = (
            {"queue": queues, "tenant": tenants} if tenant is None else {"tenant": {tenant: tenants.get(tenant, {})}}
        )
        for what, limits in limited.items():
            allocated: dict[str, float] = defaultdict(float, dict.fromkeys(limits, 0.0))
            for seen in jobs:
                allocated[getattr(seen.job, what)] += seen.job.allocated.get("GPU", 0)
            holding = family(f"boost_{what}_gpus_held", f"GPUs that the gangs of each {what} hold.", (what,))
            for name, gpus in allocated.items():
                holding.add_metric((name,), gpus)
            yield holding
            limit_help = f"GPUs that the gangs of each {what} may hold, if limited."
            limit = family(f"boost_{what}_gpus_limit", limit_help, (what,))
            for name, amounts in limits.items():
                if "GPU" in amounts:
                    limit.add_metric((name,), amounts["GPU"])
            yield limit


@dataclass(frozen=True, eq=False)
class ServiceCollector(Collector):
    """Collects what an operator may see.

    Attributes:
        store: The record.
        quotas: Queues, tenants and their limits.
        process: This process's own metrics.
    """

    store: JobStore
    quotas: QuotaStore
    process: ProcessMetrics

    def collect(self) -> Iterator[Metric]:
        """Yield the present metrics."""
        yield from TenantCollector(self.store, self.quotas).collect()

        # The cluster, as the scheduler last saw it; nothing before that.
        seen_at = family("boost_cluster_seen_timestamp_seconds", "When the scheduler last saw the cluster.")
        alive = family("boost_cluster_nodes", "Nodes that stay, and nodes about to leave.", ("condition",))
        resources = family(
            "boost_cluster_resources", "Resources of all nodes, and the unused part.", ("resource", "condition")
        )
        if (snapshot := self.store.snapshot(NODES)) is not None:
            time, nodes = snapshot
            seen_at.add_metric((), time.timestamp())
            draining = sum(node["draining"] for node in nodes)
            alive.add_metric(("alive",), len(nodes) - draining)
            alive.add_metric(("draining",), draining)
            for resource in _RESOURCES:
                for condition in ("total", "free"):
                    amount = sum(node[condition].get(resource, 0) for node in nodes)
                    resources.add_metric((resource, condition), amount)
        yield from (seen_at, alive, resources)

        yield from self.process.collect()


def targets(jobs: Iterable[JobRecord]) -> list[TargetGroup]:
    """Return the ranks of RUNNING jobs that serve metrics, for service discovery."""
    groups: list[TargetGroup] = []
    for job in jobs:
        if job.state is not JobState.RUNNING or job.shape is None:
            continue
        layout = job.present_layout
        for rank, endpoint in enumerate(job.shape.metrics_endpoints):
            if endpoint is not None:
                at = layout.coordinates(rank)
                labels = TargetLabels(
                    job_id=job.id, job_name=job.name, tenant=job.tenant, rank=str(rank),
                    tensor_parallel_rank=str(at.tp), pipeline_parallel_rank=str(at.pp),
                    data_parallel_rank=str(at.dp), context_parallel_rank=str(at.cp), node=job.shape.nodes[rank],
                )  # fmt: skip
                groups.append(TargetGroup(targets=[endpoint], labels=labels))
    return groups
