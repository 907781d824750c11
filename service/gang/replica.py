"""Replicas on Ray: an actor a worker, in a placement group with a bundle a tensor parallel group.

Workers that do no more than keep a job's state are in no placement group, and take neither CPUs nor GPUs.
"""

import os
import signal
from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import ray
from ray.actor import ActorHandle, ActorProxy
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from boost_core.messages.commands import WorkerCommand
from boost_core.plan.snapshots import MemoryState, SnapshotIndex, SnapshotKey
from service.gang.assignment import Assignment, GangContext, RankEnd, Rendezvous, WorkerPlace
from service.gang.port import StartReplica, WorkerStatus
from service.gang.ray_private import free_memory
from service.gang.resources import worker_resources

if TYPE_CHECKING:
    import numpy as np

    from boost_core.train import Region
    from service.gang.supervisor import Supervisor

CALLS_AT_ONCE = 8  # of a worker: training, and what is asked of it meanwhile

_numbers = count(1)  # of workers, over all of a gang's life


class RankActor:
    """The actor of a worker. It loads what that needs in its own process, so that its supervisor need not import torch.

    Args:
        title: What Ray's dashboard shows of it.
        number: The worker's number.
        supervisor: Handle of the gang's ``Supervisor`` actor.
        context: Settings of the service that workers need.
    """

    def __init__(self, title: str, number: int, supervisor: ActorProxy["Supervisor"], context: GangContext) -> None:
        from service.gang.worker import Worker

        runtime = ray.get_runtime_context()
        self._title = title
        self._owners: dict[int, ActorProxy[RankActor]] = {}
        self._worker = Worker(
            number, context,
            node=runtime.get_node_id(),
            actor=str(runtime.get_actor_id()),
            address=ray.util.get_node_ip_address(),  # type: ignore[no-untyped-call]
            gpus=tuple(map(str, runtime.get_accelerator_ids().get("GPU", ()))),
            push=lambda message: ray.get(supervisor.push.remote(message)),
            read=lambda owner, key, regions: ray.get(self._owners[owner].read.remote(key, regions)),
        )  # fmt: skip

    def __repr__(self) -> str:
        return self._title

    @ray.method
    def place(self) -> WorkerPlace:
        """Where it is; answers when it is up."""
        return self._worker.place

    @ray.method
    def rendezvous(self) -> Rendezvous:
        """Open the place where the ranks of the next gang meet."""
        return self._worker.rendezvous()

    @ray.method
    def train(
        self, assignment: Assignment, recovery: MemoryState[int] | None, owners: dict[int, "ActorProxy[RankActor]"]
    ) -> RankEnd:
        """Train as a rank; ``owners`` are the workers that have parts of the state to continue from."""
        self._owners = owners
        return self._worker.train(assignment, recovery)

    @ray.method
    def halt(self, store: bool) -> None:
        """Have the gang stop after a step; ``store``: once it has written a checkpoint."""
        self._worker.halt(store)

    @ray.method
    def abort(self) -> None:
        """Have collectives fail that wait for a rank that is gone."""
        self._worker.abort()

    @ray.method
    def indexes(self) -> list[SnapshotIndex]:
        """What of the state is in its memory."""
        return self._worker.indexes()

    @ray.method
    def read(self, key: SnapshotKey, regions: Sequence["Region"]) -> "list[np.ndarray[Any, Any]]":
        """Parts of a snapshot that is in its memory."""
        return self._worker.read(key, regions)

    @ray.method
    def free_memory(self) -> int:
        """Bytes of its node's memory, or of its container's, that nobody uses."""
        return free_memory()

    @ray.method
    def stacks(self) -> str:
        """What each of its threads is doing."""
        return self._worker.stacks()

    @ray.method
    def command(self, command: WorkerCommand) -> None:
        """Bring a fault about in its process, or trace its next steps."""
        self._worker.command(command)


class WorkerHandle:
    """One worker of a replica.

    Args:
        options: What it takes, and where it is to be, in Ray's words.
        supervisor: Handle of the ``Supervisor`` actor.
        context: Settings of the service that workers need.

    Attributes:
        number: Its number among all workers of the gang.
        actor: Its handle.
    """

    def __init__(self, options: Mapping[str, Any], supervisor: ActorProxy["Supervisor"], context: GangContext) -> None:
        self.number = next(_numbers)
        self.actor: ActorProxy[RankActor] = (
            ray.remote(RankActor)
            .options(max_concurrency=CALLS_AT_ONCE, **options)
            .remote(f"{context.tag}: worker {self.number}", self.number, supervisor, context)
        )
        self._placing = self.actor.place.remote()
        self._place: WorkerPlace | None = None

    def status(self) -> WorkerStatus:
        """Where it is, if it is up."""
        if self._place is None and ray.wait([self._placing], timeout=0)[0]:
            try:
                self._place = ray.get(self._placing)
            except RayActorError as error:
                return WorkerStatus(self.number, failure=str(error))
        return WorkerStatus(self.number, self._place)

    def kill(self, stopped: bool = False) -> None:
        """End its process at once; ``stopped``: from outside, too, since Ray asks the process itself to end."""
        ray.kill(cast(ActorHandle[RankActor], self.actor))
        if stopped and self._place is not None:
            there = NodeAffinitySchedulingStrategy(self._place.node, soft=False)
            _kill_process.options(scheduling_strategy=there).remote(self._place.pid)


@ray.remote(num_cpus=0, max_retries=0)
def _kill_process(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class RayReplica:
    """The workers of one data parallel rank, tensor parallel group after group.

    Args:
        wanted: What it is to be.
        supervisor: Handle of the ``Supervisor`` actor.
        context: Settings of the service that workers need.

    Attributes:
        workers: None before it has its resources.
    """

    def __init__(self, wanted: StartReplica, supervisor: ActorProxy["Supervisor"], context: GangContext) -> None:
        self._supervisor, self._context, self._keep_on = supervisor, context, wanted.keep_on
        spec, tag = wanted.spec, context.tag
        self._tensor, self._stages = spec.parallelism.tensor_parallel_size, spec.parallelism.pipeline_parallel_size
        self._each = worker_resources(spec)
        bundle = {resource: amount * self._tensor for resource, amount in self._each.items()}
        self._group = (
            None
            if wanted.keep_on
            else placement_group(
                [bundle] * self._stages,
                strategy=spec.resources.placement,
                name=f"{tag.name} ({tag.job_id}-{tag.attempt}-{wanted.number})",  # no two have one name
                bundle_label_selector=[dict(wanted.selector)] * self._stages if wanted.selector else None,
            )
        )
        self.workers: list[WorkerHandle] = []

    def status(self) -> tuple[WorkerStatus, ...]:
        """Its workers, which are started once its resources are reserved."""
        if not self.workers and self._reserved():
            self.workers = [self._started(place) for place in range(self._tensor * self._stages)]
        return tuple(worker.status() for worker in self.workers)

    def replace(self, worker: WorkerHandle) -> None:
        """End a worker, and put another into its place, on the same resources."""
        worker.kill()
        place = self.workers.index(worker)
        self.workers[place] = self._started(place)

    def remove(self) -> None:
        """End its workers and free its resources."""
        for worker in self.workers:
            worker.kill()
        if self._group is not None:
            with suppress(RayError):  # a cluster that is going down frees it by itself
                remove_placement_group(self._group)

    def _reserved(self) -> bool:
        # Ray's own ready() would start a process on the nodes to find out, which takes seconds where they are busy.
        return self._group is None or placement_group_table(self._group).get("state") == "CREATED"

    def _started(self, place: int) -> WorkerHandle:
        options: dict[str, Any]
        if self._group is None:
            there = NodeAffinitySchedulingStrategy(self._keep_on[place], soft=True)
            options = {"num_cpus": 0, "num_gpus": 0, "scheduling_strategy": there}
        else:
            bundle = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=place // self._tensor)
            gpus = self._each.get("GPU", 0)
            options = {"num_cpus": self._each["CPU"], "num_gpus": gpus, "scheduling_strategy": bundle}
        return WorkerHandle(options, self._supervisor, self._context)
