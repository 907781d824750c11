"""Which gangs grow."""

from collections.abc import Iterable, Sequence

from boost_core.config import Shape
from boost_core.config.reports import Cause
from boost_core.plan.resize import fastest
from boost_core.plan.throughput import step_seconds
from service.jobs.model import JobRecord
from service.jobs.states import JobState
from service.scheduler.actions import Gang, ResizePolicy, RoomSeen
from service.scheduler.placement import Nodes
from service.scheduler.scene import Scene


def grow(scene: Scene, wanted: Iterable[Nodes]) -> None:
    """Let gangs grow into what is left, the first in the queue first.

    Args:
        scene: What there is.
        wanted: Sets of nodes on which a job waits for room; gangs that can use these do not grow.
    """
    taken = frozenset[str]().union(*wanted)
    for job in scene.queue:
        gang = scene.gangs.get(job.id)
        if gang and gang.shape and _may_grow(job, gang) and not scene.nodes(job) & taken:
            _grow(scene, job, gang, gang.shape)


def _may_grow(job: JobRecord, gang: Gang) -> bool:
    return job.spec.elasticity is not None and job.state is JobState.RUNNING and gang.shape == gang.target


def _grow(scene: Scene, job: JobRecord, gang: Gang, shape: Shape) -> None:
    larger = [other for other in scene.shapes(job) if other.world_size > shape.world_size]
    fitting = scene.fitting(job, scene.room, larger)
    choice = worthwhile(job, shape, fitting, scene.policy) if fitting else None
    if choice is None:
        return
    scene.room.place(job.spec, choice, shape)
    policy, seen = scene.policy, scene.room_seconds.get(job.id, 0.0)
    ripe = gang.unchanged_seconds >= policy.cooldown_seconds and seen >= policy.settle_seconds
    if not (ripe or gang.limits_changed):
        scene.room.hold(job.spec, choice.world_size - gang.held)
        scene.actions.append(RoomSeen(job))
        return
    cause = Cause.LIMITS_CHANGED if gang.limits_changed else Cause.NODE_JOINED
    scene.resize(job, choice, cause, f"grows from {shape} to {choice}")


def worthwhile(job: JobRecord, shape: Shape, larger: Sequence[Shape], policy: ResizePolicy) -> Shape | None:
    """The best of some shapes for a gang to grow to; ``None`` if none gains enough.

    Args:
        job: The gang's.
        shape: That it has.
        larger: Those that fit.
        policy: What is enough.
    """
    spec = job.spec
    stay = fastest(spec, [shape, *(other for other in larger if other.layout == shape.layout)]) or shape
    if not gains(job, shape, stay, policy.minimum_gain):
        stay = shape
    other = fastest(spec, larger)
    if other and other.layout != shape.layout and gains(job, stay, other, policy.layout_gain):
        return other
    return stay if stay != shape else None


def gains(job: JobRecord, old: Shape, new: Shape, share: float) -> bool:
    """Whether a shape's throughput is predicted to be higher than another's by a share at least."""
    return step_seconds(job.spec, old) >= (1 + share) * step_seconds(job.spec, new)
