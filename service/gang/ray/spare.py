"""The spare copy on Ray: an actor on a node that the gang does not use, which keeps a copy of the gang's state."""

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import ray
from ray import ObjectRef
from ray.actor import ActorHandle, ActorProxy
from ray.exceptions import RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from boost_core.plan.snapshots import Region, SnapshotIndex, SnapshotKey
from service.gang.assignment import GangContext
from service.gang.control.port import SpareStatus
from service.gang.ray.fork_server import python_of_forks
from service.gang.ray.private_api import free_memory, total_memory

if TYPE_CHECKING:
    from service.gang.ray_train.rank_worker import RankWorker
    from service.gang.worker.spare_copy import Array

CALLS_AT_ONCE = 6  # one that copies, and ranks that read meanwhile
SHARE_TO_LEAVE = 0.1  # of a node's memory, left to others

logger = logging.getLogger(__name__)


class _RemoteRank:
    """A rank in its worker's process."""

    def __init__(self, actor: "ActorProxy[RankWorker]", generation: int, rank: int) -> None:
        self._actor, self._generation, self._rank = actor, generation, rank

    def hold(self) -> SnapshotIndex | None:
        return ray.get(self._actor.hold.remote(self._generation, self._rank))

    def read(self, key: SnapshotKey, regions: Sequence[Region]) -> "list[Array]":
        return ray.get(self._actor.read.remote(key, regions))

    def release(self) -> None:
        self._actor.release.remote()


class SpareHolder:
    """The actor. It takes neither CPUs nor GPUs, so that no job waits for its resources.

    Args:
        title: Its name in Ray's dashboard.
        context: Settings of the service.
    """

    def __init__(self, title: str, context: GangContext) -> None:
        from service.gang.worker.spare_copy import SpareCopy  # not needed by the supervisor

        context.logs.write()
        self._title = title
        self._copy = SpareCopy(lambda: free_memory() - int(SHARE_TO_LEAVE * total_memory()))

    def __repr__(self) -> str:
        return self._title

    @ray.method
    def up(self) -> None:
        """Return once it is up."""

    @ray.method
    def copy(self, generation: int, actors: "Mapping[int, ActorProxy[RankWorker]]") -> tuple[int, int] | None:
        """Copy the newest snapshots of ranks; see ``SpareCopy.copy``."""
        return self._copy.copy([_RemoteRank(actor, generation, rank) for rank, actor in actors.items()])

    @ray.method
    def indexes(self) -> list[SnapshotIndex]:
        """Return the indexes of the snapshots in its memory."""
        return self._copy.indexes()

    @ray.method
    def read(self, key: SnapshotKey, regions: Sequence[Region]) -> "list[Array]":
        """Read parts of a snapshot in its memory."""
        return self._copy.read(key, regions)


class RaySpare:
    """The handle of a spare copy, for the executor's thread.

    Args:
        number: Its number, which no worker of the gang has.
        node: The node to keep it on.
        context: Settings of the service.

    Attributes:
        number: As given.
        actor: Its actor handle; ranks read from it as from a worker.
    """

    def __init__(self, number: int, node: str, context: GangContext) -> None:
        self.number, self._node = number, node
        self.actor: ActorProxy[SpareHolder] = (
            ray.remote(SpareHolder)
            .options(
                num_cpus=0,
                max_concurrency=CALLS_AT_ONCE,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False),
                runtime_env={"py_executable": python_of_forks()},  # ranks placed there later find a warm server
            )
            .remote(f"{context.tag}: spare copy", context)
        )
        self._starting: ObjectRef[None] | None = self.actor.up.remote()
        self._copying: ObjectRef[tuple[int, int] | None] | None = None
        self._kept: tuple[int, int] | None = None
        self._failure: str | None = None

    def status(self) -> SpareStatus:
        """Return its present status."""
        if self._starting is not None and _is_there(self._starting):
            starting, self._starting = self._starting, None
            try:
                ray.get(starting)
            except RayError as error:
                self._failure = _in_words(error)
        if self._copying is not None and _is_there(self._copying):
            copying, self._copying = self._copying, None
            self._take(copying)
        up = self._starting is None and self._failure is None
        return SpareStatus(self.number, self._node, up, self._copying is not None, self._kept, self._failure)

    def copy(self, generation: int, actors: "Mapping[int, ActorProxy[RankWorker]]") -> None:
        """Have it copy ranks' newest snapshots in the background."""
        self._copying = self.actor.copy.remote(generation, dict(actors))

    def end(self) -> None:
        """End it with all that it keeps."""
        ray.kill(cast(ActorHandle[Any], self.actor))

    def _take(self, copied: "ObjectRef[tuple[int, int] | None]") -> None:
        """Take the outcome of a copy. If a copy fails because a rank is gone, the previous one stays in place."""
        try:
            self._kept = ray.get(copied) or self._kept
        except ray.exceptions.RayTaskError as error:
            if isinstance(error, MemoryError):
                self._failure = _in_words(error)
            else:
                logger.info("the spare copy was not renewed: %s", _in_words(error))
        except RayError as error:
            self._failure = _in_words(error)


def _is_there(answer: ObjectRef[Any]) -> bool:
    return bool(ray.wait([answer], timeout=0)[0])


def _in_words(error: RayError) -> str:
    cause = getattr(error, "cause", None) or error
    return str(cause).splitlines()[0]
