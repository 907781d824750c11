"""Hangs, slow ranks and too many restarts, from beats at given times."""

import pytest

from boost_core.config import FaultToleranceConfig
from boost_core.config.job import MOST_LOSSES
from boost_core.messages import Cause
from service.gang.control.fault_detection import (
    GangWatch,
    Heartbeat,
    NodeWatch,
    RestartLimit,
    RestartPauses,
    SlowRank,
)


def watch(**config) -> GangWatch:
    return GangWatch(FaultToleranceConfig(**config), now=100.0)


def after_steps(seconds: float, **config) -> tuple[GangWatch, float]:
    """A gang that has done ten steps, and when the last one was."""
    gang, now = watch(**config), 100.0
    for step in range(1, 11):
        now += seconds
        for rank in range(2):
            gang.beat(rank, Heartbeat(step, seconds, seconds), now)
    return gang, now


def test_the_times_of_all_ranks_are_told_now_and_then() -> None:
    gang = watch()
    assert gang.rank_times(2, 102.5) is None
    gang.beat(0, Heartbeat(1, 1.0, 0.5), 102.5)
    assert gang.rank_times(2, 102.5) is None
    gang.beat(1, Heartbeat(1, 1.0, 1.0), 102.5)
    gang.beat(1, Heartbeat(2, 1.0, 0.8), 102.6)
    assert gang.rank_times(2, 101.9) is None
    assert gang.rank_times(2, 102.6) == [0.5, 0.9]
    gang.beat(0, Heartbeat(2, 1.0, 0.5), 102.7)
    gang.beat(1, Heartbeat(3, 1.0, 0.5), 102.7)
    assert gang.rank_times(2, 104.5) is None
    assert gang.rank_times(2, 104.7) == [0.5, 0.5]


def test_before_the_first_step_a_gang_may_take_five_times_as_long() -> None:
    gang = watch(hang_seconds=10)
    assert gang.hangs(150.0) is None
    assert gang.hangs(151.0) == 51.0
    gang.progress(120.0)
    assert gang.hangs(151.0) is None
    assert gang.hangs(171.0) == 51.0


def test_a_gang_hangs_after_a_multiple_of_the_median_step() -> None:
    gang, last = after_steps(2.0, hang_seconds=10, hang_factor=20)
    assert gang.hangs(last + 40.0) is None
    assert gang.hangs(last + 41.0) == 41.0


def test_a_gang_of_short_steps_hangs_after_a_floor() -> None:
    gang, last = after_steps(0.25, hang_seconds=10, hang_factor=20)
    assert gang.hangs(last + 10.0) is None
    assert gang.hangs(last + 11.0) == 11.0


def test_one_long_step_does_not_move_the_median() -> None:
    gang, last = after_steps(2.0, hang_seconds=10, hang_factor=20)
    gang.beat(0, Heartbeat(11, 30.0, 30.0), last + 30.0)
    assert gang.hangs(last + 30.0 + 41.0) == 41.0


def test_what_is_done_besides_steps_is_progress() -> None:
    gang, last = after_steps(2.0, hang_seconds=10, hang_factor=20)
    gang.progress(last + 30.0)
    gang.progress(last + 20.0)  # told late
    assert gang.hangs(last + 70.0) is None
    assert gang.hangs(last + 71.0) == 41.0


def test_steps_that_are_done_again_are_progress() -> None:
    gang, last = after_steps(2.0, hang_seconds=10, hang_factor=20)
    for again in range(1, 6):
        gang.beat(0, Heartbeat(4 + again, 2.0, 2.0), last + 12.0 * again)
    assert gang.hangs(last + 61.0) is None
    assert gang.hangs(last + 60.0 + 41.0) == 41.0


def beats(gang: GangWatch, steps: range, *busy: float) -> list[SlowRank]:
    """Steps of a second, in which each rank computes for so long; what is told of on the way."""
    told = []
    for step in steps:
        for rank, seconds in enumerate(busy):
            gang.beat(rank, Heartbeat(step, 1.0, seconds), float(step))
        told += gang.newly_slow()
    return told


def test_a_slow_rank_is_told_once_until_it_is_fast_again() -> None:
    gang = watch(slow_rank_factor=1.5)
    assert beats(gang, range(1, 10), 0.25, 0.75, 0.25) == []  # too few to know
    assert beats(gang, range(10, 30), 0.25, 0.75, 0.25) == [SlowRank(rank=1, share=0.75, times=3.0)]
    assert beats(gang, range(30, 50), 0.25, 0.25, 0.25) == []
    assert [told.rank for told in beats(gang, range(50, 70), 0.25, 0.75, 0.25)] == [1]


def test_two_ranks_are_told_apart() -> None:
    assert [told.rank for told in beats(watch(slow_rank_factor=1.5), range(1, 20), 0.5, 0.9)] == [1]
    assert beats(watch(slow_rank_factor=1.5), range(1, 20), 0.5, 0.7) == []


def test_a_single_rank_is_not_slow() -> None:
    assert beats(watch(), range(1, 20), 1.0) == []


def test_a_few_long_steps_do_not_make_a_rank_slow() -> None:
    gang = watch(slow_rank_factor=1.5)
    beats(gang, range(1, 11), 0.25, 0.25)
    assert beats(gang, range(11, 15), 0.25, 0.9) == []


@pytest.mark.parametrize(
    ("notices", "urgent_at"),
    [
        ([500.0], 480.0),
        ([None, None, None], 160.0),
        ([500.0, 150.0, 150.0], 130.0),  # a preemption during a drain by hand
        ([None, 150.0], 130.0),
        ([500.0, None], 161.0),
    ],
)
def test_the_shortest_notice_of_a_node_counts(notices: list[float | None], urgent_at: float) -> None:
    nodes = NodeWatch()
    for second, at in enumerate(notices):
        nodes.see({"a"}, {"a": at}, 100.0 + second)
    assert nodes.leaving == {"a": urgent_at}


def test_restarts_are_counted_within_a_window() -> None:
    limit = RestartLimit(FaultToleranceConfig(max_restarts=2, restart_window_seconds=60))
    assert [bool(limit.exceeded(Cause.HANG, now, -1)) for now in (0.0, 10.0, 61.0, 69.0, 72.0)] == [0, 0, 0, 1, 1]
    assert not any(limit.exceeded(Cause.ERROR, now, -1) for now in (200.0, 261.0, 322.0))


def test_without_restarts_the_first_fault_is_one_too_many() -> None:
    limit = RestartLimit(FaultToleranceConfig(max_restarts=0))
    said = "1 faults within 3600 s are more than fault_tolerance.max_restarts = 0 allows"
    assert limit.exceeded(Cause.WORKER_LOST, 0.0, -1) == said


def test_lost_nodes_are_no_faults_of_the_job_but_not_endlessly_many() -> None:
    limit = RestartLimit(FaultToleranceConfig(max_restarts=0))
    assert not any(limit.exceeded(Cause.NODE_LOST, float(now), -1) for now in range(MOST_LOSSES))
    assert limit.exceeded(Cause.NODE_LOST, 11.0, -1) == (
        "11 lost nodes within 3600 s without a new checkpoint are more than a job survives"
    )


def test_lost_nodes_with_checkpoints_in_between_never_end_a_job() -> None:
    limit = RestartLimit(FaultToleranceConfig(max_restarts=0))
    assert not any(limit.exceeded(Cause.NODE_LOST, float(now), now // 5) for now in range(10 * MOST_LOSSES))


def test_restarts_that_are_left_do_not_include_the_one_under_way() -> None:
    limit = RestartLimit(FaultToleranceConfig(max_restarts=3))
    left = []
    for now in range(3):
        assert limit.exceeded(Cause.ERROR, float(now), -1) is None
        left.append(limit.left)
    assert left == [2, 1, 0]


def test_restarts_without_progress_wait_ever_longer_and_progress_makes_them_immediate_again() -> None:
    pauses = RestartPauses()
    assert [pauses.fault(0, -1) for _ in range(9)] == [1, 2, 4, 8, 16, 32, 60, 60, 60], "it never made a step"
    assert [pauses.fault(*at) for at in ((7, -1), (7, -1), (3, -1))] == [0, 1, 2], "the same steps are none"
    assert not pauses.stalled(8, -1)
    assert [pauses.fault(*at) for at in ((8, -1), (8, 5), (8, 5))] == [0, 0, 1], "a checkpoint is progress, too"
    assert pauses.stalled(8, 5)
