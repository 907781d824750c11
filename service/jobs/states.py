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

_WITH_GANG = (JobState.SCHEDULING, JobState.RUNNING)

# For a reason, from a state, to a state. Other transitions are illegal.
TRANSITIONS: dict[Reason, dict[JobState, JobState]] = {
    Reason.SUBMITTED: {},
    Reason.HEAD_OF_QUEUE: {JobState.QUEUED: JobState.SCHEDULING},
    Reason.WAITING_FOR_RESOURCES: {state: state for state in _WITH_GANG},
    Reason.GANG_STARTING: {JobState.SCHEDULING: JobState.SCHEDULING},
    Reason.GANG_STARTED: dict.fromkeys(_WITH_GANG, JobState.RUNNING),
    Reason.GANG_RECOVERING: {JobState.RUNNING: JobState.RUNNING},
    Reason.WAITING_FOR_STORE: {JobState.RUNNING: JobState.RUNNING},
    Reason.GANG_LOST: dict.fromkeys(_WITH_GANG, JobState.QUEUED),
    Reason.PAUSED_BY_USER: dict.fromkeys((JobState.QUEUED, *_WITH_GANG), JobState.PAUSED),
    Reason.PAUSED_FOR_PRIORITY: {JobState.RUNNING: JobState.QUEUED},
    # From RUNNING if it comes too late to keep its gang from pausing.
    Reason.RESUMED_BY_USER: dict.fromkeys((JobState.PAUSED, JobState.RUNNING), JobState.QUEUED),
    Reason.RETRIED_BY_USER: dict.fromkeys((JobState.FAILED, JobState.CANCELLED), JobState.QUEUED),
    Reason.TRAINING_FINISHED: {JobState.RUNNING: JobState.SUCCEEDED},
    Reason.TRAINING_FAILED: dict.fromkeys(_WITH_GANG, JobState.FAILED),
    Reason.RESTARTS_EXHAUSTED: dict.fromkeys(_WITH_GANG, JobState.FAILED),
    Reason.CANCELLED_BY_USER: dict.fromkeys((JobState.QUEUED, *_WITH_GANG, JobState.PAUSED), JobState.CANCELLED),
}


class IllegalTransition(ValueError):
    """A reason allows no transition from a job's state."""


def next_state(state: JobState, reason: Reason) -> JobState:
    """The state that ``reason`` leads to.

    Raises:
        IllegalTransition: The table has no such change.
    """
    if state not in TRANSITIONS[reason]:
        raise IllegalTransition(f"a job that is {state} cannot change for the reason {reason}")
    return TRANSITIONS[reason][state]
