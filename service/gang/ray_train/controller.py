"""Ray Train's controller, which carries out what the gang's controller decides."""

import asyncio
import queue
import time
from typing import Any

from ray.train.v2._internal.execution.controller import TrainController
from ray.train.v2._internal.execution.controller.controller import TrainControllerLoopIterationResult
from ray.train.v2._internal.execution.controller.state import (
    AbortedState,
    ErroredState,
    FinishedState,
    RunningState,
    SchedulingState,
    ShuttingDownState,
    TrainControllerState,
)
from ray.train.v2._internal.execution.worker_group import WorkerGroupContext, WorkerGroupPollStatus
from ray.train.v2._internal.execution.worker_group import worker_group as worker_group_module
from ray.train.v2.api.exceptions import TrainingFailedError

from service.gang.control.port import Finish
from service.gang.ray_train.decided import Decided, FormGeneration, GenerationHalted, ShowMessage
from service.gang.ray_train.policies import GangScalingPolicy
from service.gang.ray_train.rank_worker import TrainingFunction
from service.gang.ray_train.run_state import RunState
from service.gang.ray_train.worker_group import ANSWER_SECONDS, GangWorkerGroup, NoBarrier
from service.gang.status import GangPhase

POLL_SECONDS = 1.0  # between Ray Train's polls; checkpoints wait for them, decisions do not
LOOK_SECONDS = 0.01  # between polls while the run ends
END_SECONDS = 5.0  # for the run to end


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
        vars(worker_group_module)["SynchronizationActor"] = NoBarrier()  # this process has no other run
        super().__init__(**arguments)

    async def _step(self) -> TrainControllerLoopIterationResult:
        state = self.get_state()
        if not isinstance(state, (SchedulingState, ShuttingDownState)):
            self._hear(state)
            await asyncio.sleep(0 if self._end is None else LOOK_SECONDS)  # lets Ray Train's other tasks run
            if self._end is not None and not self._may_finish(state):
                return self._shut_down(self._end)
        return await super()._step()

    def _hear(self, state: TrainControllerState) -> None:
        """Take new decisions; wait for one if there is nothing to do."""
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
            case FormGeneration():
                self._policy.next = decided
            case GenerationHalted():
                if isinstance(self._worker_group, GangWorkerGroup):
                    self._worker_group.halted = True
            case ShowMessage(message=message):
                self._run_state.say(message)
            case Finish(message=message):
                self._end, self._end_by = decided, time.monotonic() + END_SECONDS / 2
                self._run_state.say(message)

    def _may_finish(self, state: TrainControllerState) -> bool:
        """Whether Ray Train still has to notice that all ranks have finished, and to collect their reports."""
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
        """A generation may end while the job continues."""
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
        self._report_handler.set_required_ranks([0])  # a checkpoint belongs to all ranks, and rank 0 reports it
        self._worker_group = group
