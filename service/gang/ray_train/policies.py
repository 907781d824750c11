"""Ray Train's policies, which leave all decisions to the gang's controller."""

from typing import Any

from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import WorkerGroupStartupFailedError
from ray.train.v2._internal.execution.context import TrainRunContext
from ray.train.v2._internal.execution.failure_handling import FailureDecision, FailurePolicy
from ray.train.v2._internal.execution.scaling_policy import (
    NoopDecision,
    ResizeDecision,
    ScalingDecision,
    ScalingPolicy,
)
from ray.train.v2.api.config import ScalingConfig
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError

from service.gang.ray_train.decided import FormGeneration


class GangScalingPolicy(ScalingPolicy):
    """Follows the gang's controller. Never asks an autoscaler for nodes, as the service does that.

    Attributes:
        next: The generation to train next.
    """

    def __init__(self, scaling_config: ScalingConfig) -> None:
        super().__init__(scaling_config)
        self.next: FormGeneration | None = None

    def take(self) -> FormGeneration:
        """Return the generation to train next, once."""
        form, self.next = self.next, None
        assert form is not None
        return form

    def make_decision_for_non_running_worker_group(self) -> ScalingDecision:
        """Start the next generation, if there is one."""
        if self.next is None:
            return NoopDecision()
        return ResizeDecision(len(self.next.workers), self.next.workers[0].resources)

    def make_decision_for_running_worker_group(self, *status: Any, **more: Any) -> ScalingDecision:
        """Start the next generation, if there is one."""
        return self.make_decision_for_non_running_worker_group()

    def _get_num_workers_for_resource_request(self) -> int:
        return 0

    def after_controller_start(self, train_run_context: TrainRunContext) -> None:
        """Request no nodes."""

    async def before_controller_shutdown(self) -> None:
        """Nothing was requested."""

    def before_controller_abort(self) -> None:
        """Nothing was requested."""


class GangFailurePolicy(FailurePolicy):
    """Makes the run wait for the next generation when workers are lost; the gang decides whether there is one."""

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        """Return whether the run continues."""
        cause: Exception = training_failed_error
        if isinstance(training_failed_error, ControllerError):
            cause = training_failed_error.controller_failure
        lost = isinstance(cause, (WorkerGroupError, WorkerGroupStartupFailedError, RayActorError))
        return FailureDecision.RETRY if lost else FailureDecision.RAISE
