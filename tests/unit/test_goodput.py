"""The goodput ledger: what each kind of second is booked as, and that all are, once."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from boost_core.messages import Cause, InterruptionReport, Report, RestartReport, ShapeReport
from service.jobs.goodput import Goodput, Phase, as_of, book
from service.jobs.states import Reason
from tests.service.records import a_checkpoint, a_log_line, a_start, a_step, an_evaluation

T0 = datetime(2026, 1, 1, tzinfo=UTC)

SHAPE = ShapeReport(tensor_parallel_size=2, pipeline_parallel_size=1, data_parallel_size=1, nodes=["a", "a"])


def at(seconds: float) -> datetime:
    return T0 + timedelta(seconds=seconds)


def interruption(cause: Cause = Cause.WORKER_LOST) -> InterruptionReport:
    return InterruptionReport(cause=cause, message="", step=1)


def restart(seconds: float, waiting: float = 0.0, first_step: float = 0.0, resumed: int = 1) -> RestartReport:
    return RestartReport(
        cause=Cause.WORKER_LOST, message="", step=1, resumed_step=resumed, recovered_from="memory", seconds=seconds,
        waiting_seconds=waiting, parts={"first_step": first_step},
    )  # fmt: skip


def step(number: int, seconds: float = 2.0, data: float = 0.0, held: float = 0.0, last: int = 100) -> Report:
    return a_step(number, steps=last, step_seconds=seconds, data_seconds=data, held_seconds=held)


def booked(*events: tuple[float, Report | Reason]) -> Goodput:
    """What is booked of a job submitted at 0; checks after each event that it adds up."""
    goodput = Goodput(since=T0, booked_until=T0)
    for seconds, what in events:
        goodput = book(goodput, at(seconds), what)
        assert goodput.total == goodput.booked_until - T0
    return goodput


def kinds(goodput: Goodput) -> dict[str, float]:
    return {kind.value: seconds for kind, seconds in goodput.seconds.items() if seconds}


STARTS = (3, Reason.GANG_STARTING)  # after 3 s of waiting
RUNS = (STARTS, (8, step(1)), (9, Reason.GANG_STARTED))  # 3 s to start and 2 s of the first step

TABLE = {
    "the queue is waiting": (((3, Reason.HEAD_OF_QUEUE), (5, Reason.CANCELLED_BY_USER)), {"waiting": 5}),
    "going on waiting changes nothing": (
        ((1, Reason.HEAD_OF_QUEUE), (2, Reason.WAITING_FOR_RESOURCES), (5, Reason.CANCELLED_BY_USER)),
        {"waiting": 5},
    ),
    "starting is restart": ((STARTS, (4, Reason.GANG_STARTING), (7, Reason.GANG_LOST)), {"waiting": 3, "restart": 4}),
    "the first step is no part of starting": (RUNS, {"waiting": 3, "restart": 3, "productive": 2}),
    "logs and starts book nothing": (((3, a_log_line("")), (4, a_start()), (5, a_checkpoint())), {}),
    "a gang that is formed no longer waits": (
        ((4, SHAPE), (9, step(1))),
        {"waiting": 4, "restart": 3, "productive": 2},
    ),
    "a step": ((*RUNS, (10, step(2))), {"waiting": 3, "restart": 3, "productive": 4}),
    "what a step stood still": (
        (*RUNS, (13, step(2, seconds=3, data=0.5, held=1.5))),
        {"waiting": 3, "restart": 3, "productive": 5, "data_stall": 0.5, "checkpoint": 1.5},
    ),
    "data and copies of the first step": (
        (STARTS, (10, step(1, seconds=3, data=1, held=2))),
        {"waiting": 3, "restart": 2, "productive": 2, "data_stall": 1, "checkpoint": 2},
    ),
    "an evaluation is productive": (
        (*RUNS, (12, an_evaluation(1)), (14, step(2)), (15, Reason.GANG_LOST)),
        {"waiting": 3, "restart": 3, "productive": 8, "recomputed": 1},
    ),
    "steps done before": (
        (*RUNS, (10, step(2)), (12, step(2)), (14, step(1)), (16, step(3))),
        {"waiting": 3, "restart": 3, "productive": 6, "recomputed": 4},
    ),
    "compilation is what the first step took longer than the second": (
        (STARTS, (13, step(1, seconds=7, data=1)), (15, step(2))),
        {"waiting": 3, "restart": 3, "productive": 4, "data_stall": 1, "compile": 4},
    ),
    "compilation when the first step is done again": (
        (*RUNS, (10, step(2)), (10, interruption()), (16, restart(6, first_step=5)), (16, step(1, 5)), (18, step(2))),
        {"waiting": 3, "restart": 4, "productive": 4, "recomputed": 4, "compile": 3},
    ),
    "a job of one step does not tell": (
        (STARTS, (8, step(1, seconds=4, last=1))),
        {"waiting": 3, "restart": 1, "productive": 4},
    ),
    "a worker dies in mid-step": (
        (*RUNS, (9, interruption()), (19, restart(10, waiting=4, first_step=2)), (19, step(2))),
        {"waiting": 7, "restart": 7, "productive": 4, "recomputed": 1},
    ),
    "what passes until a fault is noticed is no lost work": (
        (*RUNS, (128, interruption(Cause.HANG)), (138, restart(129, first_step=2)), (138, step(2))),
        {"waiting": 3, "restart": 130, "productive": 4, "recomputed": 1},
    ),
    "a planned change loses nothing": (
        (*RUNS, (9, interruption(Cause.NODE_JOINED)), (12, restart(4, first_step=1)), (12, step(2, seconds=1))),
        {"waiting": 3, "restart": 6, "productive": 3},
    ),
    "a fault on the way back": (
        (*RUNS, (9, interruption()), (15, interruption()), (20, restart(11, waiting=2, first_step=1)),
         (20, step(2, 1))),
        {"waiting": 5, "restart": 11, "productive": 3, "recomputed": 1},
    ),
    "a fault before the first step": (
        (STARTS, (5, interruption()), (9, restart(4, waiting=1, first_step=2)), (9, step(1))),
        {"waiting": 4, "restart": 3, "productive": 2},
    ),
    "a gang that is lost with what it did": (
        (*RUNS, (9.5, Reason.GANG_LOST), (11, Reason.HEAD_OF_QUEUE), (12, Reason.GANG_STARTING), (20, step(1))),
        {"waiting": 5.5, "restart": 9, "productive": 2, "recomputed": 3.5},
    ),
    "a pause": (
        (*RUNS, (8.5, interruption(Cause.PAUSED)), (9, Reason.PAUSED_BY_USER), (60, Reason.RESUMED_BY_USER),
         (61, Reason.HEAD_OF_QUEUE), (62, Reason.GANG_STARTING), (67, restart(59)), (67, step(2))),
        {"waiting": 56, "restart": 7, "productive": 4},
    ),
    "room for another job": (
        (*RUNS, (8.5, interruption(Cause.PREEMPTED)), (9, Reason.PAUSED_FOR_PRIORITY),
         (20, Reason.CANCELLED_BY_USER)),
        {"waiting": 14, "restart": 4, "productive": 2},
    ),
    "the state follows the reports": (
        (*RUNS, (9, interruption()), (9, Reason.GANG_RECOVERING), (10, Reason.WAITING_FOR_RESOURCES),
         (13, restart(4, waiting=2)), (15, step(2)), (16, Reason.GANG_STARTED)),
        {"waiting": 5, "restart": 5, "productive": 4, "recomputed": 1},
    ),
    "a last checkpoint that the store does not take": (
        (STARTS, (8, step(1)), (10, step(2, last=2)), (11, an_evaluation(2)), (14, Reason.WAITING_FOR_STORE),
         (20, interruption()), (25, Reason.WAITING_FOR_STORE), (30, a_checkpoint(2)), (31, Reason.TRAINING_FINISHED)),
        {"waiting": 3, "restart": 8, "productive": 5, "checkpoint": 15},
    ),
    "and never does": (
        (STARTS, (8, step(1)), (10, step(2, last=2)), (14, Reason.WAITING_FOR_STORE), (99, Reason.TRAINING_FAILED)),
        {"waiting": 3, "restart": 3, "productive": 4, "checkpoint": 89},
    ),
    "the end": (
        (STARTS, (8, step(1)), (10, step(2, last=2)), (11, an_evaluation(2)), (14, a_checkpoint(2)),
         (14.5, Reason.TRAINING_FINISHED), (99, step(3)), (99, Reason.GANG_LOST)),
        {"waiting": 3, "restart": 3, "productive": 5.5, "checkpoint": 3},
    ),
    "a job that fails": (
        (*RUNS, (11, Reason.TRAINING_FAILED)),
        {"waiting": 3, "restart": 3, "productive": 2, "recomputed": 3},
    ),
    "clocks that go backwards": (
        (*RUNS, (2, step(2)), (1, interruption()), (0, restart(5, waiting=2)), (9, step(3)), (4, Reason.GANG_LOST)),
        {"waiting": 3, "restart": 3, "productive": 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TABLE)
def test_what_time_is_booked_as(name: str) -> None:
    events, expected = TABLE[name]
    assert kinds(booked(*events)) == expected


def test_time_that_is_not_booked_yet() -> None:
    waiting = booked()
    assert kinds(as_of(waiting, at(7))) == {"waiting": 7}
    running = booked(*RUNS)
    assert as_of(running, at(100)) == running
    interrupted = booked(*RUNS, (9, interruption()))
    assert kinds(as_of(interrupted, at(12)))["restart"] == 6
    ended = booked((5, Reason.CANCELLED_BY_USER))
    assert as_of(ended, at(9)) == ended


def test_it_survives_json() -> None:
    goodput = booked(*RUNS, (10.1, step(2, data=0.1)))
    assert Goodput.model_validate(goodput.model_dump(mode="json")) == goodput


SECONDS = st.floats() | st.floats(0, 30)  # a trainer may send anything

REPORTS = st.one_of(
    st.builds(step, st.integers(0, 12), SECONDS, SECONDS, SECONDS, st.just(10)),
    st.builds(interruption, st.sampled_from(Cause)),
    st.builds(restart, SECONDS, SECONDS, SECONDS),
    st.sampled_from([SHAPE, a_start(), an_evaluation(), a_checkpoint(), a_log_line("")]),
)


@given(st.lists(st.tuples(st.floats(-5, 60), st.one_of(REPORTS, REPORTS, st.sampled_from(Reason))), max_size=40))
def test_whatever_happens_all_time_is_booked_once(events: list[tuple[float, Report | Reason]]) -> None:
    goodput, now, latest = Goodput(since=T0, booked_until=T0), 0.0, T0
    for passed, what in events:
        now += passed
        goodput, before = book(goodput, at(now), what), goodput
        latest = max(latest, at(now))
        assert goodput.total == goodput.booked_until - T0
        assert before.booked_until <= goodput.booked_until <= latest
        assert all(seconds >= 0 for seconds in goodput.seconds.values()), goodput
        shown = as_of(goodput, latest)
        assert shown.total == shown.booked_until - T0
    ended = book(goodput, latest, Reason.CANCELLED_BY_USER)
    if goodput.phase is not Phase.ENDED:
        assert ended.total == latest - T0
    assert Goodput.model_validate(ended.model_dump(mode="json")) == ended
