"""The scheduler's view of gangs, its possible decisions, and the state that one pass updates with each decision."""

from bisect import bisect_left, insort
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cached_property, reduce
from itertools import compress, takewhile
from math import inf
from operator import attrgetter, or_
from typing import Any
from weakref import WeakKeyDictionary, WeakValueDictionary

from boost_core.config import JobSpec, Layout
from boost_core.hardware import ACCELERATOR_LABEL
from boost_core.messages import Cause
from boost_core.plan.machine import NOMINAL, Basis
from service.gang.status import Labels, NodeCapacity, Orders
from service.jobs.model import JobRecord
from service.jobs.states import WAITING_STATES, JobState
from service.scheduler.demand import Demand, demand_of
from service.scheduler.placement import Nodes, Room
from service.scheduler.quotas import Account, Limits, Quotas


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
        present = self.layout.world_size if self.layout else 0
        return max(present, self.target.world_size) if self.target else present

    @property
    def remaining(self) -> int:
        """Ranks that it will have once it has followed its orders."""
        return 0 if self.waiting or self.target is None else self.target.world_size

    def orders(self, spec: JobSpec, basis: Basis = NOMINAL) -> Orders:
        """Its orders. Arguments as for ``demand_of``."""
        if self.target is None:
            return Orders(None, (), self.cause)
        replica, most = self.target.per_replica, self.target.world_size
        demand = demand_of(spec, basis).of_gang(self.limit, self.layout, self.target)
        allowed = tuple(one for one in demand.layouts if one.per_replica == replica and one.world_size <= most)
        # A gang that has reached its target changes only to return to it.
        cause, avoid = Cause.WORKER_BACK if self.layout == self.target else self.cause, tuple(sorted(demand.avoid))
        return Orders(self.target, allowed, cause, avoid, self.near)


@dataclass(frozen=True, slots=True)
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


@dataclass(frozen=True, slots=True)
class Wait:
    """The job stays SCHEDULING."""

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


_LASTING = [attrgetter(name) for name in ("node_id", "draining", "unusable", "total", "labels")]  # of a node
ORDER = attrgetter("order")  # of an entry


@dataclass(eq=False, slots=True, weakref_slot=True)
class JobClass:
    """Jobs that one decision and one explanation are enough for, as long as they wait.

    Attributes:
        demand: Their demand, without a limit.
        tenant: Whose they are.
        queue: Where they wait.
        alone: Their demand at the limit at which they would be fastest alone, regardless of the room there is now.
        fleet: Of which nodes and quotas that is.
        queued: Entries of those that are QUEUED and to get a gang, in queue order.
    """

    demand: Demand
    tenant: str
    queue: str
    alone: Demand | None = None
    fleet: object = None
    queued: "list[Entry]" = field(default_factory=list)


@dataclass(eq=False, slots=True)
class Entry:
    """A job's record, and what it says that is needed in every pass.

    Attributes:
        job: The record.
        order: Its place in the queue.
        group: The jobs that are equal to it.
        place: The list that it is in: of ``JobClass`` or of ``SchedulerMemory``.
        gang: Its gang, as it was when it last differed, and the gangs that were equal to that; ``None`` without one.
    """

    job: JobRecord
    order: tuple[Any, ...]
    group: JobClass
    place: "list[Entry]"
    gang: "tuple[Gang, GangClass] | None" = None


@dataclass(eq=False, slots=True, weakref_slot=True)
class GangClass:
    """Gangs that take equally much of equal nodes.

    Attributes:
        demand: Their demand on nodes.
        gang: One of them.
        priority: Their jobs' priority.
        claimed: As in ``Gang``.
        arrived: Whether they have the ranks that they are to have.
    """

    demand: Demand
    gang: Gang
    priority: int
    claimed: int
    arrived: bool


@dataclass
class Line:
    """Jobs considered so far that wait for the same nodes, or in the same account.

    Attributes:
        parts: Their entries, in lists that are each in queue order; some are filled at the end of the pass only.
    """

    parts: list[list[Entry]] = field(default_factory=list)

    @cached_property
    def orders(self) -> list[tuple[Any, ...]]:
        """Their places in the queue, in order; to be asked for once the pass is over."""
        return sorted(entry.order for part in self.parts for entry in part)


@dataclass(frozen=True)
class Explain:
    """Jobs of one class stay in the queue, for the reason that holds in this pass, whether or not it was given before.

    Attributes:
        message: The reason, without the number of those ahead.
        ahead: Where other jobs wait that are ahead of them and are to be counted: the message ends with the first.
        line: Where they wait themselves.
        admits: Whether they leave the queue nevertheless.
        entries: The jobs' entries, in queue order.
    """

    message: str
    ahead: Sequence[Line] = ()
    line: Line | None = None
    admits: bool = False
    entries: list[Entry] = field(default_factory=list)

    def to(self, entry: Entry) -> str:
        """What a job is told: the reason, and how many more are ahead than the one that it names."""
        waiting = sum(bisect_left(line.orders, entry.order) for line in self.ahead)
        return f"{self.message} and {waiting - 1} more" if waiting > 1 else self.message


Action = Admit | Launch | Wait | Explain | Resize | Pause | CapacityObserved


class Fleet:
    """The nodes apart from what is free on them, and the quotas: what seldom changes, and what follows from it alone.

    Args:
        nodes: The alive nodes.
        limits: Quotas of tenants and queues.
        topology: Node labels that indicate proximity, as in ``Room``.

    Attributes:
        limits: As the argument, and so is ``topology``.
        seen: By attribute of ``_LASTING``, its values of all nodes.
        whole: The room that the nodes would have if nothing ran on them.
        room: The room that there is.
        all_steady: Whether none is draining.
        unusable: The nodes on which ranks cannot run.
        accelerators: The kinds of GPU that there are.
        possible: By demand, the layouts that the nodes could hold if the job were alone.
        gpu_limits: By labels, the limits of jobs that take GPUs of any kind, as in ``Demand.limits``.
        stamp: Tells it from others.
    """

    def __init__(self, nodes: Sequence[NodeCapacity], limits: Limits, topology: Sequence[str]) -> None:
        self.limits, self.topology = limits, topology
        self.seen = [list(map(copy, map(of, nodes))) for of in _LASTING]  # copies, which others cannot change
        self.whole = Room(nodes, [node.total for node in nodes])
        self.room = Room(nodes, [node.free for node in nodes], topology=topology)
        self.all_steady = not any(node.draining for node in nodes)
        self.unusable = [node for node in nodes if node.unusable]
        self.accelerators = frozenset(filter(None, (node.labels.get(ACCELERATOR_LABEL) for node in nodes)))
        self.possible: WeakKeyDictionary[Demand, list[Layout]] = WeakKeyDictionary()
        self.gpu_limits: dict[frozenset[tuple[str, str]], list[float]] = {}
        self.stamp = object()


class SchedulerMemory:
    """What a pass need not work out again because the one before has done so. Decisions do not depend on it.

    Attributes:
        by_id: The entries of all active jobs, by job.
        holders: Those of jobs that have a gang, in queue order.
        admitted: Those of jobs that have left the queue and are to get a gang, in queue order; ``JobClass.queued`` has
            those that have not.
        classes: The classes of jobs, by demand, tenant and queue.
        fleet: The nodes and quotas of the last pass.
    """

    def __init__(self) -> None:
        self.by_id: dict[str, Entry] = {}
        self.holders: list[Entry] = []
        self.admitted: list[Entry] = []
        self._others: list[Entry] = []  # those of jobs that neither have a gang nor are to get one
        self._by_record: dict[int, Entry] = {}  # by the record's identity; the entry keeps it, so no other gets that
        self.classes: WeakValueDictionary[tuple[Demand, str, str], JobClass] = WeakValueDictionary()
        self._gangs: WeakValueDictionary[tuple[Any, ...], GangClass] = WeakValueDictionary()
        self.fleet: Fleet | None = None

    def see(self, jobs: Sequence[JobRecord]) -> None:
        """Have an entry for each of the active jobs, and none for others."""
        identities = list(map(id, jobs))
        records = set(identities)
        # Before anything is changed, because a job of which no entry can be made ends the pass here.
        new = records.difference(self._by_record)
        coming: list[Entry] = []
        for job in compress(jobs, map(new.__contains__, identities)) if new else ():
            before = self.by_id.get(job.id)
            if before and before.job.version == job.version:  # only what it waits for in words has changed
                coming.append(replace(before, job=job))
                continue
            key = self.demand(job), job.tenant, job.queue
            group = self.classes.get(key)
            if group is None:
                group = self.classes[key] = JobClass(*key)
            place = self.holders if job.has_gang else self._others
            if job.state in WAITING_STATES and not job.has_gang and not job.pause_requested:
                place = group.queued if job.state is JobState.QUEUED else self.admitted
            coming.append(Entry(job, job.queue_order, group, place))
        gone = {self._by_record.pop(record) for record in self._by_record.keys() - records}
        for entry in gone:
            del self.by_id[entry.job.id]
        self._by_record |= {id(entry.job): entry for entry in coming}
        self.by_id |= {entry.job.id: entry for entry in coming}
        for place in {id(entry.place): entry.place for entry in gone}.values():
            place[:] = [entry for entry in place if entry not in gone]
        for entry in coming:
            entry.place.append(entry)
        for place in {id(entry.place): entry.place for entry in coming}.values():
            place.sort(key=ORDER)

    def demand(self, job: JobRecord) -> Demand:
        """An active job's demand on nodes, without a limit."""
        if before := self.by_id.get(job.id):
            old = before.job
            same_parts = old.spec is job.spec and old.profile is job.profile and old.fitted is job.fitted
            same_nodes = (old.node_gpus, old.node_memory_bytes) == (job.node_gpus, job.node_memory_bytes)
            if old.version == job.version or (same_parts and same_nodes):
                return before.group.demand
        return demand_of(job.spec, job.basis)

    def gangs_like(self, gang: Gang, demand: Demand, priority: int) -> GangClass:
        """The gangs that are equal to one.

        Args:
            gang: The gang.
            demand: Its demand on nodes.
            priority: Its job's priority.
        """
        key = demand, gang.layout, gang.target, gang.limit, gang.waiting, priority
        like = self._gangs.get(key)
        if like is None:
            arrived = gang.layout == gang.target and not gang.waiting
            like = self._gangs[key] = GangClass(demand, gang, priority, gang.claimed, arrived)
        return like


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
        memory: What passes before this one have worked out.

    Attributes:
        actions: The decisions so far.
        capacities: The nodes as they are, including draining ones.
        demands: The demands on nodes, by job, of those that have a gang or whose turn has come.
        gangs: The gangs after these decisions, one for each job that has one; newly started ones last.
        resized: Number of gangs that got another target.
        fleet: The nodes, apart from what is free on them.
        room: The room left.
        whole: The room that the nodes would have if nothing ran on them.
        quotas: The quotas left.
        gone: Why nodes are missing.
        queue: The jobs that have a gang, in queue order.
        changing: Those whose gangs may have other ranks than they are to have.
        records: By job, its entry.
        likes: By job, the gangs that are equal to its own after these decisions.
        seeking: Entries of those whose gangs wait for workers as the pass begins.
        moved: Jobs whose gangs have no place within their ranks' memory limit and are to get another limit.
        lines: The jobs considered so far that wait, by the set of nodes, or the account, for which they do.
    """

    def __init__(
        self, jobs: Sequence[JobRecord], nodes: Sequence[NodeCapacity], gangs: Mapping[str, Gang],
        room_seconds: Mapping[str, float], policy: ResizePolicy, limits: Limits, topology: Sequence[str],
        memory: SchedulerMemory,
    ) -> None:  # fmt: skip
        self.actions: list[Action] = []
        self.resized = 0
        memory.see(jobs)
        self._memory, self.records, self.capacities = memory, memory.by_id, nodes
        seen = [list(map(of, nodes)) for of in _LASTING]  # one attribute of all at a time, which is compared fastest
        fleet = memory.fleet
        if fleet is None or (fleet.limits, fleet.topology, fleet.seen) != (limits, topology, seen):
            fleet = memory.fleet = Fleet(nodes, limits, topology)
        self.fleet = fleet
        self.room, self.whole = self.fleet.room, self.fleet.whole
        self.demands: dict[str, Demand] = {}
        self.quotas = Quotas(limits, lambda job: self.demands[job.id])
        self.gangs: dict[str, Gang] = {}
        self.seeking: list[Entry] = []
        self.changing = set[str]()
        self.likes: dict[str, GangClass] = {}
        self._nodes: dict[Demand, Nodes] = {}
        allocated, claimed = Counter[Demand](), dict[JobClass, tuple[JobRecord, int]]()
        for entry in memory.holders:
            job, group = entry.job, entry.group
            gang = self.gangs[job.id] = gangs.get(job.id) or Gang(None, job.present_layout)
            last, like = entry.gang or (None, None)
            # Layouts are mostly the same objects as in the pass before, which spares comparing them.
            same_layouts = last and gang.layout is last.layout and gang.target is last.target
            if not (last and like and same_layouts and (gang.limit, gang.waiting) == (last.limit, last.waiting)):
                demand = group.demand.of_gang(gang.limit, gang.layout, gang.target)
                like = memory.gangs_like(gang, demand, job.spec.priority)
                entry.gang = gang, like
            self.likes[job.id] = like
            self.demands[job.id], ranks = like.demand, like.claimed
            claimed[group] = job, ranks + (claimed[group][1] if group in claimed else 0)
            if gang.waiting:
                self.seeking.append(entry)
            else:
                allocated[like.demand] += ranks
            if not like.arrived:
                self.changing.add(job.id)
        for job, ranks in claimed.values():
            self.quotas.take(job, ranks)
        self.whole.prune()
        self.room.renew([node.free for node in nodes], allocated.items())
        if topology:
            for job_id, gang in self.gangs.items():
                if gang.near and gang.target and gang.layout != gang.target:
                    self.room.expect(self.demands[job_id], gang.target, gang.layout, gang.near)
        self.moved: set[str] = set()
        self.queue = [entry.job for entry in memory.holders]
        for entry in self.seeking:
            job_id = entry.job.id
            no_place = self.gangs[job_id].target and not self.possible(self.demands[job_id])
            if no_place and self.possible(alone := self.alone(entry)):
                self.demands[job_id] = alone
                self._has(entry.job, self.gangs[job_id])
                self.moved.add(job_id)
        self.gone = Cause.NODE_LOST if self.fleet.all_steady else Cause.NODE_DRAINED
        self.room_seconds, self.policy = room_seconds, policy
        self.lines = defaultdict[Nodes | Account, Line](Line)

    def alone(self, entry: Entry) -> Demand:
        """The demand of a job without a gang, or with one that has no place; see ``JobClass``."""
        group, job = entry.group, entry.job
        if group.alone is None or group.fleet is not self.fleet.stamp:
            demand, limits = group.demand, [group.demand.limit]
            if demand.any_kind:
                if demand.labels not in self.fleet.gpu_limits:
                    self.fleet.gpu_limits[demand.labels] = demand.limits(self.capacities)
                limits = self.fleet.gpu_limits[demand.labels]
            options = [demand.within(limit) for limit in limits]
            alone = options[-1]
            if len(options) > 1:
                self.demands.setdefault(job.id, demand)
                pairs = [(option, layout) for option in options for layout in self.possible(option)]
                allowed = [layout for _, layout in pairs if not self.quotas.too_small(job, layout.world_size)]
                best = demand.fastest(allowed or [layout for _, layout in pairs])
                alone = next((option for option, layout in pairs if layout == best), alone)
            group.alone, group.fleet = alone, self.fleet.stamp
        return group.alone

    @cached_property
    def of_others(self) -> Mapping[str, float]:
        """What others than our gangs use on the nodes."""
        used: dict[str, float] = defaultdict(float)
        for number, equal in [*self.room.reported_classes(), *((number, 1) for number in self.room.others)]:
            node = self.capacities[number]
            for name, total in node.total.items():
                used[name] += (total - node.free.get(name, 0)) * equal
        ranks = Counter[Demand]()
        for job_id, gang in self.gangs.items():
            ranks[self.demands[job_id]] += gang.layout.world_size if gang.layout else 0
        for demand, number in ranks.items():
            for name, amount in demand.amounts(number).items():
                used[name] -= amount
        return used

    def nodes(self, job: JobRecord) -> Nodes:
        """The nodes that could hold, if empty, a job's smallest group of ranks that must share a node."""
        return self.holding(self.demands[job.id])

    def holding(self, demand: Demand) -> Nodes:
        """The same of all jobs with some demand."""
        nodes = self._nodes.get(demand)
        if nodes is None:
            fitting = (nodes for slots, nodes in self.whole.by_slots(demand).items() if slots >= demand.smallest_group)
            nodes = self._nodes[demand] = reduce(or_, fitting, 0)
        return nodes

    def possible(self, demand: Demand) -> list[Layout]:
        """The layouts of a job that the nodes could hold if it were alone."""
        layouts = self.fleet.possible.get(demand)
        if layouts is None:
            layouts = [layout for layout in demand.layouts if self.whole.fits(demand, layout)]
            self.fleet.possible[demand] = layouts
        return layouts

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
        placeable = (layout for layout in choice if room.fits(demand, layout, own, allocated))
        return [layout for layout in placeable if self.quotas.allows(job, layout.world_size - claimed)]

    def admit(self, job: JobRecord) -> None:
        """Decide that a job leaves the queue, as one of the next to be placed."""
        if job.state is JobState.QUEUED:
            self.actions.append(Admit(job))

    def launch(self, job: JobRecord, layout: Layout, message: str) -> None:
        """Decide that a gang starts."""
        demand = self.demands[job.id]
        near = self.room.nearest(demand, layout)
        self.actions.append(Launch(job, layout, message, demand.limit, near))
        self.room.place(demand, layout, near=near)
        self.room.hold(demand, layout.world_size)
        self.quotas.take(job, layout.world_size)
        self._has(job, Gang(None, layout, limit=demand.limit))
        insort(self.queue, job, key=attrgetter("queue_order"))

    def _has(self, job: JobRecord, gang: Gang) -> None:
        self.gangs[job.id] = gang
        self.likes[job.id] = self._memory.gangs_like(gang, self.demands[job.id], job.spec.priority)

    def resize(self, job: JobRecord, layout: Layout, cause: Cause, message: str, near: Labels = ()) -> None:
        """Decide that a gang gets another target. Room is taken at once, but given back only when it is free."""
        old, limit = self.gangs[job.id], self.demands[job.id].limit
        new = replace(old, target=layout, cause=cause, limit=limit)
        self._has(job, new)
        if old.layout or new.allocated > old.allocated:  # one that starts may have taken all of it by now
            self.room.hold(self.demands[job.id], new.allocated - old.allocated)
        self.quotas.take(job, max(0, new.claimed - old.claimed))
        self.resized += 1
        self.changing.add(job.id)
        self.actions.append(Resize(job, layout, cause, message, limit, near))

    def pause(self, job: JobRecord, message: str, why: str) -> None:
        """Decide that a gang gives up all its room; ``message`` and ``why`` as in ``Pause``."""
        self._has(job, replace(self.gangs[job.id], target=None, cause=Cause.PREEMPTED))
        self.resized += 1
        self.changing.add(job.id)
        self.actions.append(Pause(job, message, why))

    def leaving(self) -> list[JobRecord]:
        """The jobs that are giving up room."""
        changing = [job for job in self.queue if job.id in self.changing]
        return [job for job in changing if self.gangs[job.id].remaining < self.gangs[job.id].allocated]

    def lower(self, job: JobRecord, waiting: bool = False) -> list[JobRecord]:
        """The jobs that a job may preempt: lowest priority first, then newest first.

        Args:
            job: The job.
            waiting: Whether also those whose gangs wait for workers: these hold no nodes, but count towards quotas.
        """
        behind = takewhile(lambda other: other.spec.priority < job.spec.priority, reversed(self.queue))
        running = ((other, self.gangs[other.id]) for other in behind if other.state is JobState.RUNNING)
        return [other for other, gang in running if gang.target and (gang.layout or (waiting and gang.waiting))]
