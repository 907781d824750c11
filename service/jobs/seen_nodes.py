"""What the nodes that the scheduler last saw say of jobs to come."""

from collections import Counter

from boost_core.config import JobSpec
from boost_core.plan.machine import required_labels
from service.jobs.model import NODES
from service.jobs.store import JobStore


def gpus_of_a_node(spec: JobSpec, store: JobStore) -> int | None:
    """Of the nodes that suit a job: as many as those have that most GPUs are in.

    Args:
        spec: The job.
        store: Where the nodes are kept.

    Returns:
        ``None`` if it takes no GPUs, or none of such nodes is seen.
    """
    seen = store.snapshot(NODES) if spec.resources.gpus_per_worker else None
    labels = required_labels(spec.resources).items()
    gpus = Counter[int]()
    for node in seen[1] if seen else ():
        if labels <= node["labels"].items() and not node["draining"]:
            gpus[int(node["total"].get("GPU", 0))] += int(node["total"].get("GPU", 0))
    return max(gpus, key=lambda size: (gpus[size], size), default=0) or None
