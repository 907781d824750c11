"""A gang's next action, which replicas it needs, and the states that it can be in. Pure: a view in, one action out.

A gang consists of replicas, each a placement group with one process per rank. Processes outlive gangs:
to change its layout, a gang *halts* between two steps, which leaves its state in their memory, and *forms* again from
the replicas that are ready.
"""

from collections import Counter
from collections.abc import Sequence, Set
from dataclasses import dataclass, field

from boost_core.config import Layout
from boost_core.messages import Cause
from service.gang.assignment import RankEnd, WorkerPlace
from service.gang.control.port import WorkerStatus
from service.gang.control.watch import GangWatch
from service.gang.status import Orders


@dataclass(frozen=True)
class ReplicaView:
    """What matters here about a replica.

    Attributes:
        number: Its number; newer replicas have higher ones.
        layout: Its own layout, with dp 1.
        placed: Whether its placement group has its resources.
        ready: Whether all its processes are up.
        leaving: Whether one of its nodes will go away.
        urgent: Whether that happens soon.
        keeps: Whether its processes only keep the state, without CPUs and GPUs.
    """

    number: int
    layout: Layout
    placed: bool
    ready: bool
    leaving: bool
    urgent: bool = False
    keeps: bool = False


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
    """

    orders: Orders
    replicas: Sequence[ReplicaView]
    members: Sequence[int]
    settled: bool
    layout: Layout | None
    stored: bool
    most: int
    finishing: bool = False
    keeping: bool = False


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
            return Keep(waiting=not any(replica.placed for replica in usable))
        more_to_come = any(replica.placed and not replica.ready for replica in usable)
        if layout is None and more_to_come and reachable != target:
            return Keep()  # the first gang need not be formed in haste
        ready = [replica.number for replica in usable if replica.ready]
        return Form(tuple(ready[: reachable.dp]), reachable)

    if view.finishing and (target is None or target.per_replica != layout.per_replica):
        return Keep()  # what it would store first is the last checkpoint, which ends the job
    if target is None:
        return Halt(Cause.PAUSED, store=True)
    if target.per_replica != layout.per_replica:
        return Halt(cause, store=True)
    if view.keeping and not any(replica.keeps for replica in view.replicas if replica.number in view.members):
        return Halt(Cause.WAITING_FOR_STORE) if reachable == layout else Keep()
    leaving = [replica for replica in view.replicas if replica.leaving and replica.number in view.members]
    if leaving and reachable is not None:
        return Halt(Cause.NODE_DRAINED)
    if any(replica.urgent for replica in leaving) and not view.finishing:
        return Halt(Cause.NODE_DRAINED, store=True)  # nothing is left that could keep the state
    if reachable is None or reachable.dp == layout.dp:
        return Keep()
    if reachable.dp < layout.dp:
        return Halt(cause)
    if view.finishing or not view.settled:
        return Keep()
    return Halt(Cause.WORKER_BACK if reachable.dp <= view.most else cause)


def _usable(view: View) -> list[ReplicaView]:
    target = view.orders.target
    return [
        replica
        for replica in view.replicas
        if target and replica.layout == target.per_replica and replica.keeps == view.keeping and not replica.leaving
    ]


def replica_set(view: View) -> ReplicaSet:
    """Return which replicas to start and to give up to reach the ordered number."""
    target = view.orders.target
    if target is None:
        return ReplicaSet(0, ())
    usable = _usable(view)
    # The gang's own come first, then those already up, then the older ones.
    ranked = sorted(usable, key=lambda each: (each.number not in view.members, not each.ready, each.number))
    surplus = {replica.number for replica in ranked[target.dp :]}
    unfit = {replica.number for replica in view.replicas} - {replica.number for replica in usable}
    # From the first gang on, any replica may hold part of the state until a gang has loaded it.
    if view.settled or view.stored or view.layout is None:
        to_remove = surplus | unfit
    else:
        to_remove = {replica.number for replica in view.replicas if replica.number in surplus and not replica.ready}
    needed = min(target.dp, len(view.members)) if view.finishing else target.dp
    return ReplicaSet(max(0, needed - len(usable)), tuple(sorted(to_remove - set(view.members))))


# What a gang's controller remembers: replicas, the training gang, and intermediate states. Plain data.


@dataclass
class Replica:
    """The workers of one data parallel rank.

    Attributes:
        number: Its number.
        layout: Its own layout, with dp 1.
        selector: Constraints on its nodes.
        keeps: Whether its workers only keep the state.
        workers: Its workers as last observed; none before it has its resources.
        failed_starts: Number of workers in a row that ended before they were up, by place.
        placed_at: When it was first seen to have its resources, in seconds; ``None`` before that.
    """

    number: int
    layout: Layout
    selector: dict[str, str]
    keeps: bool
    workers: tuple[WorkerStatus, ...] = ()
    failed_starts: Counter[int] = field(default_factory=Counter)
    placed_at: float | None = None

    @property
    def ready(self) -> bool:
        """Whether all its workers are up."""
        return bool(self.workers) and all(worker.place is not None for worker in self.workers)

    @property
    def up(self) -> dict[int, WorkerPlace]:
        """The places of its workers that are up."""
        return {worker.number: worker.place for worker in self.workers if worker.place is not None}

    @property
    def starts_on(self) -> set[str]:
        """The nodes of its workers that are not up yet, as far as they are known."""
        return {worker.node for worker in self.workers if worker.place is None and worker.node is not None}

    @property
    def nodes(self) -> set[str]:
        """The nodes of its workers that are up."""
        return {place.node for place in self.up.values()}


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
    ends: dict[int, RankEnd | None] = field(default_factory=dict)
    halting: Halt | None = None


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
    """A gang has stopped, or could not be formed; its nodes and workers are probed."""

    formation: Formation | None
    detected: float
    reason: Break | None
    unhealthy: Set[int] = frozenset()
    probed: Set[int] = frozenset()


@dataclass(frozen=True)
class Finished:
    """The job has ended or is paused."""


State = Idle | Preparing | Formation | Suspecting | Stopping | Checking | Finished
