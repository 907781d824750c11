"""Decides which gangs grow."""

from collections.abc import Iterable, Sequence
from functools import reduce
from operator import or_

from boost_core.config import Layout
from boost_core.messages import Cause
from service.jobs.model import JobRecord
from service.jobs.states import JobState
from service.scheduler.actions import CapacityObserved, Gang, ResizePolicy
from service.scheduler.cluster_snapshot import ClusterSnapshot
from service.scheduler.demand import Demand
from service.scheduler.placement import Nodes


def grow(cluster: ClusterSnapshot, wanted: Iterable[Nodes]) -> None:
    """Let gangs grow into the room left, in queue order, but not into a quota that a job waits for.

    Args:
        cluster: The cluster snapshot.
        wanted: Sets of nodes on which jobs wait for room; gangs that can use these do not grow.
    """
    taken = reduce(or_, wanted, 0)
    for job in cluster.queue:
        gang = cluster.gangs.get(job.id)
        if (
            gang
            and gang.layout
            and _may_grow(job, gang)
            and not (cluster.nodes(job) & taken or _quota_wanted(cluster, job))
        ):
            _grow(cluster, job, gang, gang.layout)


def _quota_wanted(cluster: ClusterSnapshot, job: JobRecord) -> bool:
    return any(account in cluster.quotas.heads for account in cluster.quotas.accounts(job))


def _may_grow(job: JobRecord, gang: Gang) -> bool:
    has_steps_to_do = job.progress is None or job.progress.step < job.progress.steps
    trains = job.state is JobState.RUNNING and has_steps_to_do
    return job.spec.elasticity is not None and trains and gang.layout == gang.target


def _grow(cluster: ClusterSnapshot, job: JobRecord, gang: Gang, layout: Layout) -> None:
    larger = [other for other in cluster.demand(job).layouts if other.world_size > layout.world_size]
    fitting = cluster.fitting(job, cluster.room, larger)
    demand = cluster.demand(job)
    choice = scale_up_choice(demand, layout, fitting, cluster.policy) if fitting else None
    if choice is None:
        return
    policy, seen = cluster.policy, cluster.room_seconds.get(job.id, 0.0)
    ripe = gang.unchanged_seconds >= policy.cooldown_seconds and seen >= policy.settle_seconds
    if not (ripe or gang.limits_changed):
        cluster.room.place(demand, choice, layout)
        cluster.keep(job, choice.world_size - gang.held)
        cluster.actions.append(CapacityObserved(job))
        return
    part = cluster.room.nearest(demand, choice, layout, job.shape.nodes if job.shape else ())
    cluster.room.place(demand, choice, layout, part)
    cause = Cause.LIMITS_CHANGED if gang.limits_changed else Cause.NODE_JOINED
    cluster.resize(job, choice, cause, f"grows from {layout} to {choice}", part.labels)


def scale_up_choice(demand: Demand, layout: Layout, larger: Sequence[Layout], policy: ResizePolicy) -> Layout | None:
    """The best layout for a gang to grow to; ``None`` if none gains enough.

    Args:
        demand: The job's demand.
        layout: The gang's layout.
        larger: Larger layouts that fit.
        policy: How much gain is enough.
    """
    stay = demand.fastest([layout, *(other for other in larger if other.per_replica == layout.per_replica)]) or layout
    if not _gains(demand, layout, stay, policy.minimum_gain):
        stay = layout
    other = demand.fastest(larger)
    if other and other.per_replica != layout.per_replica and _gains(demand, stay, other, policy.layout_gain):
        return other
    return stay if stay != layout else None


def _gains(demand: Demand, old: Layout, new: Layout, share: float) -> bool:
    """Whether a layout's predicted throughput exceeds another's by at least a share."""
    return demand.seconds(old) >= (1 + share) * demand.seconds(new)
