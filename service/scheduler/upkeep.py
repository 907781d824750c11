"""Replaces targets that cannot be kept: a job's limits have changed, nodes are gone, or gangs block each other."""

from boost_core.config import Layout
from boost_core.messages.reports import Cause
from service.jobs.model import JobRecord
from service.scheduler import messages
from service.scheduler.actions import Gang
from service.scheduler.cluster_snapshot import ClusterSnapshot


def keep_up(cluster: ClusterSnapshot) -> None:
    """Give gangs whose target cannot be kept another one, the last in the queue first.

    A gang that has lost workers keeps its target, to return to it, while there are nodes for it.
    """
    for job in reversed(cluster.queue):
        gang = cluster.gangs.get(job.id)
        if gang is None or gang.target is None:
            continue
        if gang.target not in cluster.demand(job).layouts:
            _follow_limits(cluster, job, gang.target)
        elif job.id in cluster.moved or not cluster.whole.fits(cluster.demand(job), gang.target):
            _follow_nodes(cluster, job, gang.target)
        elif gang.layout and gang.layout.world_size < gang.target.world_size:
            _give_up(cluster, job, gang, gang.layout, gang.target)
    _break_deadlock(cluster)


def _follow_limits(cluster: ClusterSnapshot, job: JobRecord, target: Layout) -> None:
    """Resize a gang to a layout that is allowed now; it continues as it is until one fits."""
    waiting = cluster.gangs[job.id].waiting
    if choice := cluster.demand(job).fastest(cluster.fitting(job, cluster.whole if waiting else cluster.room)):
        cluster.resize(job, choice, Cause.LIMITS_CHANGED, f"{target} is no longer a layout that the job allows")


def _follow_nodes(cluster: ClusterSnapshot, job: JobRecord, target: Layout) -> None:
    """Resize a gang to the nodes left. It changes its number of replicas by itself, so that is tried first."""
    same = [layout for layout in cluster.demand(job).layouts if layout.per_replica == target.per_replica]
    choice = cluster.demand(job).fastest(
        cluster.fitting(job, cluster.whole, same) or cluster.fitting(job, cluster.whole)
    )
    if choice:
        cluster.resize(job, choice, cluster.gone, f"the remaining nodes have no room for {target}")


def _give_up(cluster: ClusterSnapshot, job: JobRecord, gang: Gang, layout: Layout, target: Layout) -> None:
    """Lower the target of a gang that has lost workers when it cannot be reached.

    The target is lowered by as much as all targets together exceed the nodes, and to the present layout if the room
    that is free now has not been enough for a while.
    """
    smaller = [
        other
        for other in cluster.demand(job).layouts
        if other.per_replica == target.per_replica and layout.world_size <= other.world_size < target.world_size
    ]
    over, late = -cluster.room.ranks(cluster.demand(job)), gang.unchanged_seconds >= cluster.policy.patience_seconds
    if late and not cluster.fitting(job, cluster.room, [target]):
        over = target.world_size - layout.world_size
    if over > 0 and smaller:
        enough = [other for other in smaller if target.world_size - other.world_size >= over]
        choice = enough[-1] if enough else smaller[0]
        cluster.resize(job, choice, cluster.gone, f"the remaining nodes have no room for {target} next to other jobs")


def _break_deadlock(cluster: ClusterSnapshot) -> None:
    """Pause one of several gangs that each have too few workers and wait for those of the others."""
    stuck: list[JobRecord] = []
    for job in cluster.queue:
        gang = cluster.gangs.get(job.id)
        if gang and gang.target and gang.layout and gang.stalled_seconds >= cluster.policy.patience_seconds:
            others = [other for other in stuck if cluster.nodes(other) & cluster.nodes(job)]
            if others and cluster.room.ranks(cluster.demand(job)) < 0:
                message = f"pauses because {others[0].id}, which comes before it, needs its workers"
                cluster.pause(job, message, messages.gave_way_to(job, others[0]))
                return
            stuck.append(job)
