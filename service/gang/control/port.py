"""The interface of a gang's controller: the events it receives, and the decisions it makes.

Plain data. Workers and replicas are identified by numbers that are never reused.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from boost_core.config import JobSpec
from boost_core.messages import Steer, WorkerCommand
from boost_core.plan.snapshots import MemoryState, SnapshotIndex
from service.gang.assignment import Assignment, Message, RankEnd, Rendezvous, WorkerPlace
from service.gang.status import GangPhase, Orders


@dataclass(frozen=True)
class Moment:
    """When an event occurred.

    Attributes:
        seconds: Time on a monotonic clock, which all times in events refer to.
        utc: Wall-clock time.
    """

    seconds: float
    utc: datetime


@dataclass(frozen=True)
class WorkerStatus:
    """A worker of a replica.

    Attributes:
        number: Its number.
        place: Where it runs, once it is up.
        failure: Why it ended before it was up.
        node: The node on which it was started, if known.
    """

    number: int
    place: WorkerPlace | None = None
    failure: str | None = None
    node: str | None = None


@dataclass(frozen=True)
class SpareStatus:
    """The process that keeps a copy of the gang's state on a node that the gang does not use.

    Attributes:
        number: Its number, distinct from all workers' numbers.
        node: The node it is on.
        busy: Whether it is starting or copying now.
        saved: Generation and step of the complete state it has; ``None`` before the first.
        failure: Why it cannot keep a copy.
    """

    number: int
    node: str
    busy: bool = True
    saved: tuple[int, int] | None = None
    failure: str | None = None


# Events, besides orders, workers' messages, and requested drills and profiles


@dataclass(frozen=True)
class RankEnded:
    """A rank's training has ended; ``end`` is ``None`` if its process is gone."""

    generation: int
    rank: int
    end: RankEnd | None


@dataclass(frozen=True)
class Observed:
    """The state of things after all decisions so far; sent many times per second.

    Attributes:
        replicas: Each replica's workers, tensor parallel group after group; none before it has its resources.
        alive: The nodes that the cluster considers alive.
        leaving: The nodes that will go away, and when; ``None`` if not known.
        spare: The process that keeps a copy on another node, if there is one.
    """

    replicas: Mapping[int, tuple[WorkerStatus, ...]]
    alive: frozenset[str]
    leaving: Mapping[str, float | None]
    spare: SpareStatus | None = None


@dataclass(frozen=True)
class Prepared:
    """Answer to ``Prepare``: where the ranks meet, or why they cannot, and the snapshots of each owner."""

    rendezvous: Rendezvous | None
    failure: str
    snapshots: Mapping[int, list[SnapshotIndex]]


@dataclass(frozen=True)
class Probed:
    """Answer to ``Probe``: workers that answer, nodes whose raylets accept no connection, and dead nodes."""

    answering: frozenset[int]
    silent: frozenset[str]
    dead: frozenset[str]


@dataclass(frozen=True)
class StacksDumped:
    """Answer to ``DumpStacks``: the stacks by worker, without workers that do not answer."""

    stacks: Mapping[int, str]


@dataclass(frozen=True)
class MemoryMeasured:
    """Answer to ``MeasureMemory``: free bytes on each worker's node, without workers that do not answer."""

    free: Mapping[int, int]


@dataclass(frozen=True)
class IdleNodesFound:
    """Answer to ``FindIdleNodes``: the nodes found, the least used first."""

    nodes: tuple[str, ...]


Answer = Prepared | Probed | StacksDumped | MemoryMeasured | IdleNodesFound
Event = Orders | Message | WorkerCommand | RankEnded | Observed | Answer


# Decisions


@dataclass(frozen=True)
class StartReplica:
    """Reserve a replica's resources, and start its workers once it has them.

    Attributes:
        number: Its number.
        spec: The job; its parallelism has the replica's layout.
        selector: Constraints on its nodes, as from ``node_selector``.
        keep_on: For workers that only keep the state, without CPUs and GPUs: the node of each.
    """

    number: int
    spec: JobSpec
    selector: Mapping[str, str]
    keep_on: Sequence[str] = ()


@dataclass(frozen=True)
class RemoveReplica:
    """End a replica's workers and free its resources."""

    number: int


@dataclass(frozen=True)
class ReplaceWorker:
    """End a worker, unless it has ended, and start another in its place."""

    worker: int


@dataclass(frozen=True)
class KillWorkers:
    """End workers; ``stopped``: they may be too stuck to react to a request."""

    workers: tuple[int, ...]
    stopped: bool = False


@dataclass(frozen=True)
class Prepare:
    """Open a rendezvous at the worker that will be rank 0, and ask workers which snapshots they have."""

    first: int
    owners: tuple[int, ...]


@dataclass(frozen=True)
class StartTraining:
    """Start training on workers, by rank, from a state in the memory of workers; ``None``: look for a checkpoint."""

    workers: tuple[int, ...]
    assignments: tuple[Assignment, ...]
    recovery: MemoryState[int] | None


@dataclass(frozen=True)
class HaltTraining:
    """Stop workers after the same step; with ``store``, once they have written a checkpoint."""

    workers: tuple[int, ...]
    store: bool


@dataclass(frozen=True)
class AbortTraining:
    """Make collectives fail that wait for a rank that is gone."""

    workers: tuple[int, ...]


@dataclass(frozen=True)
class SendCommand:
    """Send a drill, a profile or a change of values to a worker."""

    worker: int
    command: WorkerCommand | Steer


@dataclass(frozen=True)
class Probe:
    """Find out which workers answer and which nodes are gone."""

    workers: tuple[int, ...]
    nodes: frozenset[str]


@dataclass(frozen=True)
class DumpStacks:
    """Ask workers what each of their threads is doing."""

    workers: tuple[int, ...]


@dataclass(frozen=True)
class MeasureMemory:
    """Ask workers how much memory is free on their nodes."""

    workers: tuple[int, ...]


@dataclass(frozen=True)
class FindIdleNodes:
    """Find nodes with enough free resources.

    Attributes:
        resources: The resources that must be free, by Ray's names.
        selector: Constraints on the nodes, as from ``node_selector``.
    """

    resources: Mapping[str, float]
    selector: Mapping[str, str]


@dataclass(frozen=True)
class StartSpare:
    """Start the process that will keep a copy of the gang's state."""

    node: str


@dataclass(frozen=True)
class CopyToSpare:
    """Have it copy the newest snapshots of workers, by their ranks in a generation, without involving them."""

    generation: int
    workers: Mapping[int, int]


@dataclass(frozen=True)
class EndSpare:
    """End it, along with its copy."""


@dataclass(frozen=True)
class Finish:
    """End the whole gang, in a final phase."""

    phase: GangPhase
    message: str


Question = Prepare | Probe | DumpStacks | MeasureMemory | FindIdleNodes
Decision = (
    StartReplica | RemoveReplica | ReplaceWorker | KillWorkers | StartTraining | HaltTraining | AbortTraining
    | SendCommand | StartSpare | CopyToSpare | EndSpare | Finish | Question
)  # fmt: skip
