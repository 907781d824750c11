"""Replicas on Ray: an actor per worker, in a placement group with a bundle per tensor parallel group.

Workers that only keep a job's state are in no placement group, and take neither CPUs nor GPUs.
"""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from itertools import count
from typing import TYPE_CHECKING, Any, cast

import psutil
import ray
from ray import ObjectRef
from ray.actor import ActorHandle, ActorProxy
from ray.exceptions import RayActorError, RayError
from ray.util.placement_group import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
    SchedulingStrategyT,
)

from boost_core.config import Layout
from service.gang.assignment import GangContext, WorkerPlace
from service.gang.control.port import StartReplica, WorkerStatus
from service.gang.ray.fork_server import python_of_forks
from service.gang.ray.node import END_SECONDS
from service.gang.resources import worker_resources

if TYPE_CHECKING:
    from service.gang.ray.supervisor import Supervisor
    from service.gang.ray_train.decided import RunWorker

_numbers = count(1)  # of workers, over the gang's whole life


def next_number() -> int:
    """Return a number that no worker has."""
    return next(_numbers)


class WorkerHandle:
    """One worker of a replica.

    Args:
        resources: What it takes, by Ray's names.
        where: Where to place it.
        supervisor: Handle of the ``Supervisor`` actor.
        context: Settings of the service that workers need.
        node: The node that is, if known.

    Attributes:
        number: Its number among all workers of the gang.
        actor: Its actor handle.
        resources: As given.
    """

    def __init__(
        self, resources: Mapping[str, float], where: SchedulingStrategyT, supervisor: ActorProxy["Supervisor"],
        context: GangContext, node: str | None,
    ) -> None:  # fmt: skip
        from service.gang.ray_train.rank_worker import CALLS_AT_ONCE, RankWorker

        self.number, self.resources = next_number(), dict(resources)
        self.actor: ActorProxy[RankWorker] = (
            ray.remote(RankWorker)
            .options(
                max_concurrency=CALLS_AT_ONCE,
                num_cpus=resources.get("CPU", 0),
                num_gpus=resources.get("GPU", 0),
                scheduling_strategy=where,
                runtime_env={"py_executable": python_of_forks()},
            )
            .remote(f"{context.tag}: worker {self.number}", self.number, supervisor, context)
        )
        self._node, self._placing = node, self.actor.place.remote()
        self._place: WorkerPlace | None = None

    def status(self) -> WorkerStatus:
        """Return its status, with its place if it is up."""
        if self._place is None and ray.wait([self._placing], timeout=0)[0]:
            try:
                self._place = ray.get(self._placing)
            except RayActorError as error:
                return WorkerStatus(self.number, failure=str(error), node=self._node)
        return WorkerStatus(self.number, self._place, node=self._node)

    def as_run_worker(self) -> "RunWorker":
        """Return this worker, which is up, as a worker of the run."""
        from service.gang.ray_train.decided import RunWorker

        assert self._place is not None
        return RunWorker(self.actor, self._place, self.resources)

    def kill(self, stopped: bool = False) -> None:
        """End its process at once; ``stopped``: also from outside, since Ray asks the process itself to end."""
        ray.kill(cast(ActorHandle[Any], self.actor))
        if stopped and self._place is not None:
            end_processes(self._place.node, [self._place.pid], 0.0)


def end_processes(node: str, pids: Sequence[int], seconds: float) -> ObjectRef[list[int]]:
    """Have actors' processes on a node killed unless they end by themselves; return the answer: those that are left.

    Args:
        node: The node.
        pids: Their process IDs.
        seconds: How long to wait until they end.
    """
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    return _end_processes.options(scheduling_strategy=there).remote(pids, seconds)


@ray.remote(num_cpus=0, max_retries=0)
def _end_processes(pids: Sequence[int], seconds: float) -> list[int]:
    found: list[psutil.Process] = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if any(part.startswith("ray::") for part in process.cmdline()):  # and not another with the same number
                found.append(process)
    _, lasting = psutil.wait_procs(found, seconds)
    for process in lasting:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _, left = psutil.wait_procs(lasting, END_SECONDS)
    return [process.pid for process in left]


class RayReplica:
    """The workers of one data parallel rank, tensor parallel group after group.

    Args:
        wanted: The requested replica.
        supervisor: Handle of the ``Supervisor`` actor.
        context: Settings of the service that workers need.

    Attributes:
        workers: Its workers; empty before it has its resources.
    """

    def __init__(self, wanted: StartReplica, supervisor: ActorProxy["Supervisor"], context: GangContext) -> None:
        self._supervisor, self._context, self._keep_on = supervisor, context, wanted.keep_on
        spec, tag = wanted.spec, context.tag
        layout = Layout.of(spec.parallelism)
        self._tensor, self._count = layout.tp, layout.per_replica.world_size // layout.tp
        self._each = worker_resources(spec)
        bundle = {resource: amount * self._tensor for resource, amount in self._each.items()}
        self._group = (
            None
            if wanted.keep_on
            else placement_group(
                [bundle] * self._count,
                strategy=spec.resources.placement,
                name=f"{tag.name} ({tag.job_id}-{tag.attempt}-{wanted.number})",  # unique names
                bundle_label_selector=[dict(wanted.selector)] * self._count if wanted.selector else None,
            )
        )
        self._nodes: Mapping[int, str] = {}  # of its bundles
        self.workers: list[WorkerHandle] = []

    def status(self) -> tuple[WorkerStatus, ...]:
        """Return the status of its workers, which are started once its resources are reserved."""
        if not self.workers and self._reserved():
            self.workers = [self._started(place) for place in range(self._tensor * self._count)]
        return tuple(worker.status() for worker in self.workers)

    def replace(self, worker: WorkerHandle) -> None:
        """End a worker, and start another in its place on the same resources."""
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
        # Ray's own ready() would start a process on the nodes to find out, which takes seconds if they are busy.
        if self._group is None:
            return True
        table = placement_group_table(self._group)
        self._nodes = table.get("bundles_to_node_id", {})
        return bool(table.get("state") == "CREATED")

    def _started(self, place: int) -> WorkerHandle:
        if self._group is None:
            there = NodeAffinitySchedulingStrategy(self._keep_on[place], soft=True)
            return WorkerHandle({}, there, self._supervisor, self._context, self._keep_on[place])
        number = place // self._tensor
        bundle = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
        return WorkerHandle(self._each, bundle, self._supervisor, self._context, self._nodes.get(number))
