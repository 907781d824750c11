import pytest

from service.jobs.states import TERMINAL_STATES, TRANSITIONS, IllegalTransition, JobState, Reason, next_state

LEGAL = {
    ("QUEUED", "HEAD_OF_QUEUE"): "SCHEDULING",
    ("QUEUED", "PAUSED_BY_USER"): "PAUSED",
    ("QUEUED", "CANCELLED_BY_USER"): "CANCELLED",
    ("SCHEDULING", "WAITING_FOR_RESOURCES"): "SCHEDULING",
    ("SCHEDULING", "GANG_STARTING"): "SCHEDULING",
    ("SCHEDULING", "GANG_STARTED"): "RUNNING",
    ("SCHEDULING", "GANG_LOST"): "QUEUED",
    ("SCHEDULING", "PAUSED_BY_USER"): "PAUSED",
    ("SCHEDULING", "TRAINING_FAILED"): "FAILED",
    ("SCHEDULING", "RESTARTS_EXHAUSTED"): "FAILED",
    ("SCHEDULING", "CANCELLED_BY_USER"): "CANCELLED",
    ("RUNNING", "GANG_STARTED"): "RUNNING",
    ("RUNNING", "GANG_RECOVERING"): "RUNNING",
    ("RUNNING", "WAITING_FOR_RESOURCES"): "RUNNING",
    ("RUNNING", "WAITING_FOR_STORE"): "RUNNING",
    ("RUNNING", "PAUSED_BY_USER"): "PAUSED",
    ("RUNNING", "PAUSED_FOR_PRIORITY"): "QUEUED",
    ("RUNNING", "RESUMED_BY_USER"): "QUEUED",
    ("RUNNING", "TRAINING_FINISHED"): "SUCCEEDED",
    ("RUNNING", "TRAINING_FAILED"): "FAILED",
    ("RUNNING", "RESTARTS_EXHAUSTED"): "FAILED",
    ("RUNNING", "GANG_LOST"): "QUEUED",
    ("RUNNING", "CANCELLED_BY_USER"): "CANCELLED",
    ("PAUSED", "RESUMED_BY_USER"): "QUEUED",
    ("PAUSED", "CANCELLED_BY_USER"): "CANCELLED",
    ("FAILED", "RETRIED_BY_USER"): "QUEUED",
    ("CANCELLED", "RETRIED_BY_USER"): "QUEUED",
}


@pytest.mark.full
@pytest.mark.parametrize("reason", Reason)
@pytest.mark.parametrize("state", JobState)
def test_every_pair_of_state_and_reason(state: JobState, reason: Reason) -> None:
    expected = LEGAL.get((state, reason))
    if expected is not None:
        assert next_state(state, reason) == expected
        return
    with pytest.raises(IllegalTransition, match=f"a job that is {state} cannot change for the reason {reason}"):
        next_state(state, reason)


def test_the_end_is_the_end() -> None:
    """Only a user brings a job back from there."""
    left = {state: {reason for reason, changes in TRANSITIONS.items() if state in changes} for state in JobState}
    for state in TERMINAL_STATES:
        assert left[state] <= {Reason.RETRIED_BY_USER}
    assert not left[JobState.SUCCEEDED]
    assert all(left[state] for state in set(JobState) - TERMINAL_STATES)


def test_every_state_can_come_to_its_end_and_be_reached() -> None:
    reached = {JobState.QUEUED}
    for _ in JobState:
        reached |= {changes[state] for state in reached for changes in TRANSITIONS.values() if state in changes}
    assert reached == set(JobState)
    for state in set(JobState) - TERMINAL_STATES:
        assert TRANSITIONS[Reason.CANCELLED_BY_USER][state] is JobState.CANCELLED
