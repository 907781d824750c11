"""The state machine of a job, as one table."""

from enum import StrEnum


class JobState(StrEnum):
    """The state of a job."""

    QUEUED = "QUEUED"
    SCHEDULING = "SCHEDULING"
    RUNNING = "RUNNING"
    PAUSED = "PAUSED"
    SUCCEEDED = "SUCCEEDED"
    FAILED = "FAILED"
    CANCELLED = "CANCELLED"


class Reason(StrEnum):
    """Why a job entered its state."""

    SUBMITTED = "SUBMITTED"
    HEAD_OF_QUEUE = "HEAD_OF_QUEUE"
    WAITING_FOR_RESOURCES = "WAITING_FOR_RESOURCES"
    GANG_STARTING = "GANG_STARTING"
    GANG_STARTED = "GANG_STARTED"
    GANG_RECOVERING = "GANG_RECOVERING"
    WAITING_FOR_STORE = "WAITING_FOR_STORE"
    GANG_LOST = "GANG_LOST"
    PAUSED_BY_USER = "PAUSED_BY_USER"
    PAUSED_FOR_PRIORITY = "PAUSED_FOR_PRIORITY"
    RESUMED_BY_USER = "RESUMED_BY_USER"
    RETRIED_BY_USER = "RETRIED_BY_USER"
    TRAINING_FINISHED = "TRAINING_FINISHED"
    TRAINING_FAILED = "TRAINING_FAILED"
    RESTARTS_EXHAUSTED = "RESTARTS_EXHAUSTED"
    CANCELLED_BY_USER = "CANCELLED_BY_USER"


WAITING_STATES = frozenset({JobState.QUEUED, JobState.SCHEDULING})
TERMINAL_STATES = frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED})

# From a state, for a reason, to a state. Other transitions are illegal.
TRANSITIONS: dict[JobState, dict[Reason, JobState]] = {
    JobState.QUEUED: {
        Reason.HEAD_OF_QUEUE: JobState.SCHEDULING,
        Reason.PAUSED_BY_USER: JobState.PAUSED,
        Reason.CANCELLED_BY_USER: JobState.CANCELLED,
    },
    JobState.SCHEDULING: {
        Reason.WAITING_FOR_RESOURCES: JobState.SCHEDULING,
        Reason.GANG_STARTING: JobState.SCHEDULING,
        Reason.GANG_STARTED: JobState.RUNNING,
        Reason.GANG_LOST: JobState.QUEUED,
        Reason.PAUSED_BY_USER: JobState.PAUSED,
        Reason.TRAINING_FAILED: JobState.FAILED,
        Reason.RESTARTS_EXHAUSTED: JobState.FAILED,
        Reason.CANCELLED_BY_USER: JobState.CANCELLED,
    },
    JobState.RUNNING: {
        Reason.GANG_RECOVERING: JobState.RUNNING,
        Reason.WAITING_FOR_RESOURCES: JobState.RUNNING,
        Reason.GANG_STARTED: JobState.RUNNING,
        Reason.WAITING_FOR_STORE: JobState.RUNNING,
        Reason.PAUSED_BY_USER: JobState.PAUSED,
        Reason.PAUSED_FOR_PRIORITY: JobState.QUEUED,
        Reason.RESUMED_BY_USER: JobState.QUEUED,  # too late to keep its gang from pausing
        Reason.TRAINING_FINISHED: JobState.SUCCEEDED,
        Reason.TRAINING_FAILED: JobState.FAILED,
        Reason.RESTARTS_EXHAUSTED: JobState.FAILED,
        Reason.GANG_LOST: JobState.QUEUED,
        Reason.CANCELLED_BY_USER: JobState.CANCELLED,
    },
    JobState.PAUSED: {Reason.RESUMED_BY_USER: JobState.QUEUED, Reason.CANCELLED_BY_USER: JobState.CANCELLED},
    JobState.SUCCEEDED: {},
    JobState.FAILED: {Reason.RETRIED_BY_USER: JobState.QUEUED},
    JobState.CANCELLED: {Reason.RETRIED_BY_USER: JobState.QUEUED},
}


class IllegalTransition(ValueError):
    """A reason allows no transition from a job's state."""


def next_state(state: JobState, reason: Reason) -> JobState:
    """The state that ``reason`` leads to.

    Raises:
        IllegalTransition: The table has no such change.
    """
    if reason not in TRANSITIONS[state]:
        raise IllegalTransition(f"a job that is {state} cannot change for the reason {reason}")
    return TRANSITIONS[state][reason]
