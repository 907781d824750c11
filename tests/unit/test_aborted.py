"""What collectives give once they are aborted counts for nothing; and how they are, when a rank has failed."""

import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from boost_core.messages import EvaluationReport, StepReport
from boost_core.train import Membership, checkpoint_manager, loop, train
from boost_core.train.state import TrainState
from service.gang.assignment import Assignment, End, GangContext, Message, RankEnd
from service.gang.status import JobTag
from service.gang.worker import worker as worker_module
from service.gang.worker.worker import Worker, end_of
from service.logs import LogFormat
from service.security.access import Access
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


def a_worker(push=lambda message: None) -> Worker:
    """A worker of this process, which sends what it has to say to ``push``."""
    context = GangContext(JobTag("job-1", 1, "a", "t", "u"), Access(), range(0), LogFormat.TEXT)
    return Worker(0, context, "node", "actor", "127.0.0.1", (), push, lambda *_: [])


@pytest.mark.full
def test_all_communicators_are_aborted_at_once_and_once_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like NCCL's, these aborts end when the training thread, which waits for any of them, has released its graph."""
    worker, membership, seen = a_worker(), Membership(), []
    worker.membership = membership
    all_begun, released = threading.Barrier(4), threading.Event()

    class Group:
        def abort(self) -> None:
            seen.append(membership.aborted.is_set())
            all_begun.wait(20)
            assert released.wait(20)

    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        monkeypatch.setattr(worker_module, "_world", SimpleNamespace(pg_map={Group(): None for _ in range(3)}))
        worker.abort()
        assert not seen and not membership.aborted.is_set()  # another backend's fail by themselves
        monkeypatch.setattr(worker_module.dist, "get_backend", lambda: "nccl")
        worker.abort()
        worker.abort()  # as when a rank has failed, and its supervisor has all of them aborted
        all_begun.wait(20)
        monkeypatch.setattr(worker_module, "ABORT_SECONDS", 0.1)
        assert not worker._leave(), "communicators that stay are the end of a process"
        released.set()
        monkeypatch.setattr(worker_module, "ABORT_SECONDS", 20.0)
        assert worker._leave() and not dist.is_initialized()
        assert seen == [True] * 3
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


@pytest.mark.full
@pytest.mark.parametrize(
    ("error", "how", "calls"),
    [
        (ValueError("bad data"), End.LASTING, ["reported", "aborted", "left"]),
        (RuntimeError("CUDA error: an illegal memory access was encountered\nSearch for"), End.DEVICE, ["reported"]),
    ],
)
def test_a_rank_that_fails_says_so_before_it_leaves_the_others_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, how: End, calls: list[str]
) -> None:
    seen = list[str]()

    def push(message: Message) -> None:
        if message.failed is not None:
            assert message.failed.how is how
            seen.append("reported")

    def fails(*_: object) -> None:
        raise error

    worker = a_worker(push)
    spec = tiny_job("unused", tmp_path, parallelism={"tensor_parallel_size": 1})
    assignment = Assignment(1, spec, 0, worker.rendezvous(), (0,))
    monkeypatch.setattr(worker_module.trainer, "train", fails)
    monkeypatch.setattr(worker, "abort", lambda: seen.append("aborted"))
    leave = worker._leave
    monkeypatch.setattr(worker, "_leave", lambda: (seen.append("left"), leave())[1])
    worker.join(assignment, None)
    try:
        end = worker.train(assignment)
        assert end.how is how and seen == calls
        # A broken device is left alone, with the process that has used it.
        assert end.reusable == (how is not End.DEVICE) == (not dist.is_initialized())
        assert how is not End.DEVICE or end.message == "CUDA error: an illegal memory access was encountered"
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def test_a_worker_whose_machine_cannot_launch_kernels_says_so_before_it_meets_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = a_worker()
    spec = tiny_job("unused", tmp_path, parallelism={"tensor_parallel_size": 1}, resources={"gpus_per_worker": 1})
    assignment = Assignment(1, spec, 0, worker.rendezvous(), (0,))
    monkeypatch.setattr(worker_module, "lacks_compiler", lambda: "install gcc")
    worker.join(assignment, None)
    assert worker.train(assignment) == RankEnd(End.LASTING, "install gcc")
