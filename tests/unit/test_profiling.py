"""Traces of steps, by torch's own profiler; the steps are made up."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import record_function

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.config import ParallelismConfig
from boost_core.messages import FaultReport, ProfileReport, Report
from boost_core.train.profiling import StepProfiler
from tests.jobs import tiny_job

PATIENCE_SECONDS = 60


class Rank:
    """One that trains: a product a step."""

    def __init__(self, folder: str, rank: int = 0) -> None:
        self.reports: list[Report] = []
        self.profiler = StepProfiler(self.reports.append)
        self.profiler.begin(rank, folder)
        self.steps = 0

    def train(self, steps: int) -> None:
        for _ in range(steps):
            with record_function(f"own step {self.steps}"):
                torch.ones(8, 8) @ torch.ones(8, 8)
            self.steps += 1
            self.profiler.after_step(self.steps)

    def written(self) -> None:
        self.profiler.wait(PATIENCE_SECONDS)


@pytest.fixture
def rank(tmp_path: Path) -> Iterator[Rank]:
    made = Rank(f"file://{tmp_path}/profiles", rank=3)
    yield made
    made.profiler.end()  # torch has one profiler for all


def names(path: Path) -> list[str]:
    trace: dict[str, Any] = json.loads(gzip.decompress(path.read_bytes()))
    return [event["name"] for event in trace["traceEvents"] if event.get("ph") == "X"]


def test_a_trace_has_the_steps_that_were_asked_for(rank: Rank, tmp_path: Path) -> None:
    rank.train(2)
    rank.profiler.ask(3)
    rank.train(6)
    rank.written()
    file = tmp_path / "profiles" / "step-00000003" / "rank-3.json.gz"
    assert rank.reports == [ProfileReport(step=3, steps=3, rank=3, url=f"file://{file}", bytes=file.stat().st_size)]
    assert [name for name in names(file) if name.startswith("own step")] == ["own step 3", "own step 4", "own step 5"]
    assert [name for name in names(file) if name.startswith("Profiler")] == [f"ProfilerStep#{n}" for n in (4, 5, 6)]
    assert names(file).count("aten::mm") == 3


def test_requests_are_met_one_after_the_other(rank: Rank, tmp_path: Path) -> None:
    rank.profiler.ask(1)
    rank.profiler.ask(2)
    rank.train(2)  # it begins after the first step, and is complete after the second
    rank.written()
    rank.train(4)
    rank.written()
    first, second = rank.reports
    assert [(report.step, report.steps) for report in (first, second)] == [(1, 1), (3, 2)]


def test_a_store_that_fails_costs_the_trace_alone(rank: Rank, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "profiles").write_text("in the way")
    rank.profiler.ask(1)
    rank.train(3)
    rank.written()
    url = f"file://{tmp_path}/profiles/step-00000001/rank-3.json.gz"
    assert rank.reports == [
        FaultReport(
            what="profile", step=1, rank=3,
            message=f"there is no profile of rank 3: {url} cannot be written; the log says why",
        )
    ]  # fmt: skip
    assert f"{url} cannot be written: " in caplog.text
    (tmp_path / "profiles").unlink()
    rank.profiler.ask(1)
    rank.train(3)
    rank.written()
    assert isinstance(rank.reports[-1], ProfileReport)


def test_a_gang_that_ends_forgets_what_is_not_complete(rank: Rank, tmp_path: Path) -> None:
    rank.profiler.ask(20)
    rank.profiler.ask(20)
    rank.train(3)
    rank.profiler.end()
    (fault,) = rank.reports
    assert fault.message == "there is no profile of rank 3: its gang ended before 20 steps were done"
    assert not (tmp_path / "profiles").exists()
    rank.profiler.begin(0, f"{tmp_path}/profiles")
    rank.train(30)
    assert rank.reports == [fault]
    rank.profiler.ask(1)  # torch's profiler is free again
    rank.train(2)
    rank.written()
    assert rank.reports[-1].rank == 0


def test_a_profiler_that_fails_costs_the_trace_alone(rank: Rank, monkeypatch: pytest.MonkeyPatch) -> None:
    def busy(_self: object) -> None:
        raise RuntimeError("CUPTI is in use")

    with monkeypatch.context() as patched:
        patched.setattr(torch.profiler.profile, "start", busy)
        rank.profiler.ask(2)
        rank.train(3)
    assert rank.reports == [
        FaultReport(
            what="profile", step=1, rank=3,
            message="there is no profile of rank 3: the profiler has failed: CUPTI is in use",
        )
    ]  # fmt: skip
    rank.profiler.ask(1)
    rank.train(2)
    rank.written()
    assert isinstance(rank.reports[-1], ProfileReport)


def test_traces_are_no_checkpoints(rank: Rank, tmp_path: Path) -> None:
    folder, spec = CheckpointFolder(f"file://{tmp_path}"), tiny_job(tmp_path, tmp_path)
    for step in (1, 2, 3):
        folder.prepare(step)
        folder.commit_written(spec, ParallelismConfig(), step, step, {})
    rank.profiler.ask(1)
    rank.train(2)
    rank.written()
    assert folder.steps() == [1, 2, 3]
    assert folder.prune(keep_last=1, keep_every=None) == [1, 2]
    assert Path(rank.reports[0].url.removeprefix("file://")).exists()
