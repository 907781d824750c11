"""The played pipeline: its order is torch's own, and its seconds are those that can be worked out by hand."""

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from random import Random
from typing import Any, cast
from unittest.mock import patch

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble
from torch.distributed.pipelining.schedules import _ComputationType

from boost_core.plan import replay
from boost_core.plan.replay import BACKWARD, FORWARD, WEIGHTS, StageSeconds, at_least, passes, play

SCHEDULES = {
    "1f1b": Schedule1F1B, "interleaved_1f1b": ScheduleInterleaved1F1B, "zero_bubble": ScheduleInterleavedZeroBubble,
}  # fmt: skip
KINDS = {
    _ComputationType.FORWARD: FORWARD, _ComputationType.FULL_BACKWARD: BACKWARD,
    _ComputationType.BACKWARD_INPUT: BACKWARD, _ComputationType.BACKWARD_WEIGHT: WEIGHTS,
}  # fmt: skip


class Recorded:
    """A stage that notes what it is called for, and has no neighbours to talk to."""

    def __init__(self, rank: int) -> None:
        self.stage_index = rank
        self.called: list[tuple[int, int, int]] = []

    def forward_one_chunk(self, micro_batch: int, *arguments: object, **named: object) -> None:
        self.called.append((FORWARD, 0, micro_batch))

    def backward_one_chunk(self, micro_batch: int, **named: object) -> None:
        self.called.append((BACKWARD, 0, micro_batch))

    def __getattr__(self, name: str) -> Callable[..., list[object]]:
        return lambda *arguments, **named: []


def torchs_order(schedule: str, size: int, micro_batches: int) -> list[list[tuple[int, int, int]]]:
    """Each rank's passes: what torch's 1f1b calls of a stage, and the tables of the others."""
    made = cast(Any, object.__new__(SCHEDULES[schedule]))
    made._n_microbatches = micro_batches
    if schedule == "1f1b":
        recorded = [Recorded(rank) for rank in range(size)]
        made._num_stages, made.scale_grads, made._has_backward, made._loss_fn = size, False, True, None
        made._initialize_stage = made._maybe_compute_loss = made._maybe_get_loss = lambda *arguments: None
        made._update_losses = lambda *arguments: None
        for made._stage in recorded:
            made._step_microbatches([()] * micro_batches, [{}] * micro_batches)
        return [stage.called for stage in recorded]
    made.pp_group_size, made.n_local_stages = size, 2
    made.microbatches_per_round = micro_batches // max(1, micro_batches // size)
    return [
        [
            (KINDS[each.computation_type], each.stage_index // size, each.microbatch_index)
            for each in made._calculate_single_rank_operations(rank)
            if each is not None
        ]
        for rank in range(size)
    ]


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("size", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_passes_are_in_the_order_of_torchs_tables(schedule: str, size: int, rounds: int) -> None:
    for micro_batches in {rounds * size, rounds * size + (schedule == "1f1b")}:
        table = torchs_order(schedule, size, micro_batches)
        for rank in range(size):
            assert list(passes(schedule, size, rank, micro_batches)) == table[rank]


def even(size: int, each: StageSeconds, stages: int = 1) -> list[list[StageSeconds]]:
    every = [[each] * stages for _ in range(size)]
    every[-1][-1] = StageSeconds(each.forward, each.backward, each.weights, 0.0)
    return every


@pytest.mark.parametrize("size", [1, 2, 4, 8])
@pytest.mark.parametrize("micro_batches", [8, 16, 64])
def test_even_pipelines_are_idle_for_as_long_as_their_papers_say(size: int, micro_batches: int) -> None:
    whole = max(play(even(size, StageSeconds(1, 1, 1, 0)), "1f1b", micro_batches))
    assert whole == pytest.approx(3 * (micro_batches + size - 1))  # arXiv 2104.04473
    if size > 1:
        halves = even(size, StageSeconds(0.5, 0.5, 0.5, 0), 2)
        assert max(play(halves, "interleaved_1f1b", micro_batches)) == pytest.approx(
            3 * micro_batches + 3 * (size - 1) / 2
        )
        # Weight gradients fill it but for what no schedule of this kind can fill.
        filled = max(play(halves, "zero_bubble", micro_batches))
        assert 3 * micro_batches < filled < 3 * micro_batches + 3 * (size - 1) / 2


def test_two_stages_by_hand() -> None:
    stages = [[StageSeconds(2, 3, 1, 0.5)], [StageSeconds(1, 2, 1, 0)]]
    # Rank 0: F0 0–2, sent by 2.5, F1 2–4. Rank 1: F0 2.5–3.5, B0 to 6.5, which is sent by 7 while F1 comes; F1 to 8,
    # B1 to 11, sent by 11.5. Rank 0: B0 7–11, B1 11.5–15.5.
    assert play(stages, "1f1b", 2) == pytest.approx([15.5, 11.5])


SECONDS = st.floats(0.1, 2.0)
STAGES = st.builds(StageSeconds, SECONDS, SECONDS, SECONDS, st.floats(0, 0.5))


@st.composite
def pipelines(draw: st.DrawFn) -> tuple[str, list[list[StageSeconds]], int]:
    schedule, size = draw(st.sampled_from(list(SCHEDULES))), draw(st.sampled_from([2, 3, 4, 6]))
    stages = [[draw(STAGES) for _ in range(1 if schedule == "1f1b" else 2)] for _ in range(size)]
    stages[-1][-1] = replace(stages[-1][-1], send=0.0)
    return schedule, stages, size * draw(st.sampled_from([1, 2, 4, 9]))


@settings(max_examples=120, deadline=None)
@given(pipelines(), st.integers(0, 3))
def test_no_pipeline_is_faster_than_its_bound_and_slower_parts_make_none_faster(
    pipeline: tuple[str, list[list[StageSeconds]], int], which: int
) -> None:
    schedule, stages, micro_batches = pipeline
    ends = play(stages, schedule, micro_batches)
    bounds = at_least(stages, schedule, micro_batches)
    assert all(bound <= end * (1 + 1e-9) for bound, end in zip(bounds, ends, strict=True))
    rank = which % len(stages)
    slower: list[list[StageSeconds]] = [list(own) for own in stages]
    slower[rank][0] = StageSeconds(*(1.3 * value for value in vars(stages[rank][0]).values()))
    again = play(slower, schedule, micro_batches)
    assert all(after >= before * (1 - 1e-9) for before, after in zip(ends, again, strict=True))


def test_many_micro_batches_take_what_all_of_them_played_do() -> None:
    random = Random(1)
    for schedule, size in product(SCHEDULES, (2, 4, 6)):
        spread = random.choice((0.05, 0.3, 1.0))
        stages = [
            [StageSeconds(*(1 + spread * random.random() for _ in range(4))) for _ in range(1 + (schedule != "1f1b"))]
            for _ in range(size)
        ]
        many = 60 * size
        with patch.object(replay, "_ROUNDS", many):
            whole = play(stages, schedule, many)
        assert play(stages, schedule, many) == pytest.approx(whole)
