"""Messages from the executor to Ray Train's controller."""

from collections.abc import Sequence
from dataclasses import dataclass

from ray.actor import ActorProxy

from service.gang.assignment import WorkerPlace
from service.gang.control.port import Finish
from service.gang.ray_train.rank_worker import RankWorker


@dataclass(frozen=True)
class RunWorker:
    """A worker of a generation.

    Attributes:
        actor: Its actor handle.
        place: Where it runs.
        resources: What it takes, by Ray's names.
    """

    actor: ActorProxy[RankWorker]
    place: WorkerPlace
    resources: dict[str, float]


@dataclass(frozen=True)
class FormGeneration:
    """Train a generation on these workers, in the order of their ranks."""

    generation: int
    workers: Sequence[RunWorker]


@dataclass(frozen=True)
class GenerationHalted:
    """All ranks have stopped as they were told to; a worker that ends from now on has not failed."""


@dataclass(frozen=True)
class ShowMessage:
    """Show this message about the gang's state."""

    message: str


Decided = FormGeneration | GenerationHalted | ShowMessage | Finish
