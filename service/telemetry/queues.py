"""The metrics of queues and tenants."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

from prometheus_client.metrics_core import Metric

from service.accounts.quotas import Limit
from service.jobs.model import JobRecord
from service.jobs.states import JobState
from service.telemetry.families import family
from service.telemetry.jobs import Seen

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
