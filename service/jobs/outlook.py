"""What the scheduler saw last: how current the record is, the nodes that suit a job, and CPUs that no job holds."""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import NamedTuple

from boost_core.config import JobSpec
from boost_core.plan.machine import required_labels
from service.jobs.model import NODES, JobRecord
from service.jobs.states import WAITING_STATES
from service.jobs.store import JobStore

STALE_SECONDS = 30.0  # since a gang was last seen; then its record counts as old


@dataclass(frozen=True)
class Outlook:
    """What one service knows of the scheduler, whichever service schedules.

    Attributes:
        problem: Why jobs are not being scheduled; ``None`` if they are.
        last_pass: When the newest good pass of the scheduler was; ``None`` if none is known.
        unseen: By job, gangs that good passes have not seen for ``STALE_SECONDS``, and when one last did, if known.
    """

    problem: str | None = None
    last_pass: datetime | None = None
    unseen: Mapping[str, datetime | None] = field(default_factory=dict)

    def of(self, job: JobRecord) -> JobRecord:
        """A job's record that says what of it may no longer be true, and why nothing happens; else the same one."""
        if self.problem is not None:
            seen, why = self.last_pass, self.problem
            if not job.has_gang and job.state in WAITING_STATES:
                return job.with_values({"waiting_for": f"nothing is scheduled at present: {self.problem}"})
        elif job.id in self.unseen:
            seen, why = self.unseen[job.id], "its gang does not answer the scheduler"
        else:
            return job
        if not job.has_gang:
            return job
        seen = seen or job.progress_at or job.waiting_since or job.queued_at
        if datetime.now(UTC) - seen < timedelta(seconds=STALE_SECONDS):
            return job
        return job.with_values({"last_seen": seen, "waiting_for": why})


class NodeSize(NamedTuple):
    """The size of the nodes that suit a job.

    Attributes:
        gpus: GPUs per node, for the node size that accounts for most GPUs.
        memory_bytes: Memory that Ray reserves for workers on the largest node; ``None`` if it is not to be checked.
    """

    gpus: int | None = None
    memory_bytes: int | None = None


def size_of_a_node(spec: JobSpec, store: JobStore, *, autoscaling: bool) -> NodeSize:
    """Return the size of the nodes that suit a job.

    Their memory is not checked if larger nodes may be added for the job, if a node may take fewer of its ranks than it
    has GPUs, or if nodes have different numbers of GPUs, as then there is no one number of ranks per node.

    Args:
        spec: The job.
        store: Where the nodes are kept.
        autoscaling: Whether nodes are added for waiting jobs.

    Returns:
        All ``None`` if the job uses no GPUs or no suitable node has been seen.
    """
    seen = store.snapshot(NODES) if spec.resources.gpus_per_worker else None
    suits = required_labels(spec.resources).items()
    usable = [node for node in seen[1] if not node["draining"] and not node.get("unusable")] if seen else []
    nodes = [node for node in usable if suits <= node["labels"].items()]
    totals = [node["total"] for node in nodes if node["total"].get("GPU", 0) >= 1]
    gpus = Counter[int]()
    for total in totals:
        gpus[int(total["GPU"])] += int(total["GPU"])
    if not gpus:
        return NodeSize()
    most = max(gpus, key=lambda size: (gpus[size], size))
    filled = all(total.get("CPU", 0) >= spec.resources.cpus_per_worker * int(total["GPU"]) for total in totals)
    known = all("memory" in total for total in totals)
    if autoscaling or not filled or not known or len(gpus) > 1 or spec.resources.placement == "SPREAD":
        return NodeSize(most)
    return NodeSize(most, int(max(total["memory"] for total in totals)))


def cpus_without_rank(
    node_id: str, total: Mapping[str, float], free: Mapping[str, float], jobs: Iterable[JobRecord]
) -> float:
    """CPUs of a node that are neither free nor held by ranks, as of tasks that build a dataset.

    Args:
        node_id: The node.
        total: Its resources, by Ray's names.
        free: Those that are free.
        jobs: The jobs that may have ranks on it; a gang that has not started yet is not told from other tasks.
    """
    gangs = ((job.spec.resources.cpus_per_worker, job.shape.nodes) for job in jobs if job.has_workers and job.shape)
    of_ranks = sum(cpus * nodes.count(node_id) for cpus, nodes in gangs)
    return max(0.0, total.get("CPU", 0.0) - free.get("CPU", 0.0) - of_ranks)
