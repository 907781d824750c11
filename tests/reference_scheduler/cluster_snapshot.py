"""The scheduler's view of gangs, its possible decisions, and the state that one pass updates with each decision."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from operator import attrgetter

from boost_core.config import JobSpec, Layout
from boost_core.messages import Cause
from boost_core.plan.machine import NOMINAL, Basis
from service.gang.status import Labels, NodeCapacity, Orders
from service.jobs.model import JobRecord
from service.jobs.states import JobState
from service.scheduler.demand import Demand, Kind, demand_of
from tests.reference_scheduler.placement import Account, Limits, Nodes, Quotas, Room


@dataclass(frozen=True)
class ResizePolicy:
    """When a gang may grow. Without limits, gangs would change their layout whenever nodes or jobs come and go.

    Attributes:
        cooldown_seconds: A gang grows if its layout has been the same for this long,
        settle_seconds: if there has been room for this long,
        minimum_gain: and if its throughput is predicted to rise by at least this share,
        layout_gain: or by this share if tensor, pipeline or context parallelism must change.
        patience_seconds: A gang that lacks workers may wait for them to come back for this long.
    """

    cooldown_seconds: float = 30.0
    settle_seconds: float = 5.0
    minimum_gain: float = 0.05
    layout_gain: float = 0.2
    patience_seconds: float = 60.0


@dataclass(frozen=True)
class Gang:
    """A gang as the scheduler knows it.

    Attributes:
        layout: Its current layout; ``None`` while it has no workers.
        target: The layout last ordered; ``None`` to pause.
        cause: The reason for the target.
        waiting: Whether it has no workers because it cannot get any.
        unchanged_seconds: Time since its layout or target last changed, or it recovered from something.
        stalled_seconds: Time since it last trained; 0 while it trains.
        limits_changed: Whether the layouts that its job allows have just been changed.
        limit: Bytes that its ranks may need; ``None`` if no longer known.
        near: Labels of the nodes on which it is to get its workers.
    """

    layout: Layout | None
    target: Layout | None
    cause: Cause = Cause.WORKER_BACK
    waiting: bool = False
    unchanged_seconds: float = inf
    stalled_seconds: float = 0.0
    limits_changed: bool = False
    limit: float | None = None
    near: Labels = ()

    @property
    def allocated(self) -> int:
        """Ranks that it has or that are reserved for it."""
        return 0 if self.waiting else self.claimed

    @property
    def claimed(self) -> int:
        """Ranks that count towards quotas. A gang waiting for workers may take its target at any time."""
        return max(layout.world_size if layout else 0 for layout in (self.layout, self.target))

    @property
    def remaining(self) -> int:
        """Ranks that it will have once it has followed its orders."""
        return 0 if self.waiting or self.target is None else self.target.world_size

    def demand(self, demand: Demand) -> Demand:
        """Its demand on nodes, given that of its job without a limit."""
        return demand.of_gang(self.limit, self.layout, self.target)

    def orders(self, spec: JobSpec, basis: Basis = NOMINAL) -> Orders:
        """Its orders. Arguments as for ``demand_of``."""
        if self.target is None:
            return Orders(None, (), self.cause)
        replica, most = self.target.per_replica, self.target.world_size
        demand = self.demand(demand_of(spec, basis))
        allowed = tuple(one for one in demand.layouts if one.per_replica == replica and one.world_size <= most)
        # A gang that has reached its target changes only to return to it.
        arrived = self.layout == self.target
        cause, avoid = Cause.WORKER_BACK if arrived else self.cause, tuple(sorted(demand.avoid))
        return Orders(self.target, allowed, cause, avoid, self.near)


@dataclass(frozen=True)
class Admit:
    """The job leaves the queue."""

    job: JobRecord


@dataclass(frozen=True)
class Launch:
    """The job's next gang starts. ``limit``: bytes that its ranks may need; ``near``: as in ``Orders``."""

    job: JobRecord
    layout: Layout
    message: str
    limit: float
    near: Labels = ()


@dataclass(frozen=True)
class Wait:
    """The job stays SCHEDULING."""

    job: JobRecord
    message: str


@dataclass(frozen=True)
class Explain:
    """The job stays in the queue, for the reason that holds in this pass, whether or not it was given before."""

    job: JobRecord
    message: str


@dataclass(frozen=True)
class Resize:
    """The job's gang gets another target; ``limit`` and ``near`` as in ``Launch``."""

    job: JobRecord
    layout: Layout
    cause: Cause
    message: str
    limit: float
    near: Labels = ()


@dataclass(frozen=True)
class Pause:
    """The job's gang ends and will start again when there is room.

    ``message`` is for operators; ``why`` goes on from "paused after step 7" for the job's tenant, to whom it names no
    other tenant's job.
    """

    job: JobRecord
    message: str
    why: str


@dataclass(frozen=True)
class CapacityObserved:
    """In total there is room for the job to start or to grow; it counts once it has lasted for a while."""

    job: JobRecord


Action = Admit | Launch | Wait | Explain | Resize | Pause | CapacityObserved


class ClusterSnapshot:
    """Jobs, gangs and room, and the decisions so far.

    Args:
        jobs: All active jobs.
        nodes: The alive nodes.
        gangs: The gangs by job.
        room_seconds: By job, for how long there has been room, as reported by ``CapacityObserved`` in each pass.
        policy: When gangs may grow.
        limits: Quotas of tenants and queues.
        topology: Node labels that indicate proximity, as in ``Room``.

    Attributes:
        actions: The decisions so far.
        jobs: All active jobs by id.
        capacities: The nodes as they are, including draining ones.
        demands: The demand of each job on nodes, by its id.
        gangs: The gangs after these decisions, one for each job that has one; newly started ones last.
        resized: Number of gangs that got another target.
        room: The room left.
        whole: The room that the nodes would have if nothing ran on them.
        quotas: The quotas left.
        gone: Why nodes are missing.
        queue: The jobs in queue order.
        moved: Jobs whose gangs have no place within their ranks' memory limit and are to get another limit.
        lines: Number of jobs considered so far that wait for each set of nodes, and for each account.
    """

    def __init__(
        self, jobs: Sequence[JobRecord], nodes: Sequence[NodeCapacity], gangs: Mapping[str, Gang],
        room_seconds: Mapping[str, float], policy: ResizePolicy, limits: Limits, topology: Sequence[str] = (),
    ) -> None:  # fmt: skip
        self.actions: list[Action] = []
        self.resized = 0
        self._possible: dict[Demand, list[Layout]] = {}
        self.jobs = {job.id: job for job in jobs}
        self.queue = sorted(jobs, key=attrgetter("queue_order"))
        self.capacities = nodes
        self.gangs = {job.id: gangs.get(job.id) or Gang(None, job.present_layout) for job in jobs if job.has_gang}
        self.demands = {
            job.id: demand_of(job.spec, job.basis).of_gang(gang.limit, gang.layout, gang.target)
            if (gang := self.gangs.get(job.id))
            else demand_of(job.spec, job.basis)
            for job in jobs
        }
        allocated = [(self.demands[job_id], gang.allocated) for job_id, gang in self.gangs.items()]
        self.room = Room(nodes, [node.free for node in nodes], allocated, topology)
        self.whole = Room(nodes, [node.total for node in nodes])
        self.quotas = Quotas(limits, lambda job: self.demands[job.id])
        for job_id, gang in self.gangs.items():
            if gang.near and gang.target and gang.layout != gang.target:
                self.room.expect(self.demands[job_id], gang.target, gang.layout, gang.near)
            self.quotas.take(self.jobs[job_id], gang.claimed)
        # Memory limits of jobs that may use several kinds of GPU and have no gang, or one without a place: the limit at
        # which a job would be fastest if it were alone, regardless of the room there is now.
        self.moved: set[str] = set()
        for job in self.queue:
            present = self.gangs.get(job.id)
            if present and not (present.waiting and present.target and not self.possible(self.demands[job.id])):
                continue
            demand = demand_of(job.spec, job.basis)
            options = [demand.within(limit) for limit in demand.limits(nodes)]
            alone = options[-1]
            if len(options) > 1:
                pairs = [(option, layout) for option in options for layout in self.possible(option)]
                allowed = [layout for _, layout in pairs if not self.quotas.too_small(job, layout.world_size)]
                best = demand.fastest(allowed or [layout for _, layout in pairs])
                alone = next((option for option, layout in pairs if layout == best), alone)
            if present is None or self.possible(alone):
                self.demands[job.id] = alone
                if present:
                    self.moved.add(job.id)
        self.gone = Cause.NODE_DRAINED if any(node.draining for node in nodes) else Cause.NODE_LOST
        self.room_seconds, self.policy = room_seconds, policy
        self.lines: Counter[Nodes | Account] = Counter()
        self._admitted: set[str] = set()
        self._nodes: dict[tuple[Kind, int], Nodes] = {}

    def nodes(self, job: JobRecord) -> Nodes:
        """The nodes that could hold, if empty, a job's smallest group of ranks that must share a node."""
        demand = self.demands[job.id]
        key = demand.kind, demand.smallest_group
        if key not in self._nodes:
            slots = self.whole.slots(demand)
            self._nodes[key] = sum(1 << number for number, slot in enumerate(slots) if slot >= demand.smallest_group)
        return self._nodes[key]

    def possible(self, demand: Demand) -> list[Layout]:
        """The layouts of a job that the nodes could hold if it were alone."""
        if demand not in self._possible:
            self._possible[demand] = [layout for layout in demand.layouts if self.whole.fits(demand, layout)]
        return self._possible[demand]

    def fitting(self, job: JobRecord, room: Room, among: Iterable[Layout] | None = None) -> list[Layout]:
        """The layouts of a job that fit nodes and quotas, counting what the job holds already as available to it.

        Args:
            job: The job.
            room: Where to look: ``room``, or ``whole`` as if no gang held anything.
            among: Layouts to choose from; by default all that it allows.
        """
        gang, demand = self.gangs.get(job.id), self.demands[job.id]
        claimed = gang.claimed if gang else 0
        own, allocated = None, 0
        if gang and room is self.room:  # the layout for which it has, or is about to have, its place on nodes
            own, allocated = gang.layout or (None if gang.waiting else gang.target), gang.allocated
        choice = demand.layouts if among is None else among
        return [
            layout
            for layout in choice
            if room.fits(demand, layout, own, allocated) and self.quotas.allows(job, layout.world_size - claimed)
        ]

    def admit(self, job: JobRecord) -> None:
        """Decide that a job leaves the queue, as one of the next to be placed."""
        if job.state is JobState.QUEUED:
            self.actions.append(Admit(job))
            self._admitted.add(job.id)

    def wait(self, job: JobRecord, message: str) -> None:
        """Explain why a job waits."""
        queued = job.state is JobState.QUEUED and job.id not in self._admitted
        self.actions.append(Explain(job, message) if queued else Wait(job, message))

    def launch(self, job: JobRecord, layout: Layout, message: str) -> None:
        """Decide that a gang starts."""
        demand = self.demands[job.id]
        part = self.room.nearest(demand, layout)
        self.actions.append(Launch(job, layout, message, demand.limit, part.labels))
        self.room.place(demand, layout, part=part)
        self.keep(job, layout.world_size)
        self.gangs[job.id] = Gang(None, layout, limit=demand.limit)

    def keep(self, job: JobRecord, ranks: int) -> None:
        """Reserve room for more ranks of a job, wherever they will be."""
        self.room.hold(self.demands[job.id], ranks)
        self.quotas.take(job, ranks)

    def resize(self, job: JobRecord, layout: Layout, cause: Cause, message: str, near: Labels = ()) -> None:
        """Decide that a gang gets another target. Room is taken at once, but given back only when it is free."""
        old, limit = self.gangs[job.id], self.demands[job.id].limit
        new = self.gangs[job.id] = replace(old, target=layout, cause=cause, limit=limit)
        if old.layout or new.allocated > old.allocated:  # one that starts may have taken all of it by now
            self.room.hold(self.demands[job.id], new.allocated - old.allocated)
        self.quotas.take(job, max(0, new.claimed - old.claimed))
        self.resized += 1
        self.actions.append(Resize(job, layout, cause, message, limit, near))

    def pause(self, job: JobRecord, message: str, why: str) -> None:
        """Decide that a gang gives up all its room; ``message`` and ``why`` as in ``Pause``."""
        self.gangs[job.id] = replace(self.gangs[job.id], target=None, cause=Cause.PREEMPTED)
        self.resized += 1
        self.actions.append(Pause(job, message, why))

    def leaving(self) -> list[JobRecord]:
        """The jobs that are giving up room."""
        return [job for job in self.queue if (gang := self.gangs.get(job.id)) and gang.remaining < gang.allocated]

    def lower(self, job: JobRecord, waiting: bool = False) -> list[JobRecord]:
        """The jobs that a job may preempt: lowest priority first, then newest first."""
        return [
            other
            for other in reversed(self.queue)
            if other.spec.priority < job.spec.priority
            and other.state is JobState.RUNNING
            and (gang := self.gangs.get(other.id))
            and (gang.layout or (waiting and gang.waiting))
            and gang.target
        ]
