"""The worker's actor, and how Ray Train makes it train. It mirrors the gang's decisions, and takes none."""

import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
import ray
import ray.train
from ray.actor import ActorHandle, ActorProxy
from ray.exceptions import ActorUnavailableError, RayError
from ray.train import Checkpoint, CheckpointUploadMode
from ray.train.v2._internal.execution.context import get_train_context
from ray.train.v2._internal.execution.worker_group import RayTrainWorker
from ray.train.v2._internal.util import ObjectRefWrapper

from boost_core.messages import CheckpointReport, Drill, Steer, WorkerCommand
from boost_core.plan.snapshots import MemoryState, Region, SnapshotIndex, SnapshotKey
from service.gang.assignment import FAILURES, Assignment, End, GangContext, Message, RankEnd, Rendezvous, WorkerPlace
from service.gang.ray.private_api import free_memory
from service.security.redaction import redact

SETTINGS = {  # read by Ray Train from the environment, in supervisors and in workers
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",  # lines go into the gang's log, without secrets
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # the gang's controller watches the nodes
}

CALLS_AT_ONCE = 8  # per worker: one that waits for its training to end, and requests meanwhile
FLUSH_SECONDS = 10.0  # for Ray Train to take a generation's checkpoints
RELAY_SECONDS = 1.0  # for the node's first rank to take a sign of life
DIRECT_SECONDS = 30.0  # once it has not, for which signs of life go to the supervisor
BROKEN_UP = "the gang broke up before it trained"

logger = logging.getLogger(__name__)


class RankFailed(Exception):
    """A rank's training has failed."""


@dataclass
class WorkerGeneration:
    """A generation in one worker.

    Attributes:
        assignment: The assignment to train.
        end: How it ended; cancelled if the gang broke up before it began.
    """

    assignment: futures.Future[Assignment] = field(default_factory=futures.Future)
    end: futures.Future[RankEnd] = field(default_factory=futures.Future)


class RankWorker(RayTrainWorker):
    """The actor of a worker: Ray Train's actor, which the gang's supervisor also talks to.

    It loads what training needs in its own process, so that its supervisor need not import torch.

    Args:
        title: Its name in Ray's dashboard.
        number: The worker's number.
        supervisor: Handle of the supervisor's actor, a ``service.gang.ray.supervisor.Supervisor``.
        context: Settings of the service that workers need.
    """

    def __init__(self, title: str, number: int, supervisor: ActorHandle[Any], context: GangContext) -> None:
        os.environ.update(SETTINGS)
        super().__init__()
        logging.getLogger("ray.train").setLevel(logging.CRITICAL)  # it repeats the gang's own log
        self._title, self._supervisor = title, supervisor
        self._owners: dict[int, ActorProxy[RankWorker]] = {}
        self._first: ActorProxy[RankWorker] | None = None  # rank of the node, if that is another
        self._direct_until = 0.0
        self._generations: dict[int, WorkerGeneration] = {}
        # Committed checkpoints are reported to Ray Train from a thread, one after the other.
        self._reporting, self._reported = futures.ThreadPoolExecutor(1, "checkpoints"), list[futures.Future[None]]()
        from service.gang.worker.worker import Worker

        runtime = ray.get_runtime_context()
        node, actor, address = runtime.get_node_id(), str(runtime.get_actor_id()), ray.util.get_node_ip_address()
        gpus = tuple(map(str, runtime.get_accelerator_ids().get("GPU", ())))
        self._worker = Worker(
            number, context, node, actor, address, gpus, self._push,
            read=lambda owner, key, regions: ray.get(self._owners[owner].read.remote(key, regions)),
        )  # fmt: skip

    def __repr__(self) -> str:
        return self._title

    def _push(self, message: Message) -> None:
        # One actor cannot take several calls a second from each of thousands of ranks.
        first, says_more = self._first, message.reports or message.failed or message.going_on is not None
        if first is not None and not says_more and time.monotonic() >= self._direct_until:
            try:
                ray.get(first.relay.remote(message), timeout=RELAY_SECONDS)
                return
            except RayError:  # it is gone or hangs, and this rank must not seem to
                self._direct_until = time.monotonic() + DIRECT_SECONDS
        while True:
            try:
                ray.get(self._supervisor.push.remote(message))
                break
            except ActorUnavailableError:  # its connection broke; a message that arrives twice does less harm than none
                time.sleep(RELAY_SECONDS)
        for _, report in message.reports:
            if isinstance(report, CheckpointReport):
                self._reported.append(self._reporting.submit(report_checkpoint, report))

    @ray.method
    def place(self) -> WorkerPlace:
        """Return where it runs, once it is up."""
        return self._worker.place

    @ray.method
    def rendezvous(self) -> Rendezvous:
        """Open the store where the ranks of the next gang meet."""
        return self._worker.rendezvous()

    @ray.method
    def train(
        self, assignment: Assignment, recovery: MemoryState[int] | None, owners: dict[int, "ActorProxy[RankWorker]"],
        first: "ActorProxy[RankWorker] | None",
    ) -> RankEnd:  # fmt: skip
        """Take on a rank, which Ray Train then trains; return when the training has ended.

        Args:
            assignment: The assignment of the rank.
            recovery: The state to continue from, in memory; ``None`` to look for a checkpoint.
            owners: The workers that hold parts of it.
            first: The worker that relays its signs of life: the node's first rank; ``None`` if that is this one.
        """
        self._owners, self._first, self._direct_until = owners, first, 0.0
        self._worker.join(assignment, recovery)
        own = self._generations.setdefault(assignment.generation, WorkerGeneration())
        own.assignment.set_result(assignment)
        try:
            return own.end.result()
        except futures.CancelledError:
            return RankEnd(End.CONNECTION, BROKEN_UP)

    def run_train_fn(self, train_fn_ref: ObjectRefWrapper[Callable[[], Any]]) -> None:
        """Start Ray Train's training thread for a generation."""
        assert isinstance(train_fn_ref, TrainingFunction)
        super().run_train_fn(replace(train_fn_ref, function=partial(self._train, train_fn_ref.generation)))

    def _train(self, generation: int) -> RankEnd:
        own = self._generations.setdefault(generation, WorkerGeneration())
        assignment = own.assignment.result()
        if not own.end.set_running_or_notify_cancel():
            raise RankFailed(BROKEN_UP)
        try:
            end = self._worker.train(assignment)
            if end.how not in FAILURES:  # the others wait for the end of a failed one
                reported, self._reported = self._reported, []
                futures.wait(reported, FLUSH_SECONDS)
        except BaseException as error:
            own.end.set_exception(error)
            raise
        own.end.set_result(end)
        if end.how in FAILURES:
            raise RankFailed(end.message)
        return end

    @ray.method
    def halt(self, store: bool) -> None:
        """Have the gang stop after a step; with ``store``, once it has written a checkpoint."""
        if (membership := self._worker.membership) is not None:
            if store:
                membership.store.set()
            membership.halt.set()

    @ray.method
    def relay(self, message: Message) -> None:
        """Send a sign of life of another rank of the node with its own."""
        self._worker.reporter.relay(message)

    @ray.method
    def abort(self) -> None:
        """Make collectives fail that wait for a rank that is gone, and end training that has not begun."""
        for own in list(self._generations.values()):
            own.end.cancel()
        self._worker.abort()

    @ray.method
    def indexes(self) -> list[SnapshotIndex]:
        """Return the indexes of the snapshots in its memory."""
        return self._worker.snapshots.indexes()

    @ray.method
    def read(self, key: SnapshotKey, regions: Sequence[Region]) -> list[np.ndarray[Any, Any]]:
        """Read parts of a snapshot in its memory."""
        return [np.ascontiguousarray(part.numpy()) for part in self._worker.snapshots.read(key, regions)]

    @ray.method
    def hold(self, generation: int, rank: int) -> SnapshotIndex | None:
        """Keep a rank's newest snapshot readable until ``release``; ``None`` if it has none of that generation."""
        return self._worker.snapshots.hold(generation, rank)

    @ray.method
    def release(self) -> None:
        """Release the held snapshot."""
        self._worker.snapshots.release()

    @ray.method
    def free_memory(self) -> int:
        """Return the unused memory in bytes of its node or container."""
        return free_memory()

    @ray.method
    def stacks(self) -> str:
        """Return what each of its threads is doing."""
        names = {thread.ident: thread.name for thread in threading.enumerate()}
        stacks = {ident: "".join(traceback.format_stack(frame)) for ident, frame in sys._current_frames().items()}
        return redact("\n".join(f"thread {names.get(ident, ident)}:\n{stack}" for ident, stack in stacks.items()))

    @ray.method
    def command(self, command: WorkerCommand | Steer) -> None:
        """Inject a fault into its process, trace its next steps, or note a change of values to make."""
        if isinstance(command, Steer):
            if (membership := self._worker.membership) is not None:
                membership.steers[command.number] = command
        elif isinstance(command, Drill):
            self._worker.drills.begin(command)
        else:
            self._worker.profiler.ask(command.steps)


def report_checkpoint(report: CheckpointReport) -> None:
    """Report a committed checkpoint to Ray Train; return once it has taken it."""
    storage = get_train_context().get_storage()
    path = storage.build_checkpoint_path_from_name(report.url.rpartition("/")[2])
    try:
        metrics, checkpoint = report.model_dump(include={"step", "bytes"}), Checkpoint(path, storage.storage_filesystem)
        upload = CheckpointUploadMode.NO_UPLOAD  # it is already stored
        ray.train.report(metrics, checkpoint=checkpoint, checkpoint_upload_mode=upload)
    except Exception as error:
        logger.warning("Ray Train does not take the checkpoint of step %d: %s", report.step, error)


@dataclass
class TrainingFunction(ObjectRefWrapper[Callable[[], Any]]):
    """What Ray Train sends to workers instead of an object reference: the generation to train.

    A worker would wait ten seconds for an object that had a copy on a lost node.

    Attributes:
        generation: The generation.
        function: The training function, once it is in the worker.
    """

    generation: int
    function: Callable[[], RankEnd] | None = None

    def get(self) -> Any:
        """Return the training function."""
        return self.function
