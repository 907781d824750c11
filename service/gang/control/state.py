"""What a gang's controller remembers: replicas, the training gang, and intermediate states. Plain data."""

from collections import Counter
from collections.abc import Set
from dataclasses import dataclass, field

from boost_core.config import Layout
from boost_core.messages.reports import Cause
from service.gang.assignment import RankEnd, WorkerPlace, ordered
from service.gang.control.policy import Form, Halt
from service.gang.control.port import WorkerStatus
from service.gang.control.watch import GangWatch


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
    def placed(self) -> bool:
        """Whether it has its resources."""
        return bool(self.workers)

    @property
    def ready(self) -> bool:
        """Whether all its workers are up."""
        return self.placed and all(worker.place is not None for worker in self.workers)

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

    def in_order(self) -> list[int]:
        """Return its workers in the order of their ranks.

        Raises:
            MisplacedRanks: A tensor parallel group spans several nodes.
        """
        workers = list(self.up)
        if self.keeps:  # they exchange little, wherever they are
            return workers
        return [workers[place] for place in ordered(list(self.up.values()), self.layout.tp)]


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
    asked: Set[int] = frozenset()


@dataclass(frozen=True)
class Finished:
    """The job has ended or is paused."""


State = Idle | Preparing | Formation | Suspecting | Stopping | Checking | Finished
