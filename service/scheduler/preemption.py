"""Whose room a job of higher priority gets."""

from collections import defaultdict
from collections.abc import Mapping

from boost_core.config import Shape
from boost_core.config.reports import Cause
from boost_core.plan import resize
from boost_core.plan.throughput import step_seconds
from service.gang.resources import worker_resources
from service.jobs.model import JobRecord
from service.scheduler.actions import RoomSeen
from service.scheduler.scene import Scene

Plan = dict[str, Shape | None]  # the target of each gang that may have to make room; None to pause

_ROUNDING = 1e-6


def make_room(scene: Scene, job: JobRecord) -> None:
    """Shrink gangs of lower priority as far as a job that does not fit needs it, and pause some if that is too little.

    The last in the queue come first. Nobody is disturbed where it would be to no avail, or while others are still about
    to make room. Where gangs are is not known: should there be room in all and the job still not fit for a while, it
    lies scattered, and one more gang becomes as small as it can, or pauses.
    """
    victims = {other.id: other for other in scene.lower(job)}
    if not victims:
        return
    needed = next(shape for shape in scene.shapes(job) if scene.whole.fits(job.spec, shape)).world_size
    plan: Plan = {}
    if (missing := needed - _expected_ranks(scene, job)) > 0:
        plan = _plan(scene, victims, _resources(job, missing))
    elif not scene.leaving(job):
        scene.actions.append(RoomSeen(job))
        if scene.room_seconds.get(job.id, 0) >= scene.policy.settle_seconds:
            missing = needed - sum(scene.room.slots(job.spec))  # others than our gangs may hold some
            plan = _plan(scene, victims, _resources(job, missing)) if missing > 0 else _one_more(scene, victims)
    _carry_out(scene, job, victims, plan)


def _expected_ranks(scene: Scene, job: JobRecord) -> int:
    """How many of a job's ranks the sums will leave room for when all gangs have done as ordered."""
    expected = scene.room.copy()
    for other in scene.leaving(job):
        expected.hold(other.spec, scene.gangs[other.id].kept - scene.gangs[other.id].held)
    return expected.ranks(job.spec)


def _resources(job: JobRecord, ranks: int) -> dict[str, float]:
    return {name: amount * ranks for name, amount in worker_resources(job.spec).items()}


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


def _covers(scene: Scene, victims: dict[str, JobRecord], plan: Plan, lacking: Mapping[str, float]) -> bool:
    freed: dict[str, float] = defaultdict(float)
    for job_id, shape in plan.items():
        ranks = scene.gangs[job_id].kept - (shape.world_size if shape else 0)
        for name, amount in _resources(victims[job_id], ranks).items():
            freed[name] += amount
    return all(freed[name] + _ROUNDING >= amount for name, amount in lacking.items())


def _smaller(scene: Scene, job: JobRecord) -> list[Shape]:
    """Smaller shapes that a gang can take where it is, the largest first."""
    gang, placement = scene.gangs[job.id], job.spec.resources.placement
    own = resize.own_slots(gang.shape, placement) if gang.shape else []
    shapes = [
        shape
        for shape in scene.shapes(job)
        if shape.world_size < gang.kept and resize.fits(shape, own, placement)
    ]  # fmt: skip
    return sorted(shapes, key=lambda shape: (-shape.world_size, step_seconds(job.spec, shape)))


def _carry_out(scene: Scene, job: JobRecord, victims: dict[str, JobRecord], plan: Plan) -> None:
    reason = f"to make room for {job.id}, which has priority {job.spec.priority}"
    for job_id, shape in plan.items():
        present = scene.gangs[job_id].target
        if shape is None:
            scene.pause(victims[job_id], f"pauses {reason}")
        elif shape != present:
            message = f"shrinks from {present} to {shape} {reason}"
            scene.resize(victims[job_id], shape, Cause.ROOM_NEEDED, message)
