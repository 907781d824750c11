"""What a failure of a Ray Train run means: try again or not, and how to say it."""

from typing import Any

from ray.exceptions import RayActorError
from ray.train.v2._internal.exceptions import WorkerHealthCheckFailedError
from ray.train.v2._internal.execution.failure_handling import DefaultFailurePolicy, FailureDecision
from ray.train.v2.api.config import FailureConfig
from ray.train.v2.api.exceptions import ControllerError, TrainingFailedError, WorkerGroupError
from torch.distributed import DistError

REFUSALS = (ValueError, ArithmeticError)  # the trainer's own words about a job, its data or its numbers
DEFECTS = (TypeError, AttributeError, LookupError, NameError, AssertionError, ImportError)
BROKEN_CONNECTION = ("Connection closed by peer", "Connection reset by peer", "Broken pipe")  # gloo's words
LASTING = REFUSALS + DEFECTS  # a restart would only meet them again


class RestartLostWorkers(DefaultFailurePolicy):
    """Restarts a gang that lost a worker, as often as the job allows; gives up at once on what would happen again.

    Args:
        config: How many restarts there may be.
        supervisor: Handle of the gang's ``Supervisor`` actor, which is told of each restart.
    """

    def __init__(self, config: FailureConfig, supervisor: Any) -> None:
        super().__init__(config)
        self._supervisor = supervisor

    def make_decision(self, training_failed_error: TrainingFailedError) -> FailureDecision:
        """Decide on one failure of the run."""
        if isinstance(_decisive(training_failed_error)[1], LASTING):
            return FailureDecision.RAISE
        decision = super().make_decision(training_failed_error)
        if decision is FailureDecision.RETRY:
            self._supervisor.restarting.remote(root_cause(training_failed_error))
        return decision


def root_cause(error: BaseException) -> str:
    """Why a run failed, in a line or two for people: the first cause, not what it set off in other workers."""
    rank, cause = _decisive(error)
    if isinstance(cause, REFUSALS):
        return str(cause)
    if _is_death(cause):
        return f"worker {rank} was lost: its process or node was killed, crashed, or ran out of memory"
    if _is_broken_connection(cause):
        return f"worker {rank} lost its connection to another worker, whose process or node must have gone: {cause}"
    where = "" if rank is None else f"worker {rank}: "
    return f"{where}{type(cause).__name__}: {cause}"


def _decisive(error: BaseException) -> tuple[int | None, BaseException]:
    """The failure that explains the others, and its rank."""
    if isinstance(error, ControllerError):
        return None, error.controller_failure
    if not isinstance(error, WorkerGroupError) or not error.worker_failures:
        return None, error
    return min(sorted(error.worker_failures.items()), key=lambda failure: _order(failure[1]))


def _order(error: BaseException) -> int:
    """A lasting error explains everything; the death of a worker explains the broken connections of the rest."""
    return 0 if isinstance(error, LASTING) else 1 if _is_death(error) else 2


def _is_death(error: BaseException) -> bool:
    return isinstance(error, (WorkerHealthCheckFailedError, RayActorError))


def _is_broken_connection(error: BaseException) -> bool:
    return isinstance(error, DistError) or any(sign in str(error) for sign in BROKEN_CONNECTION)
