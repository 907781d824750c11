"""What Ray Train's list of runs, and with it Ray's dashboard, shows of a gang."""

from ray.train.v2._internal.callbacks.state_manager import StateManagerCallback
from ray.train.v2._internal.execution.controller.state import (
    ReschedulingState,
    TrainControllerState,
)
from ray.train.v2._internal.execution.worker_group import (
    WorkerGroup,
    WorkerGroupContext,
)


class RunState(StateManagerCallback):
    """Publishes this run in Ray Train's list of runs; a state's detail is the gang's message.

    Attributes:
        failure: Why the job failed, once it has.
    """

    def __init__(self) -> None:
        super().__init__(datasets={})
        self._message: str | None = None
        self._attempt = ""
        self.failure: str | None = None

    def before_worker_group_shutdown(self, worker_group: WorkerGroup) -> None:
        """Publish how an attempt ends: as a failed job does if the job fails, whether or not a poll has seen why."""
        super().before_worker_group_shutdown(worker_group)
        if self.failure is not None:
            self._state_manager.update_train_run_attempt_errored(self._run_id, self._attempt, self.failure)

    def before_worker_group_start(self, worker_group_context: WorkerGroupContext) -> None:
        """Publish that an attempt begins."""
        super().before_worker_group_start(worker_group_context)
        self._attempt = worker_group_context.run_attempt_id

    def after_controller_state_update(
        self, previous_state: TrainControllerState, current_state: TrainControllerState
    ) -> None:
        """Publish a new state."""
        super().after_controller_state_update(previous_state, current_state)
        if type(previous_state) is type(current_state):
            return
        if isinstance(current_state, ReschedulingState):  # a worker was lost before the group had started
            cause = str(current_state.training_failed_error)
            self._state_manager.update_train_run_attempt_errored(self._run_id, self._attempt, cause)
        self._tell()

    def say(self, message: str) -> None:
        """Publish the gang's message."""
        self._message = message
        self._tell()

    def _tell(self) -> None:
        run = self._state_manager._runs[self._run_id]
        run.status_detail = self._message
        self._state_manager._create_or_update_train_run(run)
