"""All metrics of one scrape. Those of jobs, queues and the cluster are read from the record each time.

None of them is counted separately, so a restart loses nothing, and a job's series end with the job.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cache
from itertools import product
from operator import methodcaller

from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from service.accounts.tenants_and_queues import QuotaStore
from service.jobs.model import NODES, JobRecord
from service.jobs.states import JobState
from service.jobs.store import JobStore
from service.jobs.trackers import MOST_COUNTED_OF_EACH, TrackerStore
from service.models.cluster import TargetGroup, TargetLabels
from service.telemetry.jobs import LABELS, OF_ALL, OF_STARTED, Family, Row, Seen, families
from service.telemetry.process import ProcessMetrics

_END = "# EOF\n"  # of OpenMetrics
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})  # of a label's value as it is written
_QUEUE_STATES = (JobState.QUEUED, JobState.SCHEDULING, JobState.RUNNING)
FAILED_FOR = timedelta(hours=1)  # that a job's failure is shown
MOST_FAILED = 200  # shown at once, the newest
MOST_JOBS = 1000  # with metrics of their own: those with gangs first, then those that came first


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
        active, backlog = store.first_active(MOST_JOBS, tenant), store.backlog(tenant)
        labelled = [((job.id, job.name, job.tenant), Seen(job, now)) for job in active[:MOST_JOBS]]
        tenants, queues = quotas.limits()

        states = [((state,), count) for state, count in store.counts(tenant).items()]
        yield Family("boost_jobs", "Jobs in each state.", ("state",), states)
        recent = store.failed_since(now - FAILED_FOR, MOST_FAILED, tenant)
        ended = ((job, job.finished_at) for job in recent if job.finished_at is not None)
        failed = [((job.id, job.name, job.tenant, job.reason), at.timestamp()) for job, at in ended]
        of_failed = "When the job FAILED; for an hour."
        yield Family("boost_job_failed_timestamp_seconds", of_failed, (*LABELS, "reason"), failed)

        # Active jobs, as many as are shown.
        left_out = max(0, sum(each.jobs for each in backlog) - len(labelled))
        of_left_out = "Jobs that have not ended and whose own metrics are left out."
        yield Family("boost_jobs_left_out", of_left_out, rows=[((), left_out)])
        infos = [((*labels, job.queue, job.spec.model.family, job.state), 1) for labels, (job, _) in labelled]
        info_labels = (*LABELS, "queue", "family", "state")
        yield Family("boost_job_info", "A job that has not ended; always 1.", info_labels, infos)
        yield from families(OF_ALL, labelled)
        yield from families(OF_STARTED, [(labels, seen) for labels, seen in labelled if seen.job.attempt])

        # Trackers' progress with each active job.
        by_id = {seen.job.id: labels for labels, seen in labelled}
        behind, failures = list[Row](), list[Row]()
        for tracked, count in TrackerStore(store.engine).of_jobs(by_id):
            behind.append(((*by_id[tracked.job_id], tracked.kind), count))
            failures.append(((*by_id[tracked.job_id], tracked.kind), tracked.failures))
        unsent = f"Events not sent to the tracker yet; capped at {MOST_COUNTED_OF_EACH}."
        yield Family("boost_job_tracker_events_behind", unsent, (*LABELS, "tracker"), behind)
        of_failures = "Number of failed deliveries to the tracker."
        yield Family("boost_job_tracker_failures_total", of_failures, (*LABELS, "tracker"), failures)

        # The number of jobs in each queue, and how long they have waited.
        counts = Counter[tuple[str, JobState]]()
        waits: dict[str, float] = dict.fromkeys(queues, 0.0)
        for each in backlog:
            counts[each.queue, each.state] += each.jobs
            seconds = (now - each.since).total_seconds() if each.since else 0.0
            waits[each.queue] = max(waits.get(each.queue, 0.0), seconds)
        depths = [((queue, state), counts[queue, state]) for queue in queues for state in _QUEUE_STATES]
        yield Family("boost_queue_jobs", "Waiting and running jobs of each queue.", ("queue", "state"), depths)
        oldest = [((queue,), seconds) for queue, seconds in waits.items()]
        longest = "Waiting time of the job that has waited longest."
        yield Family("boost_queue_oldest_wait_seconds", longest, ("queue",), oldest)

        # The GPUs that the gangs of each queue and tenant hold, and how many they may hold.
        of_tenants = tenants if tenant is None else {tenant: tenants.get(tenant, {})}
        limited = {"queue": queues, "tenant": of_tenants} if tenant is None else {"tenant": of_tenants}
        for what, limits in limited.items():
            allocated: dict[str, float] = defaultdict(float, dict.fromkeys(limits, 0.0))
            for each in backlog:  # also of those that hold none
                allocated[getattr(each, what)] += 0
            for job in active:
                allocated[getattr(job, what)] += job.allocated.get("GPU", 0)
            held = [((name,), gpus) for name, gpus in allocated.items()]
            yield Family(f"boost_{what}_gpus_held", f"GPUs that the gangs of each {what} hold.", (what,), held)
            most = [((name,), amounts.get("GPU")) for name, amounts in limits.items()]
            limit_help = f"GPUs that the gangs of each {what} may hold, if limited."
            yield Family(f"boost_{what}_gpus_limit", limit_help, (what,), most)


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
        seen_at, alive, resources = list[Row](), list[Row](), list[Row]()
        if (snapshot := self.store.snapshot(NODES)) is not None:
            time, nodes = snapshot
            seen_at = [((), time.timestamp())]
            draining = sum(node["draining"] for node in nodes)
            alive = [(("alive",), len(nodes) - draining), (("draining",), draining)]
            for kind in product(("CPU", "GPU"), ("total", "free")):
                resources.append((kind, sum(node[kind[1]].get(kind[0], 0) for node in nodes)))
        yield Family("boost_cluster_seen_timestamp_seconds", "When the scheduler last saw the cluster.", (), seen_at)
        yield Family("boost_cluster_nodes", "Nodes that stay, and nodes about to leave.", ("condition",), alive)
        of_resources = "Resources of all nodes, and the unused part."
        yield Family("boost_cluster_resources", of_resources, ("resource", "condition"), resources)

        yield from self.process.collect()


def exposition(collector: Collector, accept: str) -> tuple[bytes, str]:
    """Metrics as text, and its media type.

    Most lines are those of gauges and counters of jobs. prometheus-client checks each name in each line again, which
    takes most of a scrape's time; so it writes only the headers of these, and all of the others.

    Args:
        collector: The metrics. Their names and labels are legal in every format.
        accept: What the client accepts, by HTTP's ``Accept``.
    """
    encode, media_type = choose_encoder(accept)
    renamed = media_type.endswith(("escaping=dots", "escaping=values"))  # even legal names
    # Many lines share a few values of labels and of metrics.
    parts, escaped, number = list[str](), cache(methodcaller("translate", _ESCAPES)), cache(floatToGoString)
    for metric in collector.collect():
        if renamed or not isinstance(metric, Family):
            parts.append(encode(_Only(metric)).decode().removesuffix(_END))
        else:
            metric.samples = []
            parts.append(encode(_Only(metric)).decode().removesuffix(_END))
            order = sorted(range(len(metric.labels)), key=metric.labels.__getitem__)
            words = ",".join(f'{metric.labels[index]}="%s"' for index in order)
            name = metric.name + ("_total" if metric.type == "counter" else "")
            line = f"{name}{{{words}}} %s\n" if order else f"{name} %s\n"
            for values, value in metric.rows:
                parts.append(line % (*[escaped(values[index]) for index in order], number(value)))
    if media_type.startswith("application/openmetrics-text"):
        parts.append(_END)
    return "".join(parts).encode(), media_type


@dataclass(frozen=True)
class _Only(Collector):
    metric: Metric

    def collect(self) -> Iterable[Metric]:
        return [self.metric]


def targets(jobs: Iterable[JobRecord]) -> list[TargetGroup]:
    """Return the ranks of RUNNING jobs that serve metrics, for service discovery; none of gangs without workers."""
    groups: list[TargetGroup] = []
    for job in jobs:
        if job.state is not JobState.RUNNING or not job.has_workers or job.shape is None:
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
