"""Targets that can no longer be: the job's limits have changed, nodes have gone, or gangs stand in each other's way."""

from boost_core.config import Shape
from boost_core.config.reports import Cause
from service.jobs.model import JobRecord
from service.scheduler.actions import Gang
from service.scheduler.scene import Scene


def keep_up(scene: Scene) -> None:
    """Give gangs whose target cannot be kept another one, the last in the queue first.

    A gang that has lost workers keeps its target, so as to come back to it, while there are nodes for it.
    """
    for job in reversed(scene.queue):
        gang = scene.gangs.get(job.id)
        if gang is None or gang.target is None:
            continue
        if gang.target not in scene.shapes(job):
            _follow_limits(scene, job, gang.target)
        elif job.id in scene.moved or not scene.whole.fits(scene.demand(job), gang.target):
            _follow_nodes(scene, job, gang.target)
        elif gang.shape and gang.shape.world_size < gang.target.world_size:
            _give_up(scene, job, gang, gang.shape, gang.target)
    _untangle(scene)


def _follow_limits(scene: Scene, job: JobRecord, target: Shape) -> None:
    """A gang goes on as it is until one of the shapes that are allowed now fits."""
    waiting = scene.gangs[job.id].waiting
    if choice := scene.demand(job).fastest(scene.fitting(job, scene.whole if waiting else scene.room)):
        scene.resize(job, choice, Cause.LIMITS_CHANGED, f"{target} is no longer among the shapes that the job allows")


def _follow_nodes(scene: Scene, job: JobRecord, target: Shape) -> None:
    """The gang does the same by itself within its layout, so that comes first."""
    same = [shape for shape in scene.shapes(job) if shape.layout == target.layout]
    choice = scene.demand(job).fastest(scene.fitting(job, scene.whole, same) or scene.fitting(job, scene.whole))
    if choice:
        scene.resize(job, choice, scene.gone, f"the nodes that are left have no room for {target}")


def _give_up(scene: Scene, job: JobRecord, gang: Gang, shape: Shape, target: Shape) -> None:
    """Lower the target of a gang that has lost workers when it is of no use.

    That is: as far as all targets together are more than the nodes have, and altogether when what is free now, such as
    it is, has not been enough for a while.
    """
    smaller = [
        other
        for other in scene.shapes(job)
        if other.layout == target.layout and shape.world_size <= other.world_size < target.world_size
    ]
    over, late = -scene.room.ranks(scene.demand(job)), gang.unchanged_seconds >= scene.policy.patience_seconds
    if late and not scene.fitting(job, scene.room, [target]):
        over = target.world_size - shape.world_size
    if over > 0 and smaller:
        enough = [other for other in smaller if target.world_size - other.world_size >= over]
        choice = enough[-1] if enough else smaller[0]
        scene.resize(job, choice, scene.gone, f"the nodes that are left have no room for {target} beside others")


def _untangle(scene: Scene) -> None:
    """Have one of several gangs let go that each have workers, but too few, and wait for those of the others."""
    stuck: list[JobRecord] = []
    for job in scene.queue:
        gang = scene.gangs.get(job.id)
        if gang and gang.target and gang.shape and gang.stalled_seconds >= scene.policy.patience_seconds:
            others = [other.id for other in stuck if scene.nodes(other) & scene.nodes(job)]
            if others and scene.room.ranks(scene.demand(job)) < 0:
                scene.pause(job, f"pauses because {others[0]}, which comes before it, lacks the workers that it has")
                return
            stuck.append(job)
