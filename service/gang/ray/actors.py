"""A gang's actors on Ray, besides its supervisor: replicas of workers, and the spare copy.

A replica has an actor per worker, in a placement group with a bundle per tensor parallel group. Workers that only keep
a job's state are in no placement group, and take neither CPUs nor GPUs. The spare copy is an actor on a node that the
gang does not use, which keeps a copy of the gang's state.
"""

import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar, cast

import psutil
import ray
from ray.actor import ActorHandle, ActorProxy
from ray.exceptions import RayError, RayTaskError
from ray.util import scheduling_strategies as strategies
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from boost_core.config import Layout
from boost_core.plan.snapshots import Region, SnapshotIndex, SnapshotKey
from service.gang.assignment import GangContext, WorkerPlace, worker_resources
from service.gang.control.port import SpareStatus, StartReplica, WorkerStatus
from service.gang.ray.fork_server import PYTHON_OF_FORKS
from service.gang.ray.private_api import free_memory

if TYPE_CHECKING:
    from service.gang.ray_train.rank_worker import RankWorker
    from service.gang.worker.spare_copy import Array

KILL_SECONDS = 5.0  # for a killed process to be gone
SPARE_CALLS_AT_ONCE = 6  # one that copies, and ranks that read meanwhile
SHARE_TO_LEAVE = 0.1  # of a node's memory, left to others by a spare copy

T = TypeVar("T")

logger = logging.getLogger(__name__)

_numbers = count(1)  # of workers and spare copies, over the life of the gang's supervisor


class WorkerHandle:
    """One worker of a replica.

    Args:
        resources: What it takes, by Ray's names.
        where: Where to place it.
        supervisor: Handle of the supervisor's actor.
        context: Settings of the service that workers need.
        node: The node that is, if known.

    Attributes:
        number: Its number among all workers of the gang.
        actor: Its actor handle.
        place: Where it runs, once ``status`` has seen it up.
        resources: As given.
    """

    def __init__(
        self, resources: Mapping[str, float], where: strategies.SchedulingStrategyT, supervisor: ActorHandle[Any],
        context: GangContext, node: str | None,
    ) -> None:  # fmt: skip
        from service.gang.ray_train.rank_worker import CALLS_AT_ONCE, RankWorker

        self.number, self.resources = next(_numbers), dict(resources)
        cpus, gpus = resources.get("CPU", 0), resources.get("GPU", 0)
        actor = _forked(RankWorker, CALLS_AT_ONCE, where, num_cpus=cpus, num_gpus=gpus)
        title = f"{context.tag}: worker {self.number}"
        self.actor: ActorProxy[RankWorker] = actor.remote(title, self.number, supervisor, context)
        self._node, self._placing = node, self.actor.place.remote()
        self.place: WorkerPlace | None = None

    def status(self) -> WorkerStatus:
        """Return its status, with its place if it is up."""
        failure = None
        if self.place is None and ready([self._placing], 0):
            try:
                self.place = ray.get(self._placing)
            except RayError as error:  # not only RayActorError: Ray's memory monitor may have killed it
                failure = str(error)
        return WorkerStatus(self.number, self.place, failure, self._node)

    def kill(self, stopped: bool = False) -> None:
        """End its process at once; ``stopped``: also from outside, since Ray asks the process itself to end."""
        ray.kill(cast(ActorHandle[Any], self.actor))
        if stopped and self.place is not None:
            end_processes(self.place.node, [self.place.pid], 0.0)


def _forked(actor: Any, calls_at_once: int, where: strategies.SchedulingStrategyT, **takes: float) -> Any:
    """A class of actors whose processes are forks of their nodes' fork servers."""
    forks = {"py_executable": PYTHON_OF_FORKS}
    options = {"max_concurrency": calls_at_once, "scheduling_strategy": where, "runtime_env": forks}
    return ray.remote(actor).options(**options, **takes)


def ready(calls: Iterable[ray.ObjectRef[T]], seconds: float) -> list[ray.ObjectRef[T]]:
    """Wait for calls, and return those that have ended, with a result or an error.

    Args:
        calls: The calls; there may be none.
        seconds: How long to wait unless all have ended before.
    """
    pending = list(calls)
    return ray.wait(pending, num_returns=len(pending), timeout=seconds)[0] if pending else []


def end_processes(node: str, pids: Sequence[int], seconds: float) -> ray.ObjectRef[list[int]]:
    """Have actors' processes on a node killed unless they end by themselves; return the answer: those that are left.

    Args:
        node: The node.
        pids: Their process IDs.
        seconds: How long to wait until they end.
    """
    strategy = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
    return _end_processes.options(scheduling_strategy=strategy).remote(pids, seconds)


@ray.remote(num_cpus=0, max_retries=0)
def _end_processes(pids: Sequence[int], seconds: float) -> list[int]:
    processes: list[psutil.Process] = []
    for pid in pids:
        with suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if any(part.startswith("ray::") for part in process.cmdline()):  # and not another with the same number
                processes.append(process)
    _, running = psutil.wait_procs(processes, seconds)
    for process in running:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _, left = psutil.wait_procs(running, KILL_SECONDS)
    return [process.pid for process in left]


class RayReplica:
    """The workers of one data parallel rank, tensor parallel group after group.

    Args:
        request: The requested replica.
        supervisor: Handle of the supervisor's actor.
        context: Settings of the service that workers need.

    Attributes:
        workers: Its workers; empty before it has its resources.
    """

    def __init__(self, request: StartReplica, supervisor: ActorHandle[Any], context: GangContext) -> None:
        self._supervisor, self._context, self._keep_on = supervisor, context, request.keep_on
        spec, tag = request.spec, context.tag
        layout = Layout.of(spec.parallelism)
        self._tensor, self._groups = layout.tp, layout.per_replica.world_size // layout.tp
        self._resources = worker_resources(spec)
        self._placement: PlacementGroup | None = None
        if not request.keep_on:
            name = f"{tag.name} ({tag.job_id}-{tag.attempt}-{request.number})"  # unique
            labels = [dict(request.selector)] * self._groups if request.selector else None
            bundles = [{resource: amount * self._tensor for resource, amount in self._resources.items()}] * self._groups
            self._placement = placement_group(bundles, spec.resources.placement, name, bundle_label_selector=labels)
        self._nodes: Mapping[int, str] = {}  # of its bundles
        self.workers: list[WorkerHandle] = []
        self._all_up: tuple[WorkerStatus, ...] | None = None

    def status(self) -> tuple[WorkerStatus, ...]:
        """Return the status of its workers, which are started once its resources are reserved.

        Once all are up it is the same object as long as none of them is replaced.
        """
        if self._all_up is not None:
            return self._all_up
        if not self.workers:
            reserved = self._placement is None
            if self._placement is not None:
                # Ray's own ready() would start a process on the nodes, which takes seconds if they are busy.
                table = placement_group_table(self._placement)
                self._nodes, reserved = table.get("bundles_to_node_id", {}), table.get("state") == "CREATED"
            if reserved:
                self.workers = [self.start(place) for place in range(self._tensor * self._groups)]
        workers = tuple(worker.status() for worker in self.workers)
        if workers and all(worker.place is not None for worker in workers):
            self._all_up = workers
        return workers

    def remove(self) -> None:
        """End its workers and free its resources."""
        for worker in self.workers:
            worker.kill()
        if self._placement is not None:
            with suppress(RayError):  # a cluster that is going down frees it by itself
                remove_placement_group(self._placement)

    def start(self, place: int) -> WorkerHandle:
        """Start a worker on the resources of a place."""
        self._all_up = None
        if self._placement is None:
            node = strategies.NodeAffinitySchedulingStrategy(self._keep_on[place], soft=True)
            return WorkerHandle({}, node, self._supervisor, self._context, self._keep_on[place])
        number = place // self._tensor
        bundle = strategies.PlacementGroupSchedulingStrategy(self._placement, placement_group_bundle_index=number)
        return WorkerHandle(self._resources, bundle, self._supervisor, self._context, self._nodes.get(number))


# The spare copy


class SpareHolder:
    """The actor. It takes neither CPUs nor GPUs, so that no job waits for its resources.

    Args:
        title: Its name in Ray's dashboard.
        context: Settings of the service.
    """

    def __init__(self, title: str, context: GangContext) -> None:
        from service.gang.worker.spare_copy import SpareCopy  # not needed by the supervisor

        context.write_logs()
        self._title = title
        self._copy = SpareCopy(partial(free_memory, SHARE_TO_LEAVE))

    def __repr__(self) -> str:
        return self._title

    @ray.method
    def copy(self, generation: int, actors: "Mapping[int, ActorProxy[RankWorker]]") -> tuple[int, int] | None:
        """Copy the newest snapshots of ranks, if there are any; see ``SpareCopy.copy``."""
        from service.gang.worker.spare_copy import Rank

        ranks = [
            Rank(partial(_call, actor.hold, generation, rank), partial(_call, actor.read), actor.release.remote)
            for rank, actor in actors.items()
        ]
        return self._copy.copy(ranks)

    @ray.method
    def indexes(self) -> list[SnapshotIndex]:
        """Return the indexes of the snapshots in its memory."""
        return self._copy.indexes()

    @ray.method
    def read(self, key: SnapshotKey, regions: Sequence[Region]) -> "list[Array]":
        """Read parts of a snapshot in its memory."""
        return self._copy.read(key, regions)


def _call(method: Any, *arguments: Any) -> Any:
    return ray.get(method.remote(*arguments))


class RaySpare:
    """The handle of a spare copy, for the executor's thread.

    Args:
        node: The node to keep it on.
        context: Settings of the service.

    Attributes:
        number: Its number, which no worker of the gang has.
        actor: Its actor handle; ranks read from it as from a worker.
        copying: Generation and step of the copy that it makes now, once it is made; ``None``: it makes none. The first
            is a copy of no ranks, which ends once it is up.
    """

    def __init__(self, node: str, context: GangContext) -> None:
        self.number, self._node = next(_numbers), node
        where = strategies.NodeAffinitySchedulingStrategy(node, soft=False)
        actor = _forked(SpareHolder, SPARE_CALLS_AT_ONCE, where, num_cpus=0)  # ranks placed there find a warm server
        self.actor: ActorProxy[SpareHolder] = actor.remote(f"{context.tag}: spare copy", context)
        self.copying: ray.ObjectRef[tuple[int, int] | None] | None = self.actor.copy.remote(0, {})
        self._saved: tuple[int, int] | None = None
        self._failure: str | None = None

    def status(self) -> SpareStatus:
        """Return its present status."""
        if self.copying is not None and ready([self.copying], 0):
            copying, self.copying = self.copying, None
            try:
                self._saved = ray.get(copying) or self._saved
            except RayError as error:
                why = str(getattr(error, "cause", None) or error).splitlines()[0]
                if isinstance(error, RayTaskError) and not isinstance(error, MemoryError):
                    # A rank is gone; the previous copy stays in place.
                    logger.info("the spare copy was not renewed: %s", why)
                else:
                    self._failure = why
        return SpareStatus(self.number, self._node, self.copying is not None, self._saved, self._failure)
