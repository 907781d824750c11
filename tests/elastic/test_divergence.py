"""A step that diverges on one rank: all stop, leave its update out, or go back."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

import numpy as np
import pytest
import torch.distributed as dist

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.config import FaultToleranceConfig, JobSpec
from boost_core.messages import Cause, FaultReport, InterruptionReport, Report, RestartReport, StepReport
from boost_core.plan.snapshots import copy_owners
from boost_core.train import Membership, Outcome, StepTimes, train
from boost_core.train.loop import RECENT_STEPS, DivergenceDetector
from boost_core.train.state import TrainState
from tests.distributed.recording import Recorder
from tests.distributed.whole import whole_tensors
from tests.jobs import tiny_job, write_corpus
from tests.ranks import Ranks

BATCH = 4
LAYOUTS: dict[str, dict[str, int]] = {
    "tensor": {"tensor_parallel_size": 2},
    "pipeline": {"pipeline_parallel_size": 2},
    "data": {"data_parallel_size": 2, "zero_stage": 1},
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus"))


def job(corpus: Path, folder: Path, policy: str, layout: str = "tensor", steps: int = 8, **faults: Any) -> JobSpec:
    return tiny_job(
        corpus, folder,
        parallelism={"tensor_parallel_size": 1} | LAYOUTS[layout],
        training={"steps": steps, "sequence_length": 16, "evaluate_every_steps": 1000},
        checkpoint={"every_steps": 3},
        fault_tolerance={"on_divergence": policy, "memory_copy_every_steps": 3} | faults,
    )  # fmt: skip


@dataclass(frozen=True)
class Poison:
    """What goes wrong; not again where training has gone back.

    Attributes:
        what: Rank 1's gradients become NaN; or its weights, before the step; or all ranks' head is larger from then on.
        steps: In which steps.
    """

    what: Literal["gradients", "weights", "head"]
    steps: tuple[int, ...]


@dataclass
class Trained:
    """What one rank has seen: after each step its number, the samples consumed, and all masters and moments."""

    steps: list[tuple[int, int]] = field(default_factory=list)
    states: list[np.ndarray] = field(default_factory=list)
    copies: list[set[int]] = field(default_factory=list)  # steps of snapshots in memory, twice each
    reports: list[Report] = field(default_factory=list)
    outcome: Outcome | None = None
    failure: str = ""

    def of(self, kind: type) -> list[Any]:
        return [report for report in self.reports if isinstance(report, kind)]


def poisoned(spec: JobSpec, poison: Poison | None, nodes: str = "ab", halt_after: int | None = None) -> Trained:
    """Train as a rank; ``nodes`` is empty for a gang without copies."""
    seen, recorder, states = Trained(), Recorder(), []
    membership = Membership(owner_of=copy_owners(nodes))
    initial: Callable[..., TrainState] = TrainState.initial

    def watched(*arguments: Any, **settings: Any) -> TrainState:
        state = initial(*arguments, **settings)
        states.append(state)
        for weight in state.model.parameters():
            weight.register_hook(lambda gradient: gradient * float("nan") if hit(state, "gradients") else gradient)
        return state

    def hit(state: TrainState, what: str) -> bool:
        mine, again = what == "head" or dist.get_rank() == 1, state.samples > BATCH * state.step
        return poison is not None and what == poison.what and state.step + 1 in poison.steps and mine and not again

    def after_step(times: StepTimes) -> None:
        (state,) = states
        seen.steps.append((times.step, state.samples))
        whole = whole_tensors(state)
        seen.states.append(np.concatenate([whole[name].flatten().numpy() for name in sorted(whole)]))
        found = [index.key.step for index in membership.snapshots.indexes()]
        seen.copies.append({step for step in found if found.count(step) == 2})
        if hit(state, "weights"):
            for weight in state.model.parameters():
                weight.data.fill_(float("nan"))
        if hit(state, "head"):
            state.model.get_parameter("head.weight").data.mul_(30)
        if times.step == halt_after:
            membership.store.set()
            membership.halt.set()

    membership.after_step = after_step
    with patch.object(TrainState, "initial", watched):
        try:
            seen.outcome = train(spec, recorder, membership)
        except FloatingPointError as failure:
            seen.failure = str(failure)
    seen.reports = recorder.reports
    return seen


@pytest.mark.parametrize("what", ["gradients", "weights"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_stop_fails_on_all_ranks_with_the_step_and_a_remedy(
    ranks: Ranks, corpus: Path, tmp_path: Path, layout: str, what: Literal["gradients", "weights"]
) -> None:
    for seen in ranks.run(2, poisoned, job(corpus, tmp_path, "stop", layout), Poison(what, (4,))):
        assert seen.failure.startswith("the loss of step 4 is ")
        assert "the gradient norm nan; lower optimizer.learning_rate" in seen.failure
        assert [step for step, _ in seen.steps] == [1, 2, 3]


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_skip_leaves_the_update_out_and_goes_on(ranks: Ranks, corpus: Path, tmp_path: Path, layout: str) -> None:
    first, second = ranks.run(2, poisoned, job(corpus, tmp_path, "skip", layout), Poison("gradients", (4,)))
    for seen in first, second:
        assert seen.outcome is Outcome.FINISHED
        assert seen.steps == [(step, BATCH * step) for step in range(1, 9)]
        changed = [not np.array_equal(*pair) for pair in zip(seen.states, seen.states[1:], strict=False)]
        assert changed == [True, True, False, True, True, True, True]
    (fault,) = first.of(FaultReport)
    assert (fault.what, fault.step) == ("divergence", 4)
    assert fault.message.endswith("its update was skipped")
    assert [report.step for report in first.of(StepReport)] == list(range(1, 9))
    assert np.isfinite([report.loss for report in first.of(StepReport)]).all()
    assert first.of(InterruptionReport) == second.reports == []


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_roll_back_takes_the_newest_copy_and_the_next_batch(
    ranks: Ranks, corpus: Path, tmp_path: Path, layout: str
) -> None:
    first, second = ranks.run(2, poisoned, job(corpus, tmp_path, "roll_back", layout), Poison("weights", (5,)))
    for seen in first, second:
        assert seen.outcome is Outcome.FINISHED
        assert seen.steps == [(1, 4), (2, 8), (3, 12), (4, 16), (3, 20), (4, 24), (5, 28), (6, 32), (7, 36), (8, 40)]
        assert np.array_equal(seen.states[2], seen.states[4])
        assert not np.array_equal(seen.states[3], seen.states[5])
        # The next step is copied, though none is due: who recovers does not read the bad batches again.
        assert (seen.copies[4:6], seen.copies[7]) == ([{3}] * 2, {4})
    told = [report for report in first.reports if report.kind not in ("checkpoint", "evaluation", "comparison")]
    assert [report.kind for report in told] == [
        "started", *["progress"] * 4, "interruption", "fault", "restart", *["progress"] * 5,
    ]  # fmt: skip
    assert [report.step for report in first.of(StepReport)] == [1, 2, 3, 4, 4, 5, 6, 7, 8]
    assert np.isfinite([report.loss for report in first.of(StepReport)]).all()
    (interruption,), (restart,) = first.of(InterruptionReport), first.of(RestartReport)
    assert (interruption.cause, interruption.step) == (Cause.DIVERGENCE, 5)
    assert (restart.cause, restart.step, restart.resumed_step) == (Cause.DIVERGENCE, 5, 3)
    assert restart.recovered_from == "memory"


@pytest.mark.nightly
def test_what_is_stored_is_not_stored_again_after_a_roll_back(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    ranks.run(2, poisoned, job(corpus, tmp_path, "roll_back"), Poison("weights", (5,)))
    folder = CheckpointFolder(str(tmp_path))
    assert [folder.manifest(step).samples for step in (3, 6, 8)] == [12, 32, 40]


@pytest.mark.nightly
def test_without_a_copy_of_its_own_a_gang_goes_back_to_the_store(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = job(corpus, tmp_path, "roll_back")
    ranks.run(2, poisoned, spec, None, "", 3)
    first, _ = ranks.run(2, poisoned, spec, Poison("weights", (6,)), "")
    assert first.steps == [(5, 20), (4, 24), (5, 28), (6, 32), (7, 36), (8, 40)]
    (restart,) = first.of(RestartReport)
    assert (restart.recovered_from, restart.resumed_step) == ("storage", 4)


@pytest.mark.full
def test_a_gang_that_has_resumed_goes_back_to_where_it_did(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = job(corpus, tmp_path, "roll_back")
    ranks.run(2, poisoned, spec, None, "", 3)
    first, _ = ranks.run(2, poisoned, spec, Poison("weights", (6,)), "ab")
    assert first.steps[:2] == [(5, 20), (4, 24)]
    (restart,) = first.of(RestartReport)
    assert (restart.recovered_from, restart.resumed_step) == ("memory", 4)


@pytest.mark.full
def test_with_nothing_to_go_back_to_the_job_fails(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    for seen in ranks.run(2, poisoned, job(corpus, tmp_path, "roll_back"), Poison("weights", (2,))):
        assert seen.failure.endswith("and there is no copy of the state to go back to")


@pytest.mark.full
def test_a_job_that_goes_on_diverging_fails_after_all(ranks: Ranks, corpus: Path, tmp_path: Path) -> None:
    spec = job(corpus, tmp_path, "skip", max_divergences=3)
    first, second = ranks.run(2, poisoned, spec, Poison("gradients", (4, 5, 6, 7)))
    assert "the last of 3 divergences; lower optimizer.learning_rate" in first.failure
    assert first.failure.startswith("the loss of step 6 is ")
    assert second.failure == first.failure
    assert [fault.step for fault in first.of(FaultReport)] == [4, 5]


@pytest.mark.parametrize(
    ("jump", "step", "faults"),
    [pytest.param(*each, marks=pytest.mark.nightly) for each in ((1.0, 35, [35]), (None, 35, []), (1.0, 30, []))],
    ids=str,
)
def test_a_loss_that_jumps_is_a_divergence_once_there_are_losses_to_compare_with(
    ranks: Ranks, corpus: Path, tmp_path: Path, jump: float | None, step: int, faults: list[int]
) -> None:
    spec = job(corpus, tmp_path, "roll_back", steps=min(36, step + 2), loss_jump=jump)
    first, _ = ranks.run(2, poisoned, spec, Poison("head", (step,)))
    assert [fault.step for fault in first.of(FaultReport)] == faults
    losses = [report.loss for report in first.of(StepReport)]
    jumps = np.diff(losses) > 1.0
    assert jumps.any() == (not faults)


def test_the_limit_is_a_jump_above_the_median_of_a_full_window() -> None:
    watch = DivergenceDetector(FaultToleranceConfig(loss_jump=0.5))
    for loss in [9.0] * 4 + [3.0] * (RECENT_STEPS - 5):
        watch.update(loss)
    assert watch.limit == sys.float_info.max
    watch.update(3.0)
    assert watch.limit == 3.5
    for _ in range(RECENT_STEPS):
        watch.update(2.0)
    assert watch.limit == 2.5


@pytest.mark.parametrize(
    ("steps", "too_many"),
    [
        ([5], [False]),
        ([5, 6, 7], [False, False, True]),
        ([5, 50, 104], [False, False, True]),
        ([5, 50, 105, 106], [False, False, False, True]),
        ([7, 7, 7], [False, False, True]),  # after going back
    ],
)
def test_divergences_count_for_a_hundred_steps(steps: list[int], too_many: list[bool]) -> None:
    watch = DivergenceDetector(FaultToleranceConfig(max_divergences=3))
    assert [watch.too_many(step) for step in steps] == too_many
