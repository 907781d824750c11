"""What to do about jobs and gangs. Pure: records, gangs and capacities in, actions out.

A higher priority comes first, and of equals who came first. A job starts at the best of its shapes that fits now, when
one does. One that must wait for others to make room holds back those behind it that could use the same nodes, so that
it cannot starve; one that the whole cluster could not hold does not. A gang that has lost its workers waits among them.
What nobody waits for, gangs grow into.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType

from boost_core.config.reports import Cause
from boost_core.plan.resize import fastest, why_not
from boost_core.plan.throughput import step_seconds
from service.gang.resources import gang_in_words, worker_resources
from service.gang.status import NodeCapacity
from service.jobs.model import JobRecord
from service.jobs.states import JobState
from service.scheduler.actions import Action, Admit, Gang, Launch, ResizePolicy, Wait
from service.scheduler.growth import grow
from service.scheduler.placement import Nodes, required_labels
from service.scheduler.preemption import make_room
from service.scheduler.scene import Scene
from service.scheduler.upkeep import keep_up

_NAMED_JOBS = 3  # in a message
_QUEUED = frozenset({JobState.QUEUED, JobState.SCHEDULING})
_NONE: Mapping[str, float] = MappingProxyType({})


def decide(
    jobs: Sequence[JobRecord], nodes: Sequence[NodeCapacity], gangs: Mapping[str, Gang] = MappingProxyType({}),
    room_seconds: Mapping[str, float] = _NONE, policy: ResizePolicy | None = None,
) -> list[Action]:  # fmt: skip
    """What to do now.

    Args:
        jobs: All active jobs in the order of their submission.
        nodes: What the alive nodes have, and have free.
        gangs: The gangs by job; one that is not there is taken to be starting.
        room_seconds: By job, for how long each round has said ``RoomSeen`` of it.
        policy: When gangs may grow.
    """
    scene = Scene(jobs, nodes, gangs, room_seconds, policy or ResizePolicy())
    keep_up(scene)
    grow(scene, _serve_queue(scene))
    return scene.actions


def _serve_queue(scene: Scene) -> list[Nodes]:
    """Start what fits. Returns the nodes on which jobs wait for room."""
    blocked: list[tuple[Nodes, JobRecord]] = []
    for job in scene.queue:
        gang, usable = scene.gangs.get(job.id), scene.nodes(job)
        if not (gang.waiting if gang else _is_queued(job)):
            continue
        before = next((other for nodes, other in blocked if nodes & usable), None)
        if before:
            if job.state is JobState.SCHEDULING and not gang:
                scene.actions.append(Wait(job, f"is held back by {before.id}, which comes before it"))
        elif not (_revive(scene, job, gang) if gang else _start(scene, job)):
            blocked.append((usable, job))
    return [nodes for nodes, _ in blocked]


def _is_queued(job: JobRecord) -> bool:
    return job.state in _QUEUED and not job.has_gang and not job.pause_requested


def _start(scene: Scene, job: JobRecord) -> bool:
    """Start a job's gang if it fits; say whether the job waits for no other one."""
    if job.state is JobState.QUEUED:
        scene.actions.append(Admit(job))
    if not scene.fitting(job, scene.whole):
        scene.actions.append(Wait(job, _never(scene, job)))
        return True
    choice = fastest(job.spec, scene.fitting(job, scene.room))
    if choice is None:
        make_room(scene, job)
        scene.actions.append(Wait(job, _not_yet(scene, job)))
        return False
    words = gang_in_words(choice.world_size, worker_resources(job.spec))
    scene.actions.append(Launch(job, choice, f"starting {choice}: {words}"))
    scene.room.place(job.spec, choice)
    scene.room.hold(job.spec, choice.world_size)
    scene.gangs[job.id] = Gang(None, choice)
    return True


def _revive(scene: Scene, job: JobRecord, gang: Gang) -> bool:
    """Keep room for a gang that waits for workers, which it looks for by itself; say whether it waits for no other."""
    if gang.target is None or not scene.fitting(job, scene.whole):
        return True
    choice = fastest(job.spec, scene.fitting(job, scene.room))
    if choice is None:
        if gang.unchanged_seconds >= scene.policy.settle_seconds:  # its own old room may be about to be freed
            make_room(scene, job)
        return False
    held, faster = choice, step_seconds(job.spec, choice) < step_seconds(job.spec, gang.target)
    if gang.target.world_size <= scene.room.ranks(job.spec) and not faster:
        held = gang.target
    elif choice != gang.target:
        cause = Cause.NODE_JOINED if faster else Cause.NODE_LOST
        scene.resize(job, choice, cause, f"there is room for {choice}, not for {gang.target}")
    scene.room.place(job.spec, choice)
    scene.room.hold(job.spec, held.world_size)
    return True


def _never(scene: Scene, job: JobRecord) -> str:
    each = worker_resources(job.spec)
    has = ", ".join(f"{scene.whole.total(job.spec, name):g} {name}" for name in each)
    slots = scene.whole.slots(job.spec)
    message = f"needs {_demand(scene, job)}; {_where(job)} {has} in all, room for {sum(slots)}"
    if sum(slots) >= scene.shapes(job)[0].world_size:
        message += f": {why_not(job.spec, slots, scene.shapes(job))}"
    return f"{message}; waits for nodes to join"


def _not_yet(scene: Scene, job: JobRecord) -> str:
    room, each = scene.room, worker_resources(job.spec)
    free = ", ".join(
        f"{room.free(job.spec, name):g} of {scene.whole.total(job.spec, name):g} {name} free" for name in each
    )
    message = f"waits for {_demand(scene, job)}; {free}"
    slots = room.slots(job.spec)
    if sum(slots) >= scene.shapes(job)[0].world_size <= room.ranks(job.spec):
        message += f": {why_not(job.spec, slots, scene.shapes(job))}"
    if leaving := scene.leaving(job):
        return f"{message}; {_named(leaving)} make{'' if len(leaving) > 1 else 's'} room"
    usable = scene.nodes(job)
    holders = [other for other in scene.queue if other.id in scene.gangs and scene.nodes(other) & usable]
    return f"{message}; behind {_named(holders)}" if holders else message


def _demand(scene: Scene, job: JobRecord) -> str:
    """What a job needs at least."""
    shape = scene.shapes(job)[0]
    words = gang_in_words(shape.world_size, worker_resources(job.spec))
    group = shape.tensor * (shape.pipeline if job.spec.resources.placement == "STRICT_PACK" else 1)
    return f"{words} in groups of {group}" if group > 1 else words


def _where(job: JobRecord) -> str:
    labels = ", ".join(f"{name}={value}" for name, value in required_labels(job.spec).items())
    return f"the nodes with {labels} have" if labels else "the cluster has"


def _named(jobs: Sequence[JobRecord]) -> str:
    more = len(jobs) - _NAMED_JOBS
    return ", ".join(job.id for job in jobs[:_NAMED_JOBS]) + (f" and {more} more" if more > 0 else "")
