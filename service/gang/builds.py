"""Interface between the scheduler and dataset builds. Importing it does not import Ray."""

from dataclasses import dataclass
from typing import Any, Protocol

from boost_core.config.training import CorpusConfig
from service.models.datasets import DatasetProgress


@dataclass(frozen=True)
class BuildTask:
    """A dataset to build.

    Attributes:
        id: ID of this build.
        tenant: Tenant that owns the dataset.
        corpus: What to build.
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
    """Status of a dataset build.

    Attributes:
        progress: Its progress; ``None`` before it has started.
        lineage: The dataset's lineage, once it is complete.
        problem: Why the build failed.
    """

    progress: DatasetProgress | None = None
    lineage: dict[str, Any] | None = None
    problem: str | None = None


class Builds(Protocol):
    """Starts, watches and ends dataset builds. The Ray implementation is ``service.gang.ray.builds``."""

    def alive(self) -> set[str]:
        """Return the IDs of all builds that are running, or have ended but were not yet acknowledged."""

    def launch(self, task: BuildTask) -> None:
        """Start or resume a build; launching it twice starts one."""

    def poll(self, build_id: str) -> BuildStatus | None:
        """Return a build's status as last heard, without waiting; ``None`` if it is not running."""

    def end(self, build_id: str) -> None:
        """End a build; harmless if it is not running."""
