"""What Ray Train's list of runs, and with it Ray's dashboard, shows of a gang."""

from typing import Any

import ray
from ray.train.v2._internal.callbacks.state_manager import StateManagerCallback
from ray.train.v2._internal.execution.context import TrainRunContext
from ray.train.v2._internal.execution.controller.state import (
    ReschedulingState,
    TrainControllerState,
)
from ray.train.v2._internal.execution.worker_group import (
    WorkerGroup,
    WorkerGroupContext,
)
from ray.train.v2._internal.state import state_actor

from service.gang.resources import ON_THE_HEAD


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

    def after_controller_start(self, train_run_context: TrainRunContext) -> None:
        """Publish that the run begins."""
        _start_state_actor(ray.get_runtime_context().gcs_address)
        super().after_controller_start(train_run_context)

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


def _start_state_actor(address: str) -> None:
    """Start the actor that keeps the cluster's list of runs, unless it is there, as Ray Train would do next.

    It also ends the runs of supervisors that are gone, for which it must find its own cluster. Without the address, its
    thread for that would fail on a machine with several clusters.

    Args:
        address: The cluster's ``host:port``.
    """
    actor: Any = ray.remote(state_actor.TrainStateActor)
    actor.options(
        name=state_actor.TRAIN_STATE_ACTOR_NAME,
        namespace=state_actor.TRAIN_STATE_ACTOR_NAMESPACE,
        get_if_exists=True,
        lifetime="detached",
        max_restarts=-1,
        max_task_retries=-1,
        num_cpus=0,
        resources=ON_THE_HEAD,
        scheduling_strategy="DEFAULT",
        runtime_env={"env_vars": {"RAY_ADDRESS": address}},
    ).remote(enable_state_actor_reconciliation=True)
