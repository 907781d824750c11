"""A gang as a run of Ray Train. The one place that leans on what Ray Train does not promise to keep.

Ray Train's controller, worker group and training threads carry the gang; what its policies would decide is decided by
the gang's own controller. Ray Train's runs in a thread of the supervisor. A generation of the gang is an attempt of the
run: Ray Train starts and shuts down a worker group for each by its own path, but the workers are there before it and
live on after it, so that survivors keep what they have in memory.

Importing this imports Ray Train, pandas and pyarrow: supervisors and workers do, the service's own process does not.
"""

import asyncio
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent import futures
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import ray
import ray.train
from pyarrow.fs import PyFileSystem
from ray.actor import ActorHandle, ActorProxy
from ray.exceptions import RayActorError
from ray.train import Checkpoint, CheckpointUploadMode
from ray.train.v2._internal.callbacks.metrics import ControllerMetricsCallback, WorkerMetricsCallback
from ray.train.v2._internal.callbacks.state_manager import StateManagerCallback
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.checkpoint.sync_actor import SynchronizationActor
from ray.train.v2._internal.execution.context import DistributedContext, TrainRunContext, get_train_context
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.controller.controller import TrainControllerLoopIterationResult
from ray.train.v2._internal.execution.controller.state import (
    AbortedState,
    ErroredState,
    FinishedState,
    ReschedulingState,
    RunningState,
    SchedulingState,
    ShuttingDownState,
    TrainControllerState,
)
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.scaling_policy import (
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
    ScalingPolicy,
)
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.execution.worker_group import (
    ActorMetadata,
    PlacementGroupHandle,
    RayTrainWorker,
    WorkerGroup,
    WorkerGroupContext,
    WorkerGroupPollStatus,
    WorkerGroupState,
    WorkerGroupStateBuilder,
)
from ray.train.v2._internal.execution.worker_group import Worker as TrainWorker
from ray.train.v2._internal.execution.worker_group import worker_group as worker_group_module
from ray.train.v2._internal.util import ObjectRefWrapper
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError
from ray.train.v2.api.result import Result

from boost_core.config import JobSpec
from boost_core.messages.commands import WorkerCommand
from boost_core.messages.reports import CheckpointReport
from boost_core.plan.snapshots import MemoryState, Region, SnapshotIndex, SnapshotKey
from service.gang.assignment import FAILURES, Assignment, End, GangContext, Message, RankEnd, Rendezvous, WorkerPlace
from service.gang.port import Finish
from service.gang.ray_private import free_memory
from service.gang.resources import worker_resources
from service.gang.run_storage import RunStorage, folder_of
from service.gang.status import GangPhase

if TYPE_CHECKING:
    import numpy as np

    from service.gang.supervisor import Supervisor
    from service.gang.worker import Worker

CALLS_AT_ONCE = 8  # of a worker: waiting for its training to end, and what is asked of it meanwhile
POLL_SECONDS = 1.0  # between Ray Train's polls; checkpoints wait for them, decisions do not
ANSWER_SECONDS = 0.1  # for a worker to answer a poll; a later answer is read with the next one
LOOK_SECONDS = 0.01  # between polls while the run ends
END_SECONDS = 5.0  # for that
FLUSH_SECONDS = 10.0  # for Ray Train to take the checkpoints of a generation
BROKEN_UP = "the gang broke up before it trained"
SETTINGS = {  # of Ray Train, which reads them from the environment
    "RAY_TRAIN_V2_ENABLED": "1",
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",  # lines go into the gang's log, without secrets
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",
    "RAY_TRAIN_ENABLE_PRINT_PATCH": "0",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",  # the gang's controller watches the nodes
}

logger = logging.getLogger(__name__)


class RankFailed(Exception):
    """A rank's training has failed."""


class GangError(TrainingFailedError):
    """The gang's controller has given the job up."""


# In a worker


class Turn:
    """A generation in one worker.

    Attributes:
        assignment: What it is to train.
        end: What that has come to; cancelled if the gang broke up before it began.
    """

    def __init__(self) -> None:
        self.assignment: futures.Future[Assignment] = futures.Future()
        self.end: futures.Future[RankEnd] = futures.Future()


class RankWorker(RayTrainWorker):
    """The actor of a worker: Ray Train's, to which the gang's supervisor speaks, too.

    It loads what training needs in its own process, so that its supervisor need not import torch.

    Args:
        title: What Ray's dashboard shows of it.
        number: The worker's number.
        supervisor: Handle of the gang's ``Supervisor`` actor.
        context: Settings of the service that workers need.
    """

    def __init__(self, title: str, number: int, supervisor: ActorProxy["Supervisor"], context: GangContext) -> None:
        os.environ.update(SETTINGS)
        super().__init__()
        logging.getLogger("ray.train").setLevel(logging.CRITICAL)  # it repeats what the gang's own log has
        self._title, self._supervisor = title, supervisor
        self._owners: dict[int, ActorProxy[RankWorker]] = {}
        self._turns: dict[int, Turn] = {}
        self._checkpoints = CheckpointReporter()
        self._worker = self._load(number, context)

    def _load(self, number: int, context: GangContext) -> "Worker":
        from service.gang.worker import Worker

        runtime = ray.get_runtime_context()
        return Worker(
            number, context,
            node=runtime.get_node_id(),
            actor=str(runtime.get_actor_id()),
            address=ray.util.get_node_ip_address(),
            gpus=tuple(map(str, runtime.get_accelerator_ids().get("GPU", ()))),
            push=self._push,
            read=lambda owner, key, regions: ray.get(self._owners[owner].read.remote(key, regions)),
        )  # fmt: skip

    def __repr__(self) -> str:
        return self._title

    def _push(self, message: Message) -> None:
        ray.get(self._supervisor.push.remote(message))
        for _, report in message.reports:
            if isinstance(report, CheckpointReport):
                self._checkpoints.report(report)

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
        self, assignment: Assignment, recovery: MemoryState[int] | None, owners: dict[int, "ActorProxy[RankWorker]"]
    ) -> RankEnd:
        """Take a rank, which Ray Train then has trained; answers when that has come to its end.

        Args:
            assignment: The rank.
            recovery: The state to continue from, in memory; ``None`` to look for a checkpoint.
            owners: The workers that have parts of it.
        """
        self._owners = owners
        self._worker.join(assignment, recovery)
        turn = self._turn(assignment.generation)
        turn.assignment.set_result(assignment)
        try:
            return turn.end.result()
        except futures.CancelledError:
            return RankEnd(End.CONNECTION, BROKEN_UP)

    def run_train_fn(self, train_fn_ref: ObjectRefWrapper[Callable[[], Any]]) -> None:
        """Start Ray Train's training thread, for a generation."""
        assert isinstance(train_fn_ref, TrainingFunction)
        super().run_train_fn(InWorker(partial(self._train, train_fn_ref.generation)))

    def _train(self, generation: int) -> RankEnd:
        turn = self._turn(generation)
        assignment = turn.assignment.result()
        if not turn.end.set_running_or_notify_cancel():
            raise RankFailed(BROKEN_UP)
        try:
            end = self._worker.train(assignment)
            if end.how not in FAILURES:  # the others wait for the end of one that has failed
                self._checkpoints.flush()
        except BaseException as error:
            turn.end.set_exception(error)
            raise
        turn.end.set_result(end)
        if end.how in FAILURES:
            raise RankFailed(end.message)
        return end

    def _turn(self, generation: int) -> Turn:
        return self._turns.setdefault(generation, Turn())

    @ray.method
    def halt(self, store: bool) -> None:
        """Have the gang stop after a step; ``store``: once it has written a checkpoint."""
        self._worker.halt(store)

    @ray.method
    def abort(self) -> None:
        """Have collectives fail that wait for a rank that is gone, and training that has not begun end."""
        for turn in list(self._turns.values()):
            turn.end.cancel()
        self._worker.abort()

    @ray.method
    def indexes(self) -> list[SnapshotIndex]:
        """What of the state is in its memory."""
        return self._worker.indexes()

    @ray.method
    def read(self, key: SnapshotKey, regions: Sequence[Region]) -> "list[np.ndarray[Any, Any]]":
        """Parts of a snapshot that is in its memory."""
        return self._worker.read(key, regions)

    @ray.method
    def hold(self, generation: int, rank: int) -> SnapshotIndex | None:
        """Keep its rank's newest snapshot as it is, to be read; ``None`` if there is none."""
        return self._worker.hold(generation, rank)

    @ray.method
    def release(self) -> None:
        """Let it go."""
        self._worker.release()

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


class CheckpointReporter:
    """Reports committed checkpoints to Ray Train, from a thread: it takes one once it has taken the one before."""

    def __init__(self) -> None:
        self._thread = futures.ThreadPoolExecutor(1, "checkpoints")
        self._reported: list[futures.Future[None]] = []

    def report(self, report: CheckpointReport) -> None:
        """Report one."""
        self._reported.append(self._thread.submit(_report, report))

    def flush(self) -> None:
        """Wait until all have been taken, for a while at most."""
        reported, self._reported = self._reported, []
        futures.wait(reported, FLUSH_SECONDS)


def _report(report: CheckpointReport) -> None:
    storage = get_train_context().get_storage()
    path = storage.build_checkpoint_path_from_name(report.url.rpartition("/")[2])
    try:
        ray.train.report(
            report.model_dump(include={"step", "bytes"}),
            checkpoint=Checkpoint(path, storage.storage_filesystem),
            checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,  # it is there
        )
    except Exception as error:
        logger.warning("Ray Train does not take the checkpoint of step %d: %s", report.step, error)


class TrainingFunction(ObjectRefWrapper[Callable[[], Any]]):
    """What Ray Train sends to workers instead of an object's reference: which generation they are to train.

    A worker would wait ten seconds for an object of which a node that was lost has had a copy.

    Args:
        generation: The generation.
    """

    def __init__(self, generation: int) -> None:
        self.generation = generation


class InWorker(ObjectRefWrapper[Callable[[], Any]]):
    """The same, once it is there.

    Args:
        function: Trains.
    """

    def __init__(self, function: Callable[[], RankEnd]) -> None:
        self._function = function

    def get(self) -> Callable[[], RankEnd]:
        """The training function."""
        return self._function


# In the supervisor


@dataclass(frozen=True)
class RunWorker:
    """A worker of a generation.

    Attributes:
        actor: Its handle.
        place: Where it is.
        resources: What it takes, by Ray's names.
    """

    actor: ActorProxy[RankWorker]
    place: WorkerPlace
    resources: dict[str, float]


@dataclass(frozen=True)
class Form:
    """A generation trains, by these workers in the order of their ranks."""

    generation: int
    workers: Sequence[RunWorker]


@dataclass(frozen=True)
class Halted:
    """All ranks have stopped as they were told to; what becomes of workers from now on is no fault."""


@dataclass(frozen=True)
class Say:
    """Where the gang is in its life, for people."""

    message: str


Decided = Form | Halted | Say | Finish


class TrainRun:
    """One attempt of a job as a run of Ray Train, in a thread. For the executor's thread.

    Args:
        spec: The job.
        context: What its workers are told of their surroundings.

    Attributes:
        result: What Ray Train makes of it; ``None`` before its end.
    """

    def __init__(self, spec: JobSpec, context: GangContext) -> None:
        os.environ.update(SETTINGS)
        logging.getLogger("ray.train").setLevel(logging.WARNING)
        self.result: Result | None = None
        self._decided: queue.SimpleQueue[Decided] = queue.SimpleQueue()
        self._said = ""
        self._failure: Exception | None = None
        self._ending = False
        self._trainer = GangTrainer(spec, context, self._decided)
        self._thread = threading.Thread(target=self._run, name="ray-train", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._trainer.fit()
        except GangError:
            pass  # as it was told
        except Exception as error:
            logger.exception("Ray Train's run has failed")
            self._failure = error
        self.result = self._trainer.result

    def form(self, generation: int, workers: Sequence[RunWorker]) -> None:
        """Have a generation train. Its workers have been told what by ``RankWorker.train``."""
        self._decided.put(Form(generation, workers))

    def halted(self) -> None:
        """Take note that all ranks have stopped as they were told to."""
        self._decided.put(Halted())

    def say(self, message: str) -> None:
        """Tell people what the gang is at."""
        if message != self._said:
            self._said = message
            self._decided.put(Say(message))

    def check(self) -> None:
        """Find out whether the run goes on.

        Raises:
            RuntimeError: It has ended, and nobody has told it to.
        """
        if not self._thread.is_alive() and not self._ending:
            raise RuntimeError(f"Ray Train's run has ended: {self._failure or 'nobody told it to'}")

    def finish(self, end: Finish) -> None:
        """Have the run end; waits until it has, for a few seconds at most."""
        self._ending = True
        self._decided.put(end)
        self._thread.join(END_SECONDS)
        if self._thread.is_alive():
            logger.warning("Ray Train's run has not ended within %g s", END_SECONDS)


class GangTrainer(DataParallelTrainer):
    """Ray Train's trainer, whose controller runs where this does and hears what the gang's has decided.

    Args:
        spec: The job.
        context: What its workers are told of their surroundings.
        decided: What is decided, in order.

    Attributes:
        result: That of ``fit``, also if it raises.
    """

    def __init__(self, spec: JobSpec, context: GangContext, decided: "queue.SimpleQueue[Decided]") -> None:
        self.result: Result | None = None
        self._decided, self._tag = decided, context.tag
        assert spec.checkpoint.url is not None
        folder, files = folder_of(spec.checkpoint.url), PyFileSystem(RunStorage(spec.checkpoint.url, context.secret))
        resources, tag = worker_resources(spec), context.tag
        run = RunConfig(name=f"{tag.name} ({tag.job_id})", storage_path=folder, storage_filesystem=files)
        vars(run)["storage_context"] = StorageContext(folder, "", files)  # not a folder of the run's name in it
        self._scaling = ScalingConfig(
            num_workers=spec.parallelism.world_size, use_gpu="GPU" in resources, resources_per_worker=resources
        )
        super().__init__(
            _train,
            train_loop_config={"page": tag.url, "tenant": tag.tenant, "submitted_by": tag.submitted_by},
            scaling_config=self._scaling,
            run_config=cast(Any, run),  # its types name the class before
        )
        object.__setattr__(self.train_run_context, "run_id", tag.job_id)

    def _create_default_callbacks(self) -> list[Any]:
        """Those that show the run. The others set up what the gang does by itself, and clean up after it."""
        return [ControllerMetricsCallback(), WorkerMetricsCallback(self.train_run_context), RunState()]

    def _initialize_and_run_controller(self, **arguments: Any) -> Result:
        async def run() -> Result:
            arguments["scaling_policy"] = GangScalingPolicy(self._scaling)
            arguments["failure_policy"] = GangFailurePolicy(FailureConfig(max_failures=-1))
            controller = GangController(self._tag.attempt, self._decided, **arguments)
            await controller.run()
            return controller.get_result()

        self.result = asyncio.run(run())
        return self.result


def _train() -> None:
    """What Ray Train is told to run; workers are told the generation instead, by ``TrainingFunction``."""


class GangController(TrainController):
    """Ray Train's controller, which waits for what the gang's has decided.

    Args:
        attempt: Number of the gang, counted over the job's life.
        decided: What is decided, in order.
        arguments: Ray Train's own.
    """

    def __init__(self, attempt: int, decided: "queue.SimpleQueue[Decided]", **arguments: Any) -> None:
        self._attempt, self._decided = attempt, decided
        self._end: Finish | None = None
        self._end_by = 0.0
        (self._run_state,) = (each for each in arguments["callbacks"] if isinstance(each, RunState))
        self._policy: GangScalingPolicy = arguments["scaling_policy"]
        vars(worker_group_module)["SynchronizationActor"] = OneBarrier()  # this process has no other run
        super().__init__(**arguments)

    async def _step(self) -> TrainControllerLoopIterationResult:
        state = self.get_state()
        if not isinstance(state, (SchedulingState, ShuttingDownState)):
            self._hear(state)
            await asyncio.sleep(0 if self._end is None else LOOK_SECONDS)  # for what Ray Train does besides
            if self._end is not None and not self._may_finish(state):
                return self._shut_down(self._end)
        return await super()._step()

    def _hear(self, state: TrainControllerState) -> None:
        """Take what has been decided; wait if there is nothing to do."""
        seconds = POLL_SECONDS if isinstance(state, RunningState) else None
        wait = self._policy.next is None and self._end is None
        try:
            self._take(self._decided.get(block=wait, timeout=seconds))
            while True:
                self._take(self._decided.get_nowait())
        except queue.Empty:
            return

    def _take(self, decided: Decided) -> None:
        match decided:
            case Form():
                self._policy.next = decided
            case Halted():
                if isinstance(self._worker_group, GangWorkerGroup):
                    self._worker_group.halted = True
            case Say(message=message):
                self._run_state.say(message)
            case Finish(message=message):
                self._end, self._end_by = decided, time.monotonic() + END_SECONDS / 2
                self._run_state.say(message)

    def _may_finish(self, state: TrainControllerState) -> bool:
        """Whether Ray Train is still to find out by itself that all ranks have finished, and to take their reports."""
        succeeds = self._end is not None and self._end.phase is GangPhase.SUCCEEDED
        return succeeds and isinstance(state, RunningState) and time.monotonic() < self._end_by

    def _shut_down(self, end: Finish) -> TrainControllerLoopIterationResult:
        last: TrainControllerState
        match end.phase:
            case GangPhase.SUCCEEDED:
                last = FinishedState()
            case GangPhase.FAILED:
                last = ErroredState(GangError(end.message))
                self._run_state.failure = end.message
            case _:
                last = AbortedState()
                if self._worker_group is not None:
                    self._worker_group.abort()
                    self._worker_group = None
        return TrainControllerLoopIterationResult(
            self._get_run_attempt_id(), self.get_state(), ShuttingDownState(next_state=last)
        )

    async def _poll_workers(self) -> WorkerGroupPollStatus:
        assert self._worker_group is not None
        return self._worker_group.poll_status(ANSWER_SECONDS)

    def _is_training_succeeded(self, worker_group_status: WorkerGroupPollStatus) -> bool:  # type: ignore[override]
        """A generation may end while the job goes on."""
        return self._end is not None and super()._is_training_succeeded(worker_group_status)

    def _start_worker_group(self, num_workers: int, resources_per_worker: dict[str, float]) -> None:
        """Start Ray Train's worker group on the workers of the next generation."""
        form = self._policy.take()
        self._run_attempt_id = f"{self._attempt}.{form.generation}"
        context = WorkerGroupContext(
            self._run_attempt_id, TrainingFunction(form.generation), num_workers, resources_per_worker
        )
        group = GangWorkerGroup(
            form.workers, self._train_run_context, context, self._worker_group_callbacks_to_propagate
        )
        group._start()
        self._report_handler.set_required_ranks([0])  # a checkpoint is one of all ranks, and rank 0 says so
        self._worker_group = group


class GangWorkerGroup(WorkerGroup):
    """Ray Train's worker group for one generation, on workers that outlive it.

    Args:
        workers: By rank.
        arguments: Ray Train's own.

    Attributes:
        halted: Whether all its ranks have stopped as they were told to.
    """

    def __init__(self, workers: Sequence[RunWorker], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._given = workers
        self.halted = False

    def _start(self) -> None:
        self._start_impl(KeptStateBuilder())

    def _create_placement_group(self, scaling_config: ScalingConfig, worker_group_context: WorkerGroupContext) -> Any:
        return Placed()

    def _create_workers(self, *arguments: Any, **more: Any) -> list[TrainWorker]:
        return train_workers(self._given)

    def shutdown(self) -> None:
        """End, with all that was reported."""
        self.poll_status(ANSWER_SECONDS)
        super().shutdown()

    def abort(self) -> None:
        """The same."""
        self.poll_status(ANSWER_SECONDS)
        super().abort()

    def poll_status(self, timeout: float | None = None) -> WorkerGroupPollStatus:
        """What workers say; of a generation that has halted, their reports alone."""
        status = super().poll_status(timeout)
        if self.halted:
            status = self._latest_poll_status = WorkerGroupPollStatus({})
        return status


def train_workers(workers: Sequence[RunWorker]) -> list[TrainWorker]:
    """Workers by rank as Ray Train has them."""
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
    gpus = [int(gpu) for gpu in place.accelerators if gpu.isdigit()]  # Ray Train's list of runs has no other
    return ActorMetadata(place.host, place.node, place.address, place.pid, {"GPU": list(gpus)})


class KeptState(WorkerGroupState):
    """What a worker group has; none of it ends with it."""

    def shutdown(self) -> None:
        """Leave the workers to the gang, and the barrier to the next generation."""


class KeptStateBuilder(WorkerGroupStateBuilder):
    """Makes that."""

    def build(self) -> WorkerGroupState:
        """The state of a group that has started."""
        return KeptState(**vars(super().build()))

    def shutdown(self) -> None:
        """As above, where a group could not be started."""


class Placed(PlacementGroupHandle):
    """The gang's placement groups, one a replica, which it makes and removes by itself."""

    @property
    def placement_group(self) -> Any:
        """Workers are not created by it."""
        return None

    def ready(self) -> Any:
        """Nothing waits for it."""
        raise NotImplementedError

    def wait(self, timeout_seconds: float = 30) -> bool:
        """They are ready before there are workers."""
        return True

    def shutdown(self) -> None:
        """Leave them."""


class OneBarrier:
    """In the place of Ray Train's ``SynchronizationActor``: one for all generations, since it is a process.

    Ranks meet there when they report. Here rank 0 reports alone, so nobody waits.
    """

    def __init__(self) -> None:
        self._options: dict[str, Any] = {}
        self._actor: ActorHandle[Any] | None = None

    def options(self, **options: Any) -> "OneBarrier":
        """Where it is to be."""
        self._options = options
        return self

    def remote(self, **arguments: Any) -> "ActorHandle[Any]":
        """The actor, made when it is first asked for."""
        if self._actor is None:
            barrier: Any = SynchronizationActor  # an actor's class, which its types do not say
            self._actor = barrier.options(**self._options).remote(**arguments)
            self._actor.set_required_ranks.remote([0])
        return self._actor


class GangScalingPolicy(ScalingPolicy):
    """Decides for what the gang's controller has decided. Asks no autoscaler for nodes, as the service does that.

    Attributes:
        next: The generation that is to train next.
    """

    def __init__(self, scaling_config: ScalingConfig) -> None:
        super().__init__(scaling_config)
        self.next: Form | None = None

    def take(self) -> Form:
        """The generation that is to train next, once."""
        form, self.next = self.next, None
        assert form is not None
        return form

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        """Whether a generation is to train."""
        if self.next is None:
            return NoopDecision()
        return ResizeDecision(len(self.next.workers), self.next.workers[0].resources)

    def make_decision_for_running_worker_group(self, *status: Any, **more: Any) -> ScalingDecision:
        """The same."""
        return self.make_decision_for_non_running_worker_group()

    def _get_num_workers_for_resource_request(self) -> int:
        return 0

    def after_controller_start(self, train_run_context: TrainRunContext) -> None:
        """Ask for no nodes."""

    async def before_controller_shutdown(self) -> None:
        """Nothing was asked for."""

    def before_controller_abort(self) -> None:
        """Nothing was asked for."""


class GangFailurePolicy(FailurePolicy):
    """Has the run wait for the next generation where workers are lost; whether there is one, the gang decides."""

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        """Whether the run goes on."""
        cause: Exception = training_failed_error
        if isinstance(training_failed_error, ControllerError):
            cause = training_failed_error.controller_failure
        lost = isinstance(cause, (WorkerGroupError, WorkerGroupStartupFailedError, RayActorError))
        return FailureDecision.RETRY if lost else FailureDecision.RAISE


class RunState(StateManagerCallback):
    """Tells Ray Train's list of runs about this one; a state's detail is what the gang says.

    Attributes:
        failure: Why the job fails, once it does.
    """

    def __init__(self) -> None:
        super().__init__(datasets={})
        self._message: str | None = None
        self._attempt = ""
        self.failure: str | None = None

    def before_worker_group_shutdown(self, worker_group: WorkerGroup) -> None:
        """Tell how an attempt ends: as the job does, if that fails, whether or not a poll has seen why."""
        super().before_worker_group_shutdown(worker_group)
        if self.failure is not None:
            self._state_manager.update_train_run_attempt_errored(self._run_id, self._attempt, self.failure)

    def before_worker_group_start(self, worker_group_context: WorkerGroupContext) -> None:
        """Tell that an attempt begins."""
        super().before_worker_group_start(worker_group_context)
        self._attempt = worker_group_context.run_attempt_id

    def after_controller_state_update(
        self, previous_state: TrainControllerState, current_state: TrainControllerState
    ) -> None:
        """Tell a new state."""
        super().after_controller_state_update(previous_state, current_state)
        if type(previous_state) is type(current_state):
            return
        if isinstance(current_state, ReschedulingState):  # a worker was lost before the group had started
            cause = str(current_state.training_failed_error)
            self._state_manager.update_train_run_attempt_errored(self._run_id, self._attempt, cause)
        self._tell()

    def say(self, message: str) -> None:
        """Tell what the gang says."""
        self._message = message
        self._tell()

    def _tell(self) -> None:
        run = self._state_manager._runs[self._run_id]
        run.status_detail = self._message
        self._state_manager._create_or_update_train_run(run)
