"""Ray Train's worker group for one generation, on workers that outlive it."""

from collections.abc import Sequence
from typing import Any, cast

import ray
from ray.actor import ActorHandle
from ray.train.v2._internal.execution.context import DistributedContext
from ray.train.v2._internal.execution.worker_group import (
    ActorMetadata,
    PlacementGroupHandle,
    WorkerGroup,
    WorkerGroupContext,
    WorkerGroupPollStatus,
    WorkerGroupState,
    WorkerGroupStateBuilder,
)
from ray.train.v2._internal.execution.worker_group import Worker as TrainWorker
from ray.train.v2.api.config import ScalingConfig

from service.gang.assignment import WorkerPlace
from service.gang.ray_train.decided import RunWorker

ANSWER_SECONDS = 0.1  # for a worker to answer a poll; a later answer is read with the next one


class GangWorkerGroup(WorkerGroup):
    """Ray Train's worker group for one generation, on workers that outlive it.

    Args:
        workers: The workers, by rank.
        arguments: Ray Train's own arguments.

    Attributes:
        halted: Whether all its ranks have stopped as they were told to.
    """

    def __init__(self, workers: Sequence[RunWorker], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._given = workers
        self.halted = False

    def _start(self) -> None:
        self._start_impl(KeptGroupStateBuilder())

    def _create_placement_group(self, scaling_config: ScalingConfig, worker_group_context: WorkerGroupContext) -> Any:
        return ReservedPlacement()

    def _create_workers(self, *arguments: Any, **more: Any) -> list[TrainWorker]:
        return train_workers(self._given)

    def shutdown(self) -> None:
        """Read the last reports, and shut down."""
        self.poll_status(ANSWER_SECONDS)
        super().shutdown()

    def abort(self) -> None:
        """Read the last reports, and abort."""
        self.poll_status(ANSWER_SECONDS)
        super().abort()

    def poll_status(self, timeout: float | None = None) -> WorkerGroupPollStatus:
        """Return the workers' status; for a halted generation, only their reports."""
        status = super().poll_status(timeout)
        if self.halted:
            status = self._latest_poll_status = WorkerGroupPollStatus({})
        return status


def train_workers(workers: Sequence[RunWorker]) -> list[TrainWorker]:
    """Return workers by rank in Ray Train's form."""
    nodes = [worker.place.node for worker in workers]
    distinct = list(dict.fromkeys(nodes))
    return [
        TrainWorker(
            cast(ActorHandle[Any], worker.actor), _metadata(worker.place), worker.resources,
            DistributedContext(
                world_rank=rank, world_size=len(workers), local_rank=nodes[:rank].count(node),
                local_world_size=nodes.count(node), node_rank=distinct.index(node),
            ),
        )
        for rank, (worker, node) in enumerate(zip(workers, nodes, strict=True))
    ]  # fmt: skip


def _metadata(place: WorkerPlace) -> ActorMetadata:
    gpus = [int(gpu) for gpu in place.accelerators if gpu.isdigit()]  # Ray Train's list of runs takes only numbers
    return ActorMetadata(place.host, place.node, place.address, place.pid, {"GPU": list(gpus)})


class KeptGroupState(WorkerGroupState):
    """The state of a worker group, none of which ends with it."""

    def shutdown(self) -> None:
        """Leave the workers to the gang, and the barrier to the next generation."""


class KeptGroupStateBuilder(WorkerGroupStateBuilder):
    """Builds a ``KeptGroupState``."""

    def build(self) -> WorkerGroupState:
        """Return the state of a group that has started."""
        return KeptGroupState(**vars(super().build()))

    def shutdown(self) -> None:
        """Leave everything in place if a group could not be started."""


class ReservedPlacement(PlacementGroupHandle):
    """The gang's placement groups, one per replica, which the gang creates and removes itself."""

    @property
    def placement_group(self) -> Any:
        """No worker is created through it."""
        return None

    def ready(self) -> Any:
        """Not supported; nothing waits for it."""
        raise NotImplementedError

    def wait(self, timeout_seconds: float = 30) -> bool:
        """Return at once: placement groups are ready before there are workers."""
        return True

    def shutdown(self) -> None:
        """Leave the placement groups in place."""


class NoBarrier:
    """Replaces Ray Train's ``SynchronizationActor``, a separate process where ranks meet when they report.

    Here only rank 0 reports, and the gang's supervisor, which is the actor of this process, answers it.
    """

    def options(self, **_: Any) -> "NoBarrier":
        """Accept any placement."""
        return self

    def remote(self, **_: Any) -> "ActorHandle[Any]":
        """Return the supervisor; see ``Supervisor.broadcast_from_rank_zero``."""
        return cast("ActorHandle[Any]", ray.get_runtime_context().current_actor)
