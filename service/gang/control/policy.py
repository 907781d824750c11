"""A gang's next action, which replicas it needs, its states, and where a spare copy of its state is kept. Pure.

A gang consists of replicas, each a placement group with one process per rank. Processes outlive gangs:
to change its layout, a gang *halts* between two steps, which leaves its state in their memory, and *forms* again from
the replicas that are ready.
"""

from collections import Counter
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field

from boost_core.config import JobSpec, Layout
from boost_core.messages import Cause, SpareReport
from service.gang.assignment import RankEnd, WorkerPlace, node_selector, worker_resources
from service.gang.control import port
from service.gang.control.fault_detection import GangWatch
from service.gang.control.record import GangRecord
from service.gang.status import Orders

# Of spare copies
LOOK_SECONDS = 10.0  # between two searches for a node
AVOID_SECONDS = 60.0  # during which a node that could not keep the copy is left alone
BUSY_SECONDS = 1800.0  # for it to start or to copy, after which its node is given up
PAUSE_SECONDS = 0.5  # minimum time from the start of one copy to that of the next
REPORT_SECONDS = 10.0  # between two reports of a newer copy


_NO_NODES: Set[str] = frozenset()  # an object for all replicas, because there may be thousands


@dataclass(slots=True)
class Replica:
    """The workers of one data parallel rank.

    Attributes:
        number: Its number; newer replicas have higher ones.
        layout: Its own layout, with dp 1.
        selector: Constraints on its nodes.
        keeps: Whether its workers only keep the state.
        workers: Its workers as last observed; none before it has its resources.
        failed_starts: Number of workers in a row that ended before they were up, by place.
        placed_at: When it was first seen to have its resources, in seconds; ``None`` before that.
        ready: Whether all its workers are up.
        up: The places of its workers that are up, by number.
        starts_on: The nodes of its workers that are not up yet, as far as they are known.
        nodes: The nodes of its workers that are up.
    """

    number: int
    layout: Layout
    selector: dict[str, str]
    keeps: bool
    workers: tuple[port.WorkerStatus, ...] = ()
    failed_starts: Counter[int] = field(default_factory=Counter)
    placed_at: float | None = None
    ready: bool = False
    up: dict[int, WorkerPlace] = field(default_factory=dict)
    starts_on: Set[str] = _NO_NODES
    nodes: Set[str] = _NO_NODES

    def observe(self, workers: tuple[port.WorkerStatus, ...]) -> None:
        """Take note of its workers."""
        self.workers = workers
        self.up = {worker.number: worker.place for worker in workers if worker.place is not None}
        self.ready = bool(workers) and len(self.up) == len(workers)
        starting = [worker.node for worker in workers if worker.place is None and worker.node is not None]
        self.starts_on = frozenset(starting) if starting else _NO_NODES
        self.nodes = frozenset(place.node for place in self.up.values())


@dataclass(frozen=True)
class View:
    """Everything that decisions depend on.

    Attributes:
        orders: The scheduler's orders.
        replicas: All replicas, by number.
        members: Numbers of the replicas that train or are about to; empty between gangs.
        settled: Whether the training gang has loaded its state, so that no other copy needs to be kept.
        layout: Layout of the newest gang; ``None`` before the first.
        stored: Between gangs: whether the newest state is in the checkpoint folder.
        most: Largest number of replicas of a gang under these orders.
        finishing: Whether all steps are done, and the last checkpoint is being written.
        keeping: Whether the state is to be kept by processes without CPUs and GPUs.
        leaving: The nodes that will go away.
        urgent: Those of them that do so soon.
    """

    orders: Orders
    replicas: Sequence[Replica]
    members: Sequence[int]
    settled: bool
    layout: Layout | None
    stored: bool
    most: int
    finishing: bool = False
    keeping: bool = False
    leaving: Set[str] = _NO_NODES
    urgent: Set[str] = _NO_NODES


@dataclass(frozen=True)
class Keep:
    """Do nothing. ``waiting``: between gangs, whether resources are being waited for."""

    waiting: bool = False


@dataclass(frozen=True)
class Halt:
    """Stop the gang after its step; with ``store``, once it has written a checkpoint."""

    cause: Cause
    store: bool = False


HALT_MESSAGES = {  # for people
    Cause.NODE_DRAINED: "a node is about to leave",
    Cause.NODE_JOINED: "there is room for more workers",
    Cause.PREEMPTED: "a job of higher priority needs room",
    Cause.LIMITS_CHANGED: "the job's limits were changed",
    Cause.WORKER_BACK: "lost workers have been replaced",
    Cause.PAUSED: "the job is to be paused",
    Cause.WAITING_FOR_STORE: "its resources are released while it waits for the store",
}


@dataclass(frozen=True)
class Form:
    """Make these replicas the gang."""

    members: tuple[int, ...]
    layout: Layout


@dataclass(frozen=True)
class Pause:
    """End everything, as ordered."""


Action = Keep | Halt | Form | Pause


@dataclass(frozen=True)
class ReplicaSet:
    """The number of replicas to start, and the numbers of those to give up."""

    start: int
    give_up: tuple[int, ...]


def next_action(view: View) -> Action:
    """Return what to do now."""
    target, cause, layout, usable = view.orders.target, view.orders.cause, view.layout, _usable(view)
    reachable: Layout | None = None  # the largest layout that the ready replicas can take
    if target is not None:
        most = min(sum(replica.ready for replica in usable), target.dp)
        layouts = {*view.orders.allowed, target}
        fitting = [each for each in layouts if each.per_replica == target.per_replica and each.dp <= most]
        reachable = max(fitting, default=None)
    if not view.members or layout is None:  # between gangs
        if target is None:
            return Pause()
        if reachable is None:
            return Keep(waiting=not any(replica.workers for replica in usable))
        more_to_come = any(replica.workers and not replica.ready for replica in usable)
        if layout is None and more_to_come and reachable != target:
            return Keep()  # the first gang need not be formed in haste
        ready = [replica.number for replica in usable if replica.ready]
        return Form(tuple(ready[: reachable.dp]), reachable)

    if target is None or target.per_replica != layout.per_replica:
        if view.finishing:
            return Keep()  # what it would store first is the last checkpoint, which ends the job
        return Halt(Cause.PAUSED if target is None else cause, store=True)
    members = frozenset(view.members)
    if view.keeping and not any(replica.keeps for replica in view.replicas if replica.number in members):
        return Halt(Cause.WAITING_FOR_STORE) if reachable == layout else Keep()
    nodes = {node for replica in view.replicas if replica.number in members for node in replica.nodes}
    if nodes & view.leaving and reachable is not None:
        return Halt(Cause.NODE_DRAINED)
    if nodes & view.urgent and not view.finishing:
        return Halt(Cause.NODE_DRAINED, store=True)  # nothing is left that could keep the state
    if reachable is None or reachable.dp == layout.dp:
        return Keep()
    if reachable.dp < layout.dp:
        return Halt(cause)
    if view.finishing or not view.settled:
        return Keep()
    return Halt(Cause.WORKER_BACK if reachable.dp <= view.most else cause)


def _usable(view: View) -> list[Replica]:
    if view.orders.target is None:
        return []
    layout, keeping, leaving = view.orders.target.per_replica, view.keeping, view.leaving
    fit = (replica for replica in view.replicas if replica.layout == layout and replica.keeps == keeping)
    return [replica for replica in fit if replica.nodes.isdisjoint(leaving)]


def replica_set(view: View) -> ReplicaSet:
    """Return which replicas to start and to give up to reach the ordered number."""
    target, members = view.orders.target, frozenset(view.members)
    if target is None:
        return ReplicaSet(0, ())
    usable = _usable(view)
    # The gang's own come first, then those already up, then the older ones.
    ranked = sorted(usable, key=lambda each: (each.number not in members, not each.ready, each.number))
    surplus = {replica.number for replica in ranked[target.dp :]}
    unfit = {replica.number for replica in view.replicas} - {replica.number for replica in usable}
    # From the first gang on, any replica may hold part of the state until a gang has loaded it.
    if view.settled or view.stored or view.layout is None:
        to_remove = surplus | unfit
    else:
        to_remove = {replica.number for replica in view.replicas if replica.number in surplus and not replica.ready}
    needed = min(target.dp, len(view.members)) if view.finishing else target.dp
    return ReplicaSet(max(0, needed - len(usable)), tuple(sorted(to_remove - members)))


# What a gang's controller remembers: the training gang, and intermediate states. Plain data.


@dataclass
class Formation:
    """A gang that trains or halts.

    Attributes:
        generation: Its number.
        replicas: Its replicas.
        workers: Its workers by rank.
        places: Where each runs.
        watch: The watch over its steps.
        uncopied: Ranks whose state would be lost with their node.
        kept_step: The newest step that its ranks keep in memory; -1 before the first.
        failures: How training is about to end, for the ranks that have said so.
        ends: How training ended, for the ranks that have ended; ``None``: the process is gone.
        halting: The halt that was ordered, if any.
    """

    generation: int
    replicas: tuple[int, ...]
    workers: tuple[int, ...]
    places: tuple[WorkerPlace, ...]
    watch: GangWatch
    uncopied: tuple[int, ...] = ()
    kept_step: int = -1
    failures: dict[int, RankEnd] = field(default_factory=dict)
    ends: dict[int, RankEnd | None] = field(default_factory=dict)
    halting: Halt | None = None

    @property
    def outcomes(self) -> dict[int, RankEnd | None]:
        """How training ended or is about to, by rank; ``None``: the process is gone without a word."""
        return {**self.failures, **{rank: end or self.failures.get(rank) for rank, end in self.ends.items()}}


@dataclass(frozen=True)
class Break:
    """Why a gang broke up, as a cause and human-readable."""

    cause: Cause
    message: str


@dataclass(frozen=True)
class Idle:
    """No gang trains."""


@dataclass(frozen=True)
class Preparing:
    """A gang is about to be formed."""

    form: Form
    workers: dict[int, WorkerPlace]


@dataclass(frozen=True)
class Suspecting:
    """A gang hangs (then there is a ``reason``), or workers are silent; these workers are probed."""

    formation: Formation
    workers: tuple[int, ...]
    detected: float
    reason: Break | None


@dataclass(frozen=True)
class Stopping:
    """A gang has broken up and its remaining ranks stop. Without a ``reason``, it is determined afterwards."""

    formation: Formation
    detected: float
    deadline: float
    reason: Break | None
    unresponsive: Set[int] = frozenset()


@dataclass(frozen=True)
class Checking:
    """A gang has stopped, or could not be formed, for which the ``first`` node is to blame; all are probed."""

    formation: Formation | None
    detected: float
    reason: Break | None
    unhealthy: Set[int] = frozenset()
    probed: Set[int] = frozenset()
    first: str | None = None


@dataclass(frozen=True)
class Finished:
    """The job has ended or is paused."""


State = Idle | Preparing | Formation | Suspecting | Stopping | Checking | Finished


# On which node a spare copy of a gang's state is kept, and when it is renewed


@dataclass
class SparePolicy:
    """Decides about the spare copy of one gang.

    Ranks keep copies for each other. If some can do so only on their own node, the state would be lost with it; then a
    process on a suitable idle node keeps a copy until the ranks no longer need it. A node is suitable if those ranks,
    or those of one replica, could be placed there now. Nothing on it is reserved, so others may take it.

    Args:
        spec: The job.
        record: Records what people should know.

    Attributes:
        node: The node on which one has been started.
        status: Its status as last observed.
    """

    spec: JobSpec
    record: GangRecord
    node: str | None = None
    status: port.SpareStatus | None = None
    _failed: dict[str, float] = field(default_factory=dict)  # until when nodes are left alone
    _look_at: float = 0.0
    _copy_at: float = 0.0
    _report_at: float = 0.0
    _busy_since: float | None = None

    def observe(self, status: port.SpareStatus | None) -> None:
        """Take note of its status."""
        before, self.status = self.status, status
        if status is None or status.saved is None or (before and before.saved == status.saved):
            return
        now, (_, step) = self.record.now.seconds, status.saved
        if before is None or before.saved is None:
            self.record.log("INFO", f"a spare copy of the state of step {step} is kept on node {status.node[:12]}")
            self._report_at = now
        if now >= self._report_at:
            self._report_at = now + REPORT_SECONDS
            self.record.add(SpareReport(step=step, node=status.node))

    def look(self, ranks: int, avoid: Set[str], avoid_kinds: tuple[str, ...]) -> port.FindIdleNodes:
        """Look for suitable nodes.

        Args:
            ranks: Number of ranks that must fit on one node.
            avoid: Nodes not to use.
            avoid_kinds: Kinds of GPU that the job cannot use.
        """
        now = self.record.now.seconds
        self._failed = {node: until for node, until in self._failed.items() if until > now}
        resources = {name: ranks * amount for name, amount in worker_resources(self.spec).items()}
        return port.FindIdleNodes(resources, node_selector(self.spec, avoid | self._failed.keys(), avoid_kinds))

    def start(self, nodes: tuple[str, ...]) -> Iterator[port.Decision]:
        """Start one on the first of the suitable nodes, while a gang trains."""
        if nodes and self.node is None:
            self.node, self._busy_since = nodes[0], self.record.now.seconds
            yield port.StartSpare(self.node)

    def tend(
        self, gang: Formation, layout: Layout, unusable: Set[str], avoid_kinds: tuple[str, ...], growing: bool
    ) -> Iterator[port.Decision]:
        """Return what to do about it now.

        Args:
            gang: The training gang.
            layout: Its layout.
            unusable: Nodes on which nothing should be placed.
            avoid_kinds: Kinds of GPU that it cannot use.
            growing: Whether more replicas are about to join it.
        """
        now, status, settled = self.record.now.seconds, self.status, self.record.settled
        nodes = [gang.places[rank].node for rank in gang.uncopied]  # of the ranks whose state would be lost with them
        if self.node is None:
            if nodes and settled and not growing and now >= self._look_at:
                self._look_at = now + LOOK_SECONDS
                together = max(map(nodes.count, nodes))  # that would have to be placed on one node again
                yield self.look(min(together, layout.per_replica.world_size), unusable | set(nodes), avoid_kinds)
            return
        if status and not status.busy:
            self._busy_since = None
        failure = status and status.failure
        if self._busy_since is not None and now > self._busy_since + BUSY_SECONDS:
            failure = f"its process has made no copy in {BUSY_SECONDS:.0f} s"
        reason = failure
        if failure:
            self._failed[self.node] = now + AVOID_SECONDS
        elif self.node in unusable:
            reason = "the node is gone or about to leave"
        elif settled:  # otherwise the gang may have to resume from it once more
            if not nodes:
                reason = "the ranks keep their copies on other nodes now"
            elif self.node in nodes:
                reason = "ranks of the gang are on that node now"
        if reason:
            self.record.log("INFO", f"the spare copy of the state on node {self.node[:12]} is gone: {reason}")
            self.forget()
            yield port.EndSpare()
            return
        newest = gang.generation, gang.kept_step
        old = bool(nodes) and gang.kept_step >= 0 and status and (status.saved is None or status.saved < newest)
        if old and self._busy_since is None and now >= self._copy_at:
            self._copy_at, self._busy_since = now + PAUSE_SECONDS, now
            yield port.CopyToSpare(gang.generation, {rank: gang.workers[rank] for rank in gang.uncopied})

    def forget(self) -> None:
        """Take note that it ends, by itself or with the gang."""
        if self.status is not None and self.status.saved is not None:
            self.record.add(SpareReport(step=None, node=None))
        self.node = self.status = self._busy_since = None
