"""What the scheduler asks of the making of a dataset, and what it hears back. Importing it does not import Ray."""

from dataclasses import dataclass
from typing import Any, Protocol

from boost_core.config.dataset import CorpusConfig
from service.models.datasets import DatasetProgress


@dataclass(frozen=True)
class BuildTask:
    """A dataset to be made.

    Attributes:
        id: Of this making of it.
        tenant: Whose it is.
        corpus: What is made.
        url: Where its shards go.
        credentials: Name of the tenant's secret for ``s3://``, if it has one.
        cpus: Maximum CPUs at a time.
    """

    id: str
    tenant: str
    corpus: CorpusConfig
    url: str
    credentials: str | None
    cpus: float


@dataclass(frozen=True)
class BuildStatus:
    """How far the making of a dataset is.

    Attributes:
        progress: How far; ``None`` before it has begun.
        lineage: What it holds, when it is whole.
        problem: Why it has failed.
    """

    progress: DatasetProgress | None = None
    lineage: dict[str, Any] | None = None
    problem: str | None = None


class Builds(Protocol):
    """Starts, watches and ends the making of datasets. The Ray implementation is ``service.gang.ray.builds``."""

    def alive(self) -> set[str]:
        """The ids of all that is being made, or has come to its end and was not taken note of."""

    def launch(self, task: BuildTask) -> None:
        """Begin to make a dataset, or go on; launching it twice makes it once."""

    def poll(self, build_id: str) -> BuildStatus | None:
        """How far one is, as far as has been heard; ``None``: it is not being made. Does not wait."""

    def end(self, build_id: str) -> None:
        """End the making of a dataset; harmless if it is not being made."""
