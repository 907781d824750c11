"""What collectives give once they are aborted counts for nothing: no loss, no update, no copy, no evaluation."""

from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from boost_core.messages import EvaluationReport, StepReport
from boost_core.train import Membership, checkpoint_manager, loop, train
from boost_core.train.state import TrainState
from service.gang.assignment import End
from service.gang.worker import worker as worker_module
from service.gang.worker.worker import Worker, end_of
from tests.distributed.recording import Recorder
from tests.jobs import tiny_job, write_corpus


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("when", ["step", "evaluation", "copy"])
def test_nothing_counts_that_was_read_after_the_abort(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    spec = tiny_job(
        write_corpus(tmp_path / "corpus"), tmp_path / "job", parallelism={"tensor_parallel_size": 1},
        training={"steps": 3, "evaluate_every_steps": 2}, checkpoint={"every_steps": 2},
    )  # fmt: skip
    membership, recorder, states = Membership(), Recorder(), list[TrainState]()
    kept: list[torch.Tensor] = []

    def aborting(function):
        def call(*arguments, **named):
            result = function(*arguments, **named)
            if states[0].step == (1 if when == "step" else 2):
                kept[:] = [group.master.clone() for group in states[0].optimizer.groups]
                membership.aborted.set()
            return result

        return call

    initial = TrainState.initial

    def watched(*arguments, **named) -> TrainState:
        states.append(initial(*arguments, **named))
        if when == "step":
            monkeypatch.setattr(states[0].clock, "values", aborting(states[0].clock.values))
        return states[0]

    monkeypatch.setattr(TrainState, "initial", watched)
    if when == "evaluation":
        monkeypatch.setattr(loop, "evaluate", aborting(loop.evaluate))
    if when == "copy":
        monkeypatch.setattr(checkpoint_manager.HostCopies, "take", aborting(checkpoint_manager.HostCopies.take))
    with (
        patch.object(checkpoint_manager.Saver, "make_way", return_value=False),
        pytest.raises(dist.DistError, match="aborted") as raised,
    ):
        train(spec, recorder, membership)
    assert end_of(raised.value).how is End.CONNECTION
    steps = [report.step for report in recorder.reports if isinstance(report, StepReport)]
    assert steps == ([1] if when == "step" else [1, 2])
    evaluated = [report.step for report in recorder.reports if isinstance(report, EvaluationReport)]
    assert evaluated == ([2] if when == "copy" else [])
    assert not list((tmp_path / "job").glob("**/manifest*"))
    assert all(
        torch.equal(group.master, before) for group, before in zip(states[0].optimizer.groups, kept, strict=True)
    )


def test_a_worker_says_so_before_it_aborts(monkeypatch: pytest.MonkeyPatch) -> None:
    worker, membership, seen = Worker.__new__(Worker), Membership(), []
    worker.membership = membership
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        monkeypatch.setattr(worker_module, "_abort_process_group", lambda: seen.append(membership.aborted.is_set()))
        worker.abort()
        assert not seen and not membership.aborted.is_set()  # another backend's fail by themselves
        monkeypatch.setattr(worker_module.dist, "get_backend", lambda: "nccl")
        worker.abort()
        assert seen == [True]
    finally:
        dist.destroy_process_group()
