"""Where a gang's controller ends: the events that it hears, and the decisions that it takes.

Plain data. Workers are named by numbers, which are never used again, and so are replicas.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from boost_core.config import JobSpec
from boost_core.messages.commands import WorkerCommand
from boost_core.plan.snapshots import MemoryState, SnapshotIndex
from service.gang.assignment import Assignment, Message, RankEnd, Rendezvous, WorkerPlace
from service.gang.status import GangPhase, Orders


@dataclass(frozen=True)
class Moment:
    """When an event came.

    Attributes:
        seconds: On a clock that never steps; all seconds in events are on the same.
        utc: For people.
    """

    seconds: float
    utc: datetime


@dataclass(frozen=True)
class WorkerStatus:
    """A worker of a replica. It is up once its place is known; ``failure`` says why it ended before."""

    number: int
    place: WorkerPlace | None = None
    failure: str | None = None


@dataclass(frozen=True)
class SpareStatus:
    """The process that keeps a copy of the gang's state on a node that the gang does not use.

    Attributes:
        number: Its number, which no worker has.
        node: Where it is.
        up: Whether it can be told to copy.
        copying: Whether it copies now.
        kept: Generation and step of the state that is whole there; ``None`` before the first.
        failure: Why it can keep none.
    """

    number: int
    node: str
    up: bool = False
    copying: bool = False
    kept: tuple[int, int] | None = None
    failure: str | None = None


# Events, besides orders, what workers say, and drills and profiles that are asked for


@dataclass(frozen=True)
class RankEnded:
    """A rank's training has ended; ``None``: its process is gone."""

    generation: int
    rank: int
    end: RankEnd | None


@dataclass(frozen=True)
class Observed:
    """What there is after all decisions so far; comes many times a second.

    Attributes:
        replicas: Their workers, tensor parallel group after group; none before a replica has its resources.
        alive: The nodes that the cluster takes for alive.
        leaving: The nodes that will go away, and when; ``None`` where nobody has said.
        spare: The process that keeps a copy on another node, if there is one.
    """

    replicas: Mapping[int, tuple[WorkerStatus, ...]]
    alive: frozenset[str]
    leaving: Mapping[str, float | None]
    spare: SpareStatus | None = None


@dataclass(frozen=True)
class Prepared:
    """Answer to ``Prepare``: where the ranks meet, or why they cannot; and the snapshots that each owner has."""

    rendezvous: Rendezvous | None
    failure: str
    snapshots: Mapping[int, list[SnapshotIndex]]


@dataclass(frozen=True)
class Probed:
    """To ``Probe``: the workers that answer; nodes whose raylets take no connection, and those known to be dead."""

    answering: frozenset[int]
    silent: frozenset[str]
    dead: frozenset[str]


@dataclass(frozen=True)
class StacksDumped:
    """To ``DumpStacks``: by worker; without those that do not answer."""

    stacks: Mapping[int, str]


@dataclass(frozen=True)
class MemoryMeasured:
    """To ``MeasureMemory``: bytes that are free on each worker's node; without those that do not answer."""

    free: Mapping[int, int]


@dataclass(frozen=True)
class IdleNodesFound:
    """To ``FindIdleNodes``: those, with the one first of which the least is taken."""

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
        selector: What its nodes must have, or must not be; as ``node_selector`` says it.
        keep_on: For workers that are to keep the state alone, without CPUs and GPUs: the node of each.
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
    """End a worker, if it has not ended, and start another in its place."""

    worker: int


@dataclass(frozen=True)
class KillWorkers:
    """End workers; ``stopped``: they may be so stuck that they would not hear of it."""

    workers: tuple[int, ...]
    stopped: bool = False


@dataclass(frozen=True)
class Prepare:
    """Open a rendezvous at the worker that is to be rank 0, and ask workers what snapshots they have."""

    first: int
    owners: tuple[int, ...]


@dataclass(frozen=True)
class StartTraining:
    """Have workers train, by rank, from a state in the memory of workers; ``None`` to look for a checkpoint."""

    workers: tuple[int, ...]
    assignments: tuple[Assignment, ...]
    recovery: MemoryState[int] | None


@dataclass(frozen=True)
class HaltTraining:
    """Have workers stop after the same step; ``store``: once they have written a checkpoint."""

    workers: tuple[int, ...]
    store: bool


@dataclass(frozen=True)
class AbortTraining:
    """Have collectives fail that wait for a rank that is gone."""

    workers: tuple[int, ...]


@dataclass(frozen=True)
class SendCommand:
    """Hand a drill or a profile to a worker."""

    worker: int
    command: WorkerCommand


@dataclass(frozen=True)
class Probe:
    """Find out which workers answer and which nodes are gone."""

    workers: tuple[int, ...]
    nodes: frozenset[str]


@dataclass(frozen=True)
class DumpStacks:
    """Ask workers what each of their threads does."""

    workers: tuple[int, ...]


@dataclass(frozen=True)
class MeasureMemory:
    """Ask workers how much memory of their nodes is free."""

    workers: tuple[int, ...]


@dataclass(frozen=True)
class FindIdleNodes:
    """Find nodes of which enough is free.

    Attributes:
        resources: So much, by Ray's names.
        selector: What they must have, or must not be; as ``node_selector`` says it.
    """

    resources: Mapping[str, float]
    selector: Mapping[str, str]


@dataclass(frozen=True)
class StartSpare:
    """Start the process that is to keep a copy of the gang's state."""

    node: str


@dataclass(frozen=True)
class CopyToSpare:
    """Have it copy the newest snapshots of workers, by their ranks in a generation, behind their backs."""

    generation: int
    workers: Mapping[int, int]


@dataclass(frozen=True)
class EndSpare:
    """End it, with what it keeps."""


@dataclass(frozen=True)
class Finish:
    """End all of the gang, in a final phase."""

    phase: GangPhase
    message: str


Question = Prepare | Probe | DumpStacks | MeasureMemory | FindIdleNodes
Decision = (
    StartReplica | RemoveReplica | ReplaceWorker | KillWorkers | StartTraining | HaltTraining | AbortTraining
    | SendCommand | StartSpare | CopyToSpare | EndSpare | Finish | Question
)  # fmt: skip
