"""Whose room a job of higher priority gets."""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from boost_core.config import Shape
from boost_core.config.reports import Cause
from boost_core.plan import resize
from service.jobs.model import JobRecord
from service.scheduler.actions import RoomSeen
from service.scheduler.placement import ROUNDING
from service.scheduler.quotas import Account
from service.scheduler.scene import Scene

Plan = dict[str, Shape | None]  # the target of each gang that may have to make room; None to pause


def make_room(scene: Scene, job: JobRecord) -> None:
    """Shrink gangs of lower priority as far as a job that does not fit needs it, and pause some if that is too little.

    The last in the queue come first. Nobody is disturbed where it would be to no avail, or while others are still about
    to make room. Where gangs are is not known: should there be room in all and the job still not fit for a while, it
    lies scattered, and one more gang becomes as small as it can, or pauses.
    """
    nodes, demand = scene.nodes(job), scene.demand(job)
    victims = {other.id: other for other in scene.lower(job) if scene.nodes(other) & nodes}
    if not victims:
        return
    needed = scene.possible(job)[0].world_size
    leaving = [other for other in scene.leaving() if scene.nodes(other) & nodes]
    plan: Plan = {}
    if (missing := needed - _expected_ranks(scene, job, leaving)) > 0:
        plan = _plan(scene, victims, demand.amounts(missing))
    elif not leaving:
        scene.actions.append(RoomSeen(job))
        if scene.room_seconds.get(job.id, 0) >= scene.policy.settle_seconds:
            missing = needed - sum(scene.room.slots(demand))  # others than our gangs may hold some
            plan = _plan(scene, victims, demand.amounts(missing)) if missing > 0 else _one_more(scene, victims)
    _carry_out(scene, job, victims, plan)


def make_room_in_quota(scene: Scene, job: JobRecord, ranks: int, account: Account) -> None:
    """The same within a quota: only those make room that draw on it.

    Args:
        scene: What there is.
        job: The one that needs room.
        ranks: How many it needs.
        account: Where there is too little.
    """
    quotas = scene.quotas
    victims = {other.id: other for other in scene.lower(job) if account in quotas.accounts(other)}
    leaving = [other for other in scene.leaving() if account in quotas.accounts(other)]
    coming = sum(_freed(scene, other)[account.resource] for other in leaving)
    lacking = scene.demand(job).amounts(ranks)[account.resource] - quotas.left(account) - coming
    if victims and lacking > ROUNDING:
        _carry_out(scene, job, victims, _plan(scene, victims, {account.resource: lacking}))


def _expected_ranks(scene: Scene, job: JobRecord, leaving: Iterable[JobRecord]) -> int:
    """How many of a job's ranks the sums will leave room for when all gangs have done as ordered."""
    expected = scene.room.copy()
    for other in leaving:
        expected.hold(scene.demand(other), scene.gangs[other.id].kept - scene.gangs[other.id].held)
    return expected.ranks(scene.demand(job))


def _plan(scene: Scene, victims: dict[str, JobRecord], lacking: Mapping[str, float]) -> Plan:
    """Targets that free what is lacking; none if no targets do."""
    present: Plan = {job_id: scene.gangs[job_id].target for job_id in victims}
    smaller = {job_id: _smaller(scene, victim) for job_id, victim in victims.items()}
    plan = dict(present)
    for job_id, shapes in smaller.items():
        if shapes and not _covers(scene, victims, plan, lacking):
            plan[job_id] = shapes[-1]
    for job_id in victims:
        if not _covers(scene, victims, plan, lacking):
            plan[job_id] = None
    if not _covers(scene, victims, plan, lacking):
        return {}
    for job_id, shapes in reversed(smaller.items()):  # some need not shrink, or not as far
        options = [present[job_id], *shapes] if plan[job_id] else [None]
        plan[job_id] = next(shape for shape in options if _covers(scene, victims, {**plan, job_id: shape}, lacking))
    return plan


def _one_more(scene: Scene, victims: dict[str, JobRecord]) -> Plan:
    for job_id, victim in victims.items():
        if shapes := _smaller(scene, victim):
            return {job_id: shapes[-1]}
    return {next(iter(victims)): None}


def _freed(scene: Scene, job: JobRecord) -> dict[str, float]:
    """What a gang gives back when it has done as ordered."""
    gang = scene.gangs[job.id]
    return scene.demand(job).amounts(gang.claimed - gang.kept)


def _covers(scene: Scene, victims: dict[str, JobRecord], plan: Plan, lacking: Mapping[str, float]) -> bool:
    freed: dict[str, float] = defaultdict(float)
    for job_id, shape in plan.items():
        ranks = scene.gangs[job_id].kept - (shape.world_size if shape else 0)
        for name, amount in scene.demand(victims[job_id]).amounts(ranks).items():
            freed[name] += amount
    return all(freed[name] + ROUNDING >= amount for name, amount in lacking.items())


def _smaller(scene: Scene, job: JobRecord) -> list[Shape]:
    """Smaller shapes that a gang can take where it is, the largest first."""
    gang, demand = scene.gangs[job.id], scene.demand(job)
    own = resize.own_slots(gang.shape, demand.placement) if gang.shape else []
    shapes = [
        shape
        for shape in demand.shapes
        if shape.world_size < gang.kept and resize.fits(shape, own, demand.placement)
    ]  # fmt: skip
    return sorted(shapes, key=lambda shape: (-shape.world_size, demand.seconds(shape)))


def _carry_out(scene: Scene, job: JobRecord, victims: dict[str, JobRecord], plan: Plan) -> None:
    reason = f"to make room for {job.id}, which has priority {job.spec.priority}"
    for job_id, shape in plan.items():
        present = scene.gangs[job_id].target
        if shape is None:
            scene.pause(victims[job_id], f"pauses {reason}")
        elif shape != present:
            message = f"shrinks from {present} to {shape} {reason}"
            scene.resize(victims[job_id], shape, Cause.ROOM_NEEDED, message)
