"""Decides which gangs make room for a job of higher priority."""

from collections import defaultdict
from collections.abc import Mapping

from boost_core.config import Layout
from boost_core.messages import Cause
from boost_core.plan import resolve
from service.jobs.model import JobRecord
from service.scheduler import messages
from service.scheduler.actions import CapacityObserved
from service.scheduler.cluster_snapshot import ClusterSnapshot
from service.scheduler.placement import ROUNDING
from service.scheduler.quotas import Account

Plan = dict[str, Layout | None]  # the target of each gang that may have to make room; None to pause


def make_room(cluster: ClusterSnapshot, job: JobRecord) -> None:
    """Shrink gangs of lower priority as far as a job that does not fit needs, and pause some if that is not enough.

    The last in the queue come first. No gang is disturbed in vain, or while others are still about to make room. Where
    gangs are is not known: if there is enough room in total and the job still does not fit for a while, the room is
    fragmented, and one more gang becomes as small as possible, or pauses.
    """
    nodes, demand = cluster.nodes(job), cluster.demand(job)
    victims = {other.id: other for other in cluster.lower(job) if cluster.nodes(other) & nodes}
    if not victims:
        return
    needed = cluster.possible(job)[0].world_size
    leaving = [other for other in cluster.leaving() if cluster.nodes(other) & nodes]
    expected = cluster.room.copy()  # once all gangs have followed their orders
    for other in leaving:
        expected.hold(cluster.demand(other), cluster.gangs[other.id].kept - cluster.gangs[other.id].held)
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


def make_room_in_quota(cluster: ClusterSnapshot, job: JobRecord, ranks: int, account: Account) -> None:
    """The same within a quota: only gangs that use it make room.

    Args:
        cluster: The cluster snapshot.
        job: The job that needs room.
        ranks: Number of ranks it needs.
        account: The account with too little left.
    """
    quotas = cluster.quotas
    victims = {other.id: other for other in cluster.lower(job) if account in quotas.accounts(other)}
    leaving = [other for other in cluster.leaving() if account in quotas.accounts(other)]
    coming = 0.0  # once all gangs have followed their orders
    for other in leaving:
        gang = cluster.gangs[other.id]
        coming += cluster.demand(other).amounts(gang.claimed - gang.kept)[account.resource]
    lacking = cluster.demand(job).amounts(ranks)[account.resource] - quotas.left(account) - coming
    if victims and lacking > ROUNDING:
        _carry_out(cluster, job, victims, _plan(cluster, victims, {account.resource: lacking}))


def _plan(cluster: ClusterSnapshot, victims: dict[str, JobRecord], lacking: Mapping[str, float]) -> Plan:
    """Targets that free what is lacking; empty if none do."""
    present: Plan = {job_id: cluster.gangs[job_id].target for job_id in victims}
    smaller = {job_id: _smaller(cluster, victim) for job_id, victim in victims.items()}
    plan = dict(present)
    for job_id, layouts in smaller.items():
        if layouts and not _covers(cluster, victims, plan, lacking):
            plan[job_id] = layouts[-1]
    for job_id in victims:
        if not _covers(cluster, victims, plan, lacking):
            plan[job_id] = None
    if not _covers(cluster, victims, plan, lacking):
        return {}
    for job_id, layouts in reversed(smaller.items()):  # some need not shrink, or not as far
        options = [present[job_id], *layouts] if plan[job_id] else [None]
        plan[job_id] = next(
            layout for layout in options if _covers(cluster, victims, {**plan, job_id: layout}, lacking)
        )
    return plan


def _covers(cluster: ClusterSnapshot, victims: dict[str, JobRecord], plan: Plan, lacking: Mapping[str, float]) -> bool:
    freed: dict[str, float] = defaultdict(float)
    for job_id, layout in plan.items():
        ranks = cluster.gangs[job_id].kept - (layout.world_size if layout else 0)
        for name, amount in cluster.demand(victims[job_id]).amounts(ranks).items():
            freed[name] += amount
    return all(freed[name] + ROUNDING >= amount for name, amount in lacking.items())


def _smaller(cluster: ClusterSnapshot, job: JobRecord) -> list[Layout]:
    """Smaller layouts that a gang can take in its place, largest first."""
    gang, demand = cluster.gangs[job.id], cluster.demand(job)
    own = resolve.own_slots(gang.layout, demand.placement) if gang.layout else []
    layouts = [
        layout
        for layout in demand.layouts
        if layout.world_size < gang.kept and resolve.fits(layout, own, demand.placement)
    ]  # fmt: skip
    return sorted(layouts, key=lambda layout: (-layout.world_size, demand.seconds(layout)))


def _carry_out(cluster: ClusterSnapshot, job: JobRecord, victims: dict[str, JobRecord], plan: Plan) -> None:
    reason = f"to make room for {job.id}, which has priority {job.spec.priority}"
    for job_id, layout in plan.items():
        present = cluster.gangs[job_id].target
        if layout is None:
            why = messages.preempted_by(victims[job_id], job)
            cluster.pause(victims[job_id], f"pauses {reason}", why)
        elif layout != present:
            message = f"shrinks from {present} to {layout} {reason}"
            cluster.resize(victims[job_id], layout, Cause.PREEMPTED, message)
