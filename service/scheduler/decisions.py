"""Decides what to do about jobs and gangs. Pure: records, gangs and capacities in, actions out.

Higher priorities come first, then jobs that have been in the queue for longer. A job starts at the best of its layouts
that fit now, on nodes and in quotas. A job that waits for others to make room blocks those behind it from anything that
could delay it, so that it cannot starve (``backfill``; ``Quotas``); one that is too large for the whole cluster or its
whole quota does not. A gang that has lost its workers waits among them. Gangs grow into room that no job waits for.
"""

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from heapq import heapify, heappop, heappush
from math import inf
from operator import or_
from types import MappingProxyType
from typing import Any

from boost_core.config import Layout
from boost_core.messages import Cause
from boost_core.plan import resolve
from service.gang.assignment import gang_in_words
from service.gang.status import NodeCapacity
from service.jobs.model import JobRecord
from service.jobs.states import JobState
from service.scheduler import messages
from service.scheduler.backfill import Head
from service.scheduler.cluster_snapshot import (
    ORDER,
    Action,
    CapacityObserved,
    ClusterSnapshot,
    Entry,
    Explain,
    Gang,
    GangClass,
    JobClass,
    ResizePolicy,
    SchedulerMemory,
    Wait,
)
from service.scheduler.demand import Demand
from service.scheduler.placement import ROUNDING, Nodes
from service.scheduler.quotas import Limits

_NONE: Mapping[str, float] = MappingProxyType({})

Plan = dict[str, Layout | None]  # the target of each gang that may have to make room; None to pause


def decide(
    jobs: Sequence[JobRecord], nodes: Sequence[NodeCapacity], gangs: Mapping[str, Gang] = MappingProxyType({}),
    room_seconds: Mapping[str, float] = _NONE, policy: ResizePolicy | None = None, limits: Limits | None = None,
    topology: Sequence[str] = (), memory: SchedulerMemory | None = None,
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
        memory: Kept from pass to pass, it saves what has not changed from being worked out again.
    """
    policy, limits, memory = policy or ResizePolicy(), limits or Limits(), memory or SchedulerMemory()
    cluster = ClusterSnapshot(jobs, nodes, gangs, room_seconds, policy, limits, topology, memory)
    keep_up(cluster)
    heads: list[Head] = []  # jobs that wait for room on nodes and block the jobs behind them
    # The answer for all jobs of a class, valid until something changes it; and from which place in its class on queued
    # jobs get it.
    answers: dict[JobClass, Explain] = {}
    told: dict[JobClass, int] = {}
    # Each in its turn: gangs that wait for workers, jobs that have left the queue, and of each class in it the next
    # one to be asked about, with its place there.
    first_queued = [group.queued[0] for group in memory.classes.values() if group.queued]
    turns = [(entry.order, entry, 0) for entry in (*cluster.seeking, *memory.admitted, *first_queued)]
    heapify(turns)

    def forget_answers(order: tuple[Any, ...]) -> None:
        """End what holds for whole classes, before a place in the queue."""
        for group, first in told.items():
            last = bisect_left(group.queued, order, first, key=ORDER)
            answers[group].entries.extend(group.queued[first:last])
            if last < len(group.queued):
                heappush(turns, (group.queued[last].order, group.queued[last], last))
        told.clear()
        answers.clear()

    actions = cluster.actions
    late: list[tuple[int, Entry, Explain]] = []  # written once the jobs ahead are known
    while turns:
        order, entry, place = heappop(turns)
        job, group, queued = entry.job, entry.group, entry.job.state is JobState.QUEUED
        if job.has_gang:
            if not any(head.nodes & cluster.nodes(job) for head in heads):
                forget_answers(order)
                if not _revive(cluster, job, cluster.gangs[job.id]):
                    heads.append(Head(cluster, job))
            continue
        answer = answers.get(group)
        if answer is None:
            lines = len(cluster.lines)
            answer = _serve(cluster, entry, heads)
            if answer is None or len(cluster.lines) > lines:
                forget_answers(order)
            if answer is not None:
                answers[group] = answer
        if answer is not None:
            waiting = [entry]
            if queued and not answer.admits:
                told[group], waiting = place, answer.entries
                actions.append(answer)
            else:
                cluster.admit(job)
                late.append((len(actions), entry, answer))
                actions.append(Wait(job, answer.message))
            if answer.line:
                answer.line.parts.append(waiting)
        # A class that has been told is not asked again until that is forgotten.
        if queued and group not in told and place + 1 < len(group.queued):
            heappush(turns, (group.queued[place + 1].order, group.queued[place + 1], place + 1))
    forget_answers((inf,))
    for number, entry, answer in late:
        actions[number] = Wait(entry.job, answer.to(entry))
    grow(cluster, [head.nodes for head in heads])
    return actions


def keep_up(cluster: ClusterSnapshot) -> None:
    """Replace targets that cannot be kept, the last in the queue first: limits have changed, or nodes are gone.

    A gang that has lost workers keeps its target, to return to it, while there are nodes for it. Of several gangs that
    each have too few workers and wait for those of the others, one pauses.
    """
    settled = set[GangClass]()  # that have what they are to have, and can stay as they are
    for job in reversed(cluster.queue):
        like = cluster.likes[job.id]
        if like in settled:
            continue
        gang = cluster.gangs[job.id]
        if gang.target is None:
            continue
        demand, layout, target = cluster.demands[job.id], gang.layout, gang.target
        if layout == target and target in cluster.possible(demand) and job.id not in cluster.moved:
            if like.arrived:
                settled.add(like)
            continue
        same = (other for other in demand.layouts if other.per_replica == target.per_replica)  # for one of the branches
        if target not in demand.layouts:  # it continues as it is until a layout fits that is allowed now
            if choice := demand.fastest(cluster.fitting(job, cluster.whole if gang.waiting else cluster.room)):
                cluster.resize(job, choice, Cause.LIMITS_CHANGED, f"{target} is no longer a layout that the job allows")
        elif job.id in cluster.moved or not cluster.whole.fits(demand, target):
            # It changes its number of replicas by itself, so that is tried first.
            fitting = cluster.fitting(job, cluster.whole, same) or cluster.fitting(job, cluster.whole)
            if choice := demand.fastest(fitting):
                cluster.resize(job, choice, cluster.gone, f"the remaining nodes have no room for {target}")
        elif layout and layout.world_size < target.world_size:
            # Lowered by as much as all targets together exceed the nodes, and to the present layout if the room that
            # is free now has not been enough for a while.
            smaller = [other for other in same if layout.world_size <= other.world_size < target.world_size]
            over = -cluster.room.ranks(demand)
            late = gang.unchanged_seconds >= cluster.policy.patience_seconds
            if late and not cluster.fitting(job, cluster.room, [target]):
                over = target.world_size - layout.world_size
            if over > 0 and smaller:
                enough = [other for other in smaller if target.world_size - other.world_size >= over]
                why = f"the remaining nodes have no room for {target} next to other jobs"
                cluster.resize(job, enough[-1] if enough else smaller[0], cluster.gone, why)

    stuck: list[JobRecord] = []
    for job in cluster.queue:
        gang = cluster.gangs[job.id]
        # One that has not trained yet holds what it has just as well.
        if gang.target and gang.stalled_seconds >= cluster.policy.patience_seconds:
            first = next((other for other in stuck if cluster.nodes(other) & cluster.nodes(job)), None)
            if first and cluster.room.ranks(cluster.demands[job.id]) < 0:
                why = f"because {first.name} ({first.id}), which comes before it, needs its workers"
                message = f"pauses because {first.id}, which comes before it, needs its workers"
                cluster.pause(job, message, why if first.tenant == job.tenant else messages.GAVE_WAY)
                return
            stuck.append(job)


def _serve(cluster: ClusterSnapshot, entry: Entry, heads: list[Head]) -> Explain | None:
    """Start a job's gang, or explain what it waits for.

    Args:
        cluster: The cluster snapshot.
        entry: The job's entry.
        heads: Jobs ahead that wait for nodes that must be kept from those behind them; this one may become another.

    Returns:
        What holds for all jobs of its class until something else happens; ``None`` if this has changed something.
    """
    job = entry.job
    demand, quotas = cluster.alone(entry), cluster.quotas
    cluster.demands[job.id] = demand
    possible = cluster.possible(demand)
    if not possible:
        return Explain(messages.never_fits(cluster, job), admits=True)
    least = possible[0].world_size
    if account := quotas.too_small(job, least):
        return Explain(messages.short_of_quota(cluster, job, least, account), admits=True)
    # The first account where it has to wait: for room, or behind another job that does.
    accounts = quotas.accounts(job)
    short = (each for each in accounts if each in quotas.heads or quotas.left(each) < accounts[each] * least - ROUNDING)
    if account := next(short, None):
        line = cluster.lines[account]
        if account in quotas.heads:
            return Explain(messages.short_of_quota(cluster, job, least, account), [line], line)
        cluster.admit(job)
        # Only gangs that use the quota make room in it.
        resource = account.resource
        victims = {other.id: other for other in cluster.lower(job, waiting=True) if account in quotas.accounts(other)}
        lacking = demand.amounts(least)[resource] - quotas.left(account)
        coming = 0.0  # once all gangs have followed their orders
        for other in cluster.leaving():
            if account in quotas.accounts(other):
                gang = cluster.gangs[other.id]
                coming += cluster.demands[other.id].amounts(gang.claimed - gang.remaining)[resource]
        if victims and lacking - coming > ROUNDING:
            _carry_out(cluster, job, victims, _plan(cluster, victims, {resource: lacking - coming}))
        cluster.actions.append(Wait(job, messages.short_of_quota(cluster, job, least, account)))
        line.parts.append([entry])
        quotas.heads[account] = job
        quotas.keep(job, least, until=account)
        return None

    nodes = cluster.nodes(job)
    before = [head for head in heads if head.nodes & nodes]
    fitting = cluster.fitting(job, cluster.room, possible)
    harmless = [layout for layout in fitting if not any(head.delayed_by(job, layout) for head in before)]
    if choice := demand.fastest(harmless):
        cluster.admit(job)
        cluster.launch(job, choice, f"starting {choice}: {gang_in_words(choice.world_size, demand.each)}")
        return None
    line = cluster.lines[nodes]
    if before:
        ahead = [other for key, other in cluster.lines.items() if isinstance(key, int) and key & nodes]
        return Explain(messages.held_back(cluster, job, before[0].job, bool(fitting)), () if fitting else ahead, line)
    cluster.admit(job)
    preempt_for(cluster, job)
    cluster.actions.append(Wait(job, messages.no_room(cluster, job)))
    quotas.keep(job, least)
    line.parts.append([entry])
    heads.append(Head(cluster, job))
    return None


def _revive(cluster: ClusterSnapshot, job: JobRecord, gang: Gang) -> bool:
    """Keep room for a gang that waits for workers, which it finds by itself; False if it waits for others' room."""
    if gang.target is None or not cluster.possible(cluster.demands[job.id]):
        return True
    demand = cluster.demands[job.id]
    choice = demand.fastest(cluster.fitting(job, cluster.room))
    if choice is None:
        if gang.unchanged_seconds >= cluster.policy.settle_seconds:  # its own old room may be about to be freed
            preempt_for(cluster, job)
        return False
    reserved, faster = choice, demand.seconds(choice) < demand.seconds(gang.target)
    if gang.target.world_size <= cluster.room.ranks(demand) and not faster:
        reserved = gang.target
    elif choice != gang.target:
        cause = Cause.NODE_JOINED if faster else Cause.NODE_LOST
        cluster.resize(job, choice, cause, f"there is room for {choice}, not for {gang.target}")
    cluster.room.place(demand, choice)
    cluster.room.hold(demand, reserved.world_size)
    return True


# Which gangs make room for a job of higher priority.


def preempt_for(cluster: ClusterSnapshot, job: JobRecord) -> None:
    """Shrink gangs of lower priority as far as a job that does not fit needs, and pause some if that is not enough.

    The last in the queue come first. No gang is disturbed in vain, or while others are still about to make room. Where
    gangs are is not known: if there is enough room in total and the job still does not fit for a while, the room is
    fragmented, and one more gang becomes as small as possible, or pauses.
    """
    nodes, demand = cluster.nodes(job), cluster.demands[job.id]
    victims = {other.id: other for other in cluster.lower(job) if cluster.nodes(other) & nodes}
    if not victims:
        return
    needed = cluster.possible(cluster.demands[job.id])[0].world_size
    leaving = [other for other in cluster.leaving() if cluster.nodes(other) & nodes]
    expected = cluster.room.copy()  # once all gangs have followed their orders
    for other in leaving:
        expected.hold(cluster.demands[other.id], cluster.gangs[other.id].remaining - cluster.gangs[other.id].allocated)
    plan: Plan = {}
    if (missing := needed - expected.ranks(demand)) > 0:
        plan = _plan(cluster, victims, demand.amounts(missing))
    elif not leaving:
        cluster.actions.append(CapacityObserved(job))
        if cluster.room_seconds.get(job.id, 0) >= cluster.policy.settle_seconds:
            missing = needed - sum(cluster.room.slots(demand))  # others than our gangs may hold some
            if missing > 0:
                plan = _plan(cluster, victims, demand.amounts(missing))
            else:  # one more, smaller if any can be, or else paused
                smaller = {job_id: _smaller(cluster, victim) for job_id, victim in victims.items()}
                first = next((job_id for job_id, layouts in smaller.items() if layouts), next(iter(victims)))
                plan = {first: smaller[first][-1] if smaller[first] else None}
    _carry_out(cluster, job, victims, plan)


def _plan(cluster: ClusterSnapshot, victims: dict[str, JobRecord], lacking: Mapping[str, float]) -> Plan:
    """Targets that free what is lacking; empty if none do."""
    present: Plan = {job_id: cluster.gangs[job_id].target for job_id in victims}
    smaller = {job_id: _smaller(cluster, victim) for job_id, victim in victims.items()}
    plan, freed = dict(present), dict.fromkeys(lacking, 0.0)

    def order(job_id: str, layout: Layout | None) -> None:
        before, plan[job_id] = plan[job_id], layout
        ranks = (before.world_size if before else 0) - (layout.world_size if layout else 0)
        for name in freed:
            freed[name] += ranks * cluster.demands[job_id].each.get(name, 0)

    def covered() -> bool:
        return all(freed[name] + ROUNDING >= amount for name, amount in lacking.items())

    for job_id, layouts in smaller.items():
        if layouts and not covered():
            order(job_id, layouts[-1])
    for job_id in victims:
        if not covered():
            order(job_id, None)
    if not covered():
        return {}
    for job_id, layouts in reversed(smaller.items()):  # some need not shrink, or not as far
        for layout in [present[job_id], *layouts] if plan[job_id] else [None]:
            order(job_id, layout)
            if covered():
                break
    return plan


def _smaller(cluster: ClusterSnapshot, job: JobRecord) -> list[Layout]:
    """Smaller layouts that a gang can take in its place, largest first."""
    gang, demand = cluster.gangs[job.id], cluster.demands[job.id]
    own = resolve.own_slots(gang.layout, demand.placement) if gang.layout else []
    smaller = (layout for layout in demand.layouts if layout.world_size < gang.remaining)
    layouts = [layout for layout in smaller if resolve.fits(layout, own, demand.placement)]
    return sorted(layouts, key=lambda layout: (-layout.world_size, demand.seconds(layout)))


def _carry_out(cluster: ClusterSnapshot, job: JobRecord, victims: dict[str, JobRecord], plan: Plan) -> None:
    reason = f"to make room for {job.id}, which has priority {job.spec.priority}"
    for job_id, layout in plan.items():
        present = cluster.gangs[job_id].target
        if layout is None:
            why = "to make room for a job of higher priority"  # another tenant's is not named
            if victims[job_id].tenant == job.tenant:
                why = f"to make room for {job.name} ({job.id}), which has priority {job.spec.priority}"
            cluster.pause(victims[job_id], f"pauses {reason}", why)
        elif layout != present:
            cluster.resize(victims[job_id], layout, Cause.PREEMPTED, f"shrinks from {present} to {layout} {reason}")


# Which gangs grow.


def grow(cluster: ClusterSnapshot, waiting: Iterable[Nodes]) -> None:
    """Let gangs grow into the room left, in queue order, but not into a quota that a job waits for.

    Args:
        cluster: The cluster snapshot.
        waiting: Sets of nodes on which jobs wait for room; gangs that can use these do not grow.
    """
    reserved, policy, blocked = reduce(or_, waiting, 0), cluster.policy, dict[Demand, bool]()
    for job in cluster.queue:
        demand = cluster.demands[job.id]
        if demand not in blocked:
            blocked[demand] = bool(cluster.nodes(job) & reserved)
        if blocked[demand] or job.id in cluster.changing or job.spec.elasticity is None:
            continue
        gang = cluster.gangs[job.id]
        layout = gang.layout
        has_steps_to_do = job.progress is None or job.progress.step < job.progress.steps
        if layout is None or job.state is not JobState.RUNNING or not has_steps_to_do:
            continue
        if any(account in cluster.quotas.heads for account in cluster.quotas.accounts(job)):
            continue
        larger = [other for other in demand.layouts if other.world_size > layout.world_size]
        fitting = cluster.fitting(job, cluster.room, larger)
        if (choice := demand.fastest(fitting)) is None:
            continue
        # More replicas if they gain enough; another layout of each only if that gains much more.
        stay = demand.fastest([layout, *(other for other in fitting if other.per_replica == layout.per_replica)])
        if stay is None or demand.seconds(layout) < (1 + policy.minimum_gain) * demand.seconds(stay):
            stay = layout
        changes = choice.per_replica != layout.per_replica
        if not changes or demand.seconds(stay) < (1 + policy.layout_gain) * demand.seconds(choice):
            choice = stay
        if choice == layout:
            continue
        seen = cluster.room_seconds.get(job.id, 0.0)
        ripe = gang.unchanged_seconds >= policy.cooldown_seconds and seen >= policy.settle_seconds
        if not (ripe or gang.limits_changed):
            cluster.room.place(demand, choice, layout)
            cluster.room.hold(demand, choice.world_size - gang.allocated)
            cluster.quotas.take(job, choice.world_size - gang.allocated)
            cluster.actions.append(CapacityObserved(job))
            continue
        near = cluster.room.nearest(demand, choice, layout, job.shape.nodes if job.shape else ())
        cluster.room.place(demand, choice, layout, near)
        cause = Cause.LIMITS_CHANGED if gang.limits_changed else Cause.NODE_JOINED
        cluster.resize(job, choice, cause, f"grows from {layout} to {choice}", near)
