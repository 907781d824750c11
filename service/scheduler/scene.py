"""What one round of decisions works on: it changes with each of them."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from boost_core.config import Shape
from boost_core.config.reports import Cause
from service.gang.status import NodeCapacity
from service.jobs.model import JobRecord
from service.jobs.states import JobState
from service.scheduler.actions import Action, Gang, Pause, Resize, ResizePolicy
from service.scheduler.placement import Nodes, Room


class Scene:
    """Jobs, gangs and room, and what has been decided so far.

    Args:
        jobs: All active jobs in the order of their submission.
        nodes: The alive nodes.
        gangs: The gangs by job.
        room_seconds: For how long there has been room for a job, as ``RoomSeen`` said each time.
        policy: When gangs may grow.

    Attributes:
        actions: What has been decided.
        gangs: The gangs as they are with that; one of each job that has a gang.
        room: What is left.
        whole: What the nodes could take if nothing ran on them.
        gone: What nodes that are missing are gone for.
        queue: The jobs in the order in which they come first.
    """

    def __init__(
        self, jobs: Sequence[JobRecord], nodes: Sequence[NodeCapacity], gangs: Mapping[str, Gang],
        room_seconds: Mapping[str, float], policy: ResizePolicy,
    ) -> None:  # fmt: skip
        self.actions: list[Action] = []
        self.queue = sorted(jobs, key=lambda job: -job.spec.priority)  # keeps the order among equals
        self.gangs = {job.id: gangs.get(job.id) or Gang(None, job.present_shape) for job in jobs if job.has_gang}
        held = [(job.spec, self.gangs[job.id].held) for job in jobs if job.has_gang]
        self.room, self.whole = Room.now(nodes, held), Room.empty(nodes)
        self.gone = Cause.NODE_DRAINED if any(node.draining for node in nodes) else Cause.NODE_LOST
        self.room_seconds, self.policy = room_seconds, policy
        self._shapes: dict[str, list[Shape]] = {}

    def shapes(self, job: JobRecord) -> list[Shape]:
        """All shapes that a job allows."""
        if job.id not in self._shapes:
            self._shapes[job.id] = job.spec.shapes()
        return self._shapes[job.id]

    def nodes(self, job: JobRecord) -> Nodes:
        """The nodes that a job can use."""
        return self.room.nodes_for(job.spec)

    def fitting(self, job: JobRecord, room: Room, among: Iterable[Shape] | None = None) -> list[Shape]:
        """The shapes of a job that fit: beside its present one, if it has one and ``room`` is what is left.

        Args:
            job: The job.
            room: Where.
            among: Shapes to choose from; by default all that it allows.
        """
        gang = self.gangs.get(job.id)
        own, held = (gang.own, gang.held) if gang and room is self.room else (None, 0)
        choice = self.shapes(job) if among is None else among
        return [shape for shape in choice if room.fits(job.spec, shape, own, held)]

    def resize(self, job: JobRecord, shape: Shape, cause: Cause, message: str) -> None:
        """Decide that a gang gets another target. More room is taken at once, less only given back when it is free."""
        old = self.gangs[job.id]
        new = self.gangs[job.id] = replace(old, target=shape, cause=cause)
        if old.shape or new.held > old.held:  # one that starts may have taken all of it by now
            self.room.hold(job.spec, new.held - old.held)
        self.actions.append(Resize(job, shape, cause, message))

    def pause(self, job: JobRecord, message: str) -> None:
        """Decide that a gang makes room altogether."""
        self.gangs[job.id] = replace(self.gangs[job.id], target=None, cause=Cause.ROOM_NEEDED)
        self.actions.append(Pause(job, message))

    def leaving(self, job: JobRecord) -> list[JobRecord]:
        """The jobs that give up room which another one could use."""
        nodes = self.nodes(job)
        return [
            other
            for other in self.queue
            if (gang := self.gangs.get(other.id)) and gang.kept < gang.held and self.nodes(other) & nodes
        ]

    def lower(self, job: JobRecord) -> list[JobRecord]:
        """The jobs that another one may take room from: the lowest priority first, and of equals the newest."""
        nodes = self.nodes(job)
        return [
            other
            for other in reversed(self.queue)
            if other.spec.priority < job.spec.priority and self._trains(other) and self.nodes(other) & nodes
        ]

    def _trains(self, job: JobRecord) -> bool:
        gang = self.gangs.get(job.id)
        return bool(gang and gang.shape and gang.target) and job.state is JobState.RUNNING
