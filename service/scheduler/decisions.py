"""Decides what to do about jobs and gangs. Pure: records, gangs and capacities in, actions out.

Higher priorities come first, then jobs that have been in the queue for longer. A job starts at the best of its layouts
that fit now, on nodes and in quotas. A job that waits for others to make room blocks those behind it from anything that
could delay it, so that it cannot starve (``backfill``; ``quotas``); one that is too large for the whole cluster or its
whole quota does not. A gang that has lost its workers waits among them. Gangs grow into room that no job waits for.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from boost_core.config import Layout
from boost_core.messages import Cause
from service.gang.resources import gang_in_words
from service.gang.status import NodeCapacity
from service.jobs.model import JobRecord
from service.jobs.states import WAITING_STATES
from service.scheduler import messages
from service.scheduler.actions import Action, Gang, ResizePolicy
from service.scheduler.backfill import Head
from service.scheduler.cluster_snapshot import ClusterSnapshot
from service.scheduler.growth import grow
from service.scheduler.preemption import make_room, make_room_in_quota
from service.scheduler.quotas import Account, Limits
from service.scheduler.upkeep import keep_up

_NONE: Mapping[str, float] = MappingProxyType({})


def decide(
    jobs: Sequence[JobRecord], nodes: Sequence[NodeCapacity], gangs: Mapping[str, Gang] = MappingProxyType({}),
    room_seconds: Mapping[str, float] = _NONE, policy: ResizePolicy | None = None, limits: Limits | None = None,
    topology: Sequence[str] = (),
) -> list[Action]:  # fmt: skip
    """Decide what to do now.

    Args:
        jobs: All active jobs.
        nodes: Total and free resources of the alive nodes.
        gangs: The gangs by job; a missing one is assumed to be starting.
        room_seconds: By job, for how long each pass has yielded ``CapacityObserved`` for it.
        policy: When gangs may grow.
        limits: Quotas of tenants and queues.
        topology: Node labels that indicate proximity, outermost first: gangs start and grow within one value of the
            innermost label that has room for all of them.
    """
    cluster = ClusterSnapshot(jobs, nodes, gangs, room_seconds, policy or ResizePolicy(), limits or Limits(), topology)
    keep_up(cluster)
    heads = _serve_queue(cluster)
    grow(cluster, [head.nodes for head in heads])
    return cluster.actions


def _serve_queue(cluster: ClusterSnapshot) -> list[Head]:
    """Start the jobs that may start. Returns those that wait for room on nodes and block the jobs behind them."""
    heads: list[Head] = []
    for job in cluster.queue:
        gang = cluster.gangs.get(job.id)
        before = [head for head in heads if head.nodes & cluster.nodes(job)]
        if gang:
            served = not gang.waiting or bool(before) or _revive(cluster, job, gang)
        else:
            served = not _is_queued(job) or _serve(cluster, job, before)
        if not served:
            heads.append(Head(cluster, job))
    return heads


def _is_queued(job: JobRecord) -> bool:
    return job.state in WAITING_STATES and not job.has_gang and not job.pause_requested


def _serve(cluster: ClusterSnapshot, job: JobRecord, before: Sequence[Head]) -> bool:
    """Start a job's gang, or explain what it waits for.

    Args:
        cluster: The cluster snapshot.
        job: The job.
        before: Jobs ahead that wait for nodes that it could use.

    Returns:
        False if it waits for nodes that must be kept from the jobs behind it.
    """
    possible = cluster.possible(job)
    if not possible:
        cluster.admit(job)
        cluster.wait(job, messages.never_fits(cluster, job))
        return True
    least = possible[0].world_size
    if account := cluster.quotas.too_small(job, least):
        cluster.admit(job)
        cluster.wait(job, messages.over_quota(cluster, job, least, account))
        return True
    if account := cluster.quotas.obstacle(job, least):
        _wait_for_quota(cluster, job, least, account)
        return True
    return _serve_on_nodes(cluster, job, possible, before)


def _wait_for_quota(cluster: ClusterSnapshot, job: JobRecord, least: int, account: Account) -> None:
    first = account not in cluster.quotas.heads
    if first:
        cluster.admit(job)
        make_room_in_quota(cluster, job, least, account)
    cluster.wait(job, messages.short_of_quota(cluster, job, least, account))
    cluster.lines[account] += 1
    if first:
        cluster.quotas.heads[account] = job
        cluster.quotas.keep(job, least, until=account)


def _serve_on_nodes(
    cluster: ClusterSnapshot, job: JobRecord, possible: Sequence[Layout], before: Sequence[Head]
) -> bool:
    fitting = cluster.fitting(job, cluster.room, possible)
    harmless = [layout for layout in fitting if not any(head.delayed_by(job, layout) for head in before)]
    if choice := cluster.demand(job).fastest(harmless):
        cluster.admit(job)
        words = gang_in_words(choice.world_size, cluster.demand(job).each)
        cluster.launch(job, choice, f"starting {choice}: {words}")
        return True
    if before:
        cluster.wait(job, messages.held_back(cluster, job, before[0].job, bool(fitting)))
    else:
        cluster.admit(job)
        make_room(cluster, job)
        cluster.wait(job, messages.no_room(cluster, job))
        cluster.quotas.keep(job, possible[0].world_size)
    cluster.lines[cluster.nodes(job)] += 1
    return bool(before)


def _revive(cluster: ClusterSnapshot, job: JobRecord, gang: Gang) -> bool:
    """Keep room for a gang that waits for workers, which it finds by itself; False if it waits for others' room."""
    if gang.target is None or not cluster.possible(job):
        return True
    demand = cluster.demand(job)
    choice = demand.fastest(cluster.fitting(job, cluster.room))
    if choice is None:
        if gang.unchanged_seconds >= cluster.policy.settle_seconds:  # its own old room may be about to be freed
            make_room(cluster, job)
        return False
    held, faster = choice, demand.seconds(choice) < demand.seconds(gang.target)
    if gang.target.world_size <= cluster.room.ranks(demand) and not faster:
        held = gang.target
    elif choice != gang.target:
        cause = Cause.NODE_JOINED if faster else Cause.NODE_LOST
        cluster.resize(job, choice, cause, f"there is room for {choice}, not for {gang.target}")
    cluster.room.place(demand, choice)
    cluster.room.hold(demand, held.world_size)
    return True
