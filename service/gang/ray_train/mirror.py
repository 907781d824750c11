"""Mirrors a gang's decisions in a run of Ray Train, and takes none.

A job's attempt is a run: Ray Train's own controller, worker group and list of runs, in a thread of the supervisor. The
gang's controller has decided before anything here happens; Ray Train's policies only repeat it.
"""

import asyncio
import io
import logging
import os
import queue
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import PurePosixPath
from types import SimpleNamespace
from typing import Any, cast

import fsspec
import pyarrow
import ray
from pyarrow.fs import FileInfo, FileType, FSSpecHandler, PyFileSystem
from ray.actor import ActorHandle
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.train.v2._internal.callbacks.metrics import ControllerMetricsCallback, WorkerMetricsCallback
from ray.train.v2._internal.callbacks.state_manager import StateManagerCallback
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution import scaling_policy
from ray.train.v2._internal.execution import worker_group as groups
from ray.train.v2._internal.execution.context import DistributedContext, TrainRunContext
from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.controller import state as run_states
from ray.train.v2._internal.execution.controller.controller import TrainControllerLoopIterationResult
from ray.train.v2._internal.execution.controller.state import TrainControllerState as ControllerState
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.storage import StorageContext
from ray.train.v2._internal.state import state_actor
from ray.train.v2.api.config import FailureConfig, RunConfig, ScalingConfig
from ray.train.v2.api.data_parallel_trainer import DataParallelTrainer
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError
from ray.train.v2.api.result import Result

from boost_core.config import JobSpec
from service.gang.assignment import ON_THE_HEAD, GangContext, worker_resources
from service.gang.control.port import Finish
from service.gang.ray.actors import WorkerHandle
from service.gang.ray_train.rank_worker import SETTINGS, TrainingFunction
from service.gang.status import GangPhase
from service.security.access import Access

ANSWER_SECONDS = 0.1  # for a worker to answer a poll; a later answer is read with the next one
POLL_SECONDS = 1.0  # between Ray Train's polls; checkpoints wait for them, decisions do not
LOOK_SECONDS = 0.01  # between polls while the run ends
END_SECONDS = 5.0  # for the run to end
WRITTEN_BY_RAY = {  # what its files are taken for
    ".validate_storage_marker": FileType.File,  # to check that all nodes see the same storage
    "checkpoint_manager_snapshot.json": FileType.NotFound,  # a list of checkpoints; the manifests are ours
}

logger = logging.getLogger(__name__)

# What the gang's controller has decided, as messages from the executor's thread


@dataclass(frozen=True)
class FormGeneration:
    """Train a generation on these workers, in the order of their ranks."""

    generation: int
    workers: Sequence[WorkerHandle]


# A text: show this message about the gang's state. None: all ranks have stopped as they were told to; a worker that
# ends from now on has not failed.
Decided = FormGeneration | str | Finish | None


class GangScalingPolicy(scaling_policy.ScalingPolicy):
    """Follows the gang's controller. Never asks an autoscaler for nodes, as the service does that.

    Attributes:
        next: The generation to train next.
    """

    next: FormGeneration | None = None

    def make_decision_for_non_running_worker_group(self, *status: Any, **more: Any) -> scaling_policy.ScalingDecision:
        """Start the next generation, if there is one."""
        if self.next is None:
            return scaling_policy.NoopDecision()
        return scaling_policy.ResizeDecision(len(self.next.workers), self.next.workers[0].resources)

    make_decision_for_running_worker_group = make_decision_for_non_running_worker_group

    def _get_num_workers_for_resource_request(self) -> int:
        return 0

    def after_controller_start(self, train_run_context: TrainRunContext) -> None:
        """Request no nodes; then Ray Train's hooks for the run's end have none to give back."""


class GangFailurePolicy(FailurePolicy):
    """Makes the run wait for the next generation when workers are lost; the gang decides whether there is one."""

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        """Return whether the run continues."""
        error = training_failed_error
        cause = error.controller_failure if isinstance(error, ControllerError) else error
        ended = RayActorError, OutOfMemoryError  # the latter: killed by Ray's memory monitor
        lost = isinstance(cause, (WorkerGroupError, WorkerGroupStartupFailedError, *ended))
        return FailureDecision.RETRY if lost else FailureDecision.RAISE


class RunState(StateManagerCallback):
    """Publishes this run in Ray Train's list of runs, which Ray's dashboard shows, with the gang's message.

    Attributes:
        failure: Why the job failed, once it has.
    """

    failure: str | None = None
    _message: str | None = None
    _attempt = ""

    def after_controller_start(self, train_run_context: TrainRunContext) -> None:
        """Publish that the run begins."""
        _start_state_actor(ray.get_runtime_context().gcs_address)
        super().after_controller_start(train_run_context)

    def before_worker_group_shutdown(self, worker_group: groups.WorkerGroup) -> None:
        """Publish how an attempt ends: as a failed job does if the job fails, whether or not a poll has seen why."""
        super().before_worker_group_shutdown(worker_group)
        if self.failure is not None:
            self._state_manager.update_train_run_attempt_errored(self._run_id, self._attempt, self.failure)

    def before_worker_group_start(self, worker_group_context: groups.WorkerGroupContext) -> None:
        """Publish that an attempt begins."""
        super().before_worker_group_start(worker_group_context)
        self._attempt = worker_group_context.run_attempt_id

    def after_controller_state_update(self, previous_state: ControllerState, current_state: ControllerState) -> None:
        """Publish a new state."""
        super().after_controller_state_update(previous_state, current_state)
        if type(previous_state) is type(current_state):
            return
        if isinstance(current_state, run_states.ReschedulingState):  # a worker was lost before the group had started
            cause = str(current_state.training_failed_error)
            self._state_manager.update_train_run_attempt_errored(self._run_id, self._attempt, cause)
        self.say(self._message)

    def say(self, message: str | None) -> None:
        """Publish the run with the gang's message."""
        self._message = message
        run = self._state_manager._runs[self._run_id]
        run.status_detail = message
        self._state_manager._create_or_update_train_run(run)


def _start_state_actor(address: str) -> None:
    """Start the actor that keeps the list of runs of the cluster at ``host:port``, as Ray Train would do next.

    It also ends the runs of supervisors that are gone, for which it must find its own cluster. Without the address, its
    thread for that would fail on a machine with several clusters.
    """
    actor: Any = ray.remote(state_actor.TrainStateActor)
    name = {"name": state_actor.TRAIN_STATE_ACTOR_NAME, "namespace": state_actor.TRAIN_STATE_ACTOR_NAMESPACE}
    lasts = {"get_if_exists": True, "lifetime": "detached", "max_restarts": -1, "max_task_retries": -1}
    where = {"num_cpus": 0, "resources": ON_THE_HEAD, "scheduling_strategy": "DEFAULT"}
    environment = {"env_vars": {"RAY_ADDRESS": address}}
    actor.options(**name, **lasts, **where, runtime_env=environment).remote(enable_state_actor_reconciliation=True)


class GangWorkerGroup(groups.WorkerGroup):
    """Ray Train's worker group for one generation, on workers that outlive it.

    Args:
        workers: The workers, by rank.
        arguments: Ray Train's own arguments.

    Attributes:
        halted: Whether all its ranks have stopped as they were told to.
    """

    def __init__(self, workers: Sequence[WorkerHandle], *arguments: Any) -> None:
        super().__init__(*arguments)
        self._workers_of_gang = workers
        self.halted = False

    def _start(self) -> None:  # without giving up what there is if it cannot be started
        self._start_impl(KeptGroupStateBuilder())

    def _create_placement_group(self, *arguments: Any) -> Any:
        # The gang creates and removes its placement groups itself; they are ready before there are workers.
        return SimpleNamespace(placement_group=None, wait=lambda _seconds: True, shutdown=lambda: None)

    def _create_workers(self, *arguments: Any, **more: Any) -> list[groups.Worker]:
        places = [worker.place for worker in self._workers_of_gang if worker.place is not None]  # all are up
        nodes = [place.node for place in places]
        distinct = list(dict.fromkeys(nodes))
        workers = []
        for rank, (worker, place) in enumerate(zip(self._workers_of_gang, places, strict=True)):
            # Ray Train's list of runs takes only numbers of GPUs.
            gpus: list[int | str] = [int(gpu) for gpu in place.accelerators if gpu.isdigit()]
            metadata = groups.ActorMetadata(place.host, place.node, place.address, place.pid, {"GPU": gpus})
            context = DistributedContext(
                world_rank=rank, world_size=len(nodes), local_rank=nodes[:rank].count(place.node),
                local_world_size=nodes.count(place.node), node_rank=distinct.index(place.node),
            )  # fmt: skip
            actor = cast(ActorHandle[Any], worker.actor)
            workers.append(groups.Worker(actor, metadata, worker.resources, context))
        return workers

    def shutdown(self) -> None:
        """Read the last reports, and shut down."""
        self.poll_status(ANSWER_SECONDS)
        super().shutdown()

    def abort(self) -> None:
        """Read the last reports, and abort."""
        self.poll_status(ANSWER_SECONDS)
        super().abort()

    def poll_status(self, timeout: float | None = None) -> groups.WorkerGroupPollStatus:
        """Return the workers' status; for a halted generation, only their reports."""
        status = super().poll_status(timeout)
        if self.halted:
            status = self._latest_poll_status = groups.WorkerGroupPollStatus({})
        return status


class KeptGroupState(groups.WorkerGroupState):
    """The state of a worker group, none of which ends with it."""

    def shutdown(self) -> None:
        """Leave the workers to the gang, and the barrier to the next generation."""


class KeptGroupStateBuilder(groups.WorkerGroupStateBuilder):
    """Builds a ``KeptGroupState``."""

    def build(self) -> groups.WorkerGroupState:
        """Return the state of a group that has started."""
        return KeptGroupState(**vars(super().build()))


class GangError(TrainingFailedError):
    """The gang's controller has given up the job."""


class GangTrainController(TrainController):
    """Ray Train's controller, which waits for the gang's controller to decide.

    Args:
        attempt: Number of the gang, counted over the job's life.
        decided: The decisions, in order.
        arguments: Ray Train's own arguments.
    """

    def __init__(self, attempt: int, decided: "queue.SimpleQueue[Decided]", **arguments: Any) -> None:
        self._attempt, self._decided = attempt, decided
        self._end: Finish | None = None
        self._end_by = 0.0
        (self._run_state,) = (each for each in arguments["callbacks"] if isinstance(each, RunState))
        self._policy: GangScalingPolicy = arguments["scaling_policy"]
        # Ray Train has a separate process where ranks meet when they report. Here only rank 0 reports, and the gang's
        # supervisor, the actor of this process, answers it; see ``Supervisor.broadcast_from_rank_zero``.
        barrier = SimpleNamespace(remote=lambda **_: ray.get_runtime_context().current_actor)
        no_barrier = SimpleNamespace(options=lambda **_: barrier)
        vars(groups.worker_group)["SynchronizationActor"] = no_barrier  # this process has no other run
        super().__init__(**arguments)

    async def _step(self) -> TrainControllerLoopIterationResult:
        state = self.get_state()
        if isinstance(state, (run_states.SchedulingState, run_states.ShuttingDownState)):
            return await super()._step()
        wait = self._policy.next is None and self._end is None  # there is nothing to do without a new decision
        with suppress(queue.Empty):
            while True:
                decided = self._decided.get(wait, POLL_SECONDS if isinstance(state, run_states.RunningState) else None)
                wait = False
                match decided:
                    case FormGeneration():
                        self._policy.next = decided
                    case None:
                        if isinstance(self._worker_group, GangWorkerGroup):
                            self._worker_group.halted = True
                    case str(message):
                        self._run_state.say(message)
                    case Finish(message=message):
                        self._end, self._end_by = decided, time.monotonic() + END_SECONDS / 2
                        self._run_state.say(message)
        await asyncio.sleep(0 if self._end is None else LOOK_SECONDS)  # lets Ray Train's other tasks run
        if self._end is None:
            return await super()._step()
        succeeded = self._end.phase is GangPhase.SUCCEEDED
        if succeeded and isinstance(state, run_states.RunningState) and time.monotonic() < self._end_by:
            # Ray Train still has to notice that all ranks have finished, and to collect their reports.
            return await super()._step()
        last: ControllerState = run_states.FinishedState() if succeeded else run_states.AbortedState()
        if self._end.phase is GangPhase.FAILED:
            last = run_states.ErroredState(GangError(self._end.message))
            self._run_state.failure = self._end.message
        elif not succeeded and self._worker_group is not None:
            self._worker_group.abort()
            self._worker_group = None
        ending = run_states.ShuttingDownState(next_state=last)
        return TrainControllerLoopIterationResult(self._get_run_attempt_id(), self.get_state(), ending)

    async def _poll_workers(self) -> groups.WorkerGroupPollStatus:
        assert self._worker_group is not None
        return self._worker_group.poll_status(ANSWER_SECONDS)

    def _is_training_succeeded(self, worker_group_status: groups.WorkerGroupPollStatus) -> bool:  # type: ignore[override]
        """A generation may end while the job continues."""
        return self._end is not None and super()._is_training_succeeded(worker_group_status)

    def _start_worker_group(self, num_workers: int, resources_per_worker: dict[str, float]) -> None:
        """Start Ray Train's worker group on the workers of the next generation."""
        form, self._policy.next = self._policy.next, None
        assert form is not None
        self._run_attempt_id = f"{self._attempt}.{form.generation}"
        function, callbacks = TrainingFunction(form.generation), self._worker_group_callbacks_to_propagate
        context = groups.WorkerGroupContext(self._run_attempt_id, function, num_workers, resources_per_worker)
        group = GangWorkerGroup(form.workers, self._train_run_context, context, callbacks)
        group._start()
        self._report_handler.set_required_ranks([0])  # a checkpoint belongs to all ranks, and rank 0 reports it
        self._worker_group = group


@dataclass(unsafe_hash=True)
class RunStorage(FSSpecHandler):  # type: ignore[misc]  # pyarrow has no types
    """Handler of a pyarrow file system for one job's checkpoint folder, usable on any node.

    It is read through a ``Result``, and never written to.
    A checkpoint is in the folder by the time Ray Train learns of it. Anything that Ray Train writes itself is accepted
    and discarded: its list would still contain checkpoints that retention has removed, with which it refuses to
    start, and a store that is temporarily unavailable is no reason for a run to end.

    Args:
        url: The folder.
        access: What may be reached; a secret is read on the node, so that only the reference travels.
    """

    url: str
    access: Access

    __ne__ = object.__ne__  # and not by what is open

    def __reduce__(self) -> tuple[type["RunStorage"], tuple[str, Access]]:
        return RunStorage, (self.url, self.access)

    @cached_property
    def fs(self) -> Any:
        """The file system of the URL, which has the secret, opened on first use."""
        self.access.configure()
        return fsspec.url_to_fs(self.url)[0]

    def get_type_name(self) -> str:
        """Return its name, as shown to people."""
        return f"boost+{fsspec.utils.get_protocol(self.url)}"

    def get_file_info(self, paths: list[str]) -> list[FileInfo]:
        """Return what is at these paths."""
        files: list[FileInfo] = []
        for path in paths:
            kind = WRITTEN_BY_RAY.get(PurePosixPath(path).name)
            files += super().get_file_info([path]) if kind is None else [FileInfo(path, kind)]
        return files

    def create_dir(self, path: str, recursive: bool) -> None:
        """Do nothing; the trainer creates the folder."""

    def open_output_stream(self, path: str, metadata: object) -> Any:
        """Accept and discard what is written."""
        return pyarrow.PythonFile(io.BytesIO(), mode="w")


class TrainRun(DataParallelTrainer):
    """One attempt of a job as a run of Ray Train, in its own thread. For use by the executor's thread.

    It is Ray Train's trainer, whose controller runs in this process and follows the gang's controller.

    Args:
        spec: The job.
        context: Settings of the service that workers need.

    Attributes:
        result: Ray Train's result; ``None`` before the run ends.
    """

    def __init__(self, spec: JobSpec, context: GangContext) -> None:
        os.environ.update(SETTINGS)
        logging.getLogger("ray.train").setLevel(logging.WARNING)
        assert spec.checkpoint.url is not None
        folder = fsspec.core.strip_protocol(spec.checkpoint.url)  # on its file system, for example ``bucket/job``
        files = PyFileSystem(RunStorage(spec.checkpoint.url, context.access))
        resources, tag, ranks = worker_resources(spec), context.tag, spec.parallelism.world_size
        run = RunConfig(name=f"{tag.name} ({tag.job_id})", storage_path=folder, storage_filesystem=files)
        vars(run)["storage_context"] = StorageContext(folder, "", files)  # without a subfolder of the run's name
        super().__init__(
            lambda: None,  # workers get the generation instead, by ``TrainingFunction``
            train_loop_config={"page": tag.url, "tenant": tag.tenant, "submitted_by": tag.submitted_by},
            scaling_config=ScalingConfig(num_workers=ranks, use_gpu="GPU" in resources, resources_per_worker=resources),
            run_config=cast(Any, run),  # its types name the previous class
        )
        object.__setattr__(self.train_run_context, "run_id", tag.job_id)
        self.result: Result | None = None
        self._attempt, self._shown, self._ending = tag.attempt, "", False
        self._decided: queue.SimpleQueue[Decided] = queue.SimpleQueue()
        self._failure: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="ray-train", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self.fit()
        except GangError:
            pass  # as ordered
        except Exception as error:
            logger.exception("Ray Train's run has failed")
            self._failure = error

    def _create_default_callbacks(self) -> list[Any]:
        """Return the callbacks that show the run. The others set up or clean up what the gang handles itself."""
        return [ControllerMetricsCallback(), WorkerMetricsCallback(self.train_run_context), RunState(datasets={})]

    def _initialize_and_run_controller(self, **arguments: Any) -> Result:
        async def run() -> Result:
            arguments["scaling_policy"] = GangScalingPolicy(cast(Any, self.scaling_config))
            arguments["failure_policy"] = GangFailurePolicy(FailureConfig(max_failures=-1))
            controller = GangTrainController(self._attempt, self._decided, **arguments)
            await controller.run()
            return controller.get_result()

        self.result = asyncio.run(run())
        return self.result

    def form(self, generation: int, workers: Sequence[WorkerHandle]) -> None:
        """Train a generation. Its workers have got their assignments through ``RankWorker.train``."""
        self._decided.put(FormGeneration(generation, workers))

    def halted(self) -> None:
        """Take note that all ranks have stopped as they were told to."""
        self._decided.put(None)

    def say(self, message: str) -> None:
        """Show people the gang's state; called repeatedly."""
        if message != self._shown:
            self._shown = message
            self._decided.put(message)

    def check(self) -> None:
        """Check that the run continues.

        Raises:
            RuntimeError: It has ended without being told to.
        """
        if not self._thread.is_alive() and not self._ending:
            raise RuntimeError(f"Ray Train's run has ended: {self._failure or 'it was not told to'}")

    def finish(self, end: Finish) -> None:
        """End the run, and wait a few seconds at most until it has ended."""
        self._ending = True
        self._decided.put(end)
        self._thread.join(END_SECONDS)
        if self._thread.is_alive():
            logger.warning("Ray Train's run has not ended within %g s", END_SECONDS)
