"""What is told of a gang's life to Ray's list of training runs, and that a failure there is nobody's."""

import builtins
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from service.gang import train_tab
from service.gang.assignment import WorkerPlace
from service.gang.ray_private import TrainAttempt, TrainRun
from service.gang.status import GangPhase, JobTag
from service.gang.train_tab import TrainTab, TrainTabKeeper
from tests.service.records import a_spec

TAG = JobTag("job-1", 2, "cola", "lab", "alice")


class Recorder:
    """Stands for the keeper's actor."""

    def __init__(self) -> None:
        self.told: list[TrainRun | TrainAttempt] = []
        method = SimpleNamespace(remote=self.told.append)
        self.show_run = self.show_attempt = method

    def statuses(self) -> list[tuple[str, int] | GangPhase]:
        told, self.told[:] = list(self.told), []
        return [each.phase if isinstance(each, TrainRun) else (each.status, each.generation) for each in told]


@pytest.fixture
def keeper(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    recorder = Recorder()
    context = SimpleNamespace(get_job_id=lambda: "01000000", get_actor_id=lambda: "ab")
    monkeypatch.setattr(ray, "get_runtime_context", lambda: context)
    monkeypatch.setattr(train_tab, "_keeper", lambda: recorder)
    return recorder


def places(count: int) -> list[WorkerPlace]:
    return [WorkerPlace("n", "10.0.0.1", (), pid, "h", f"actor {pid}") for pid in range(count)]


def test_a_life_is_told_once_each_change(keeper: Recorder) -> None:
    tab = TrainTab(TAG, a_spec())
    for _ in range(3):
        tab.show(GangPhase.STARTING, "starting 2 x CPU")
    assert keeper.statuses() == [GangPhase.STARTING]
    for _ in range(3):
        tab.show(GangPhase.TRAINING, "they train", 1, places(2))
    run = keeper.told[-1]
    assert isinstance(run, TrainRun) and (run.workers, run.supervisor, run.ended) == (2, "ab", None)
    assert keeper.statuses() == [("RUNNING", 1), GangPhase.TRAINING]
    tab.show(GangPhase.RECOVERING, "rank 1 was lost")
    tab.show(GangPhase.TRAINING, "they train", 2, places(1))
    assert keeper.statuses() == [("ABORTED", 1), GangPhase.RECOVERING, ("RUNNING", 2), GangPhase.TRAINING]
    tab.show_last(GangPhase.SUCCEEDED, "trained 8 steps")
    run = keeper.told[-1]
    assert isinstance(run, TrainRun) and run.ended is not None and run.began <= run.ended
    assert keeper.statuses() == [("FINISHED", 2), GangPhase.SUCCEEDED]


def test_a_gang_formed_anew_between_two_looks_has_two_attempts(keeper: Recorder) -> None:
    tab = TrainTab(TAG, a_spec())
    tab.show(GangPhase.TRAINING, "they train", 1, places(2))
    tab.show(GangPhase.TRAINING, "they train", 2, places(2))
    assert keeper.statuses()[2:] == [("ABORTED", 1), ("RUNNING", 2), GangPhase.TRAINING]


def test_a_ray_that_makes_no_keeper_is_told_of_once(
    keeper: Recorder, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> None:
        raise ConnectionError("the head is away")

    monkeypatch.setattr(train_tab, "_keeper", refuse)
    tab = TrainTab(TAG, a_spec())
    for generation in range(5):
        tab.show(GangPhase.TRAINING, "they train", generation, places(2))
    tab.show_last(GangPhase.FAILED, "it failed")
    assert [record.getMessage() for record in caplog.records] == [
        "the job is not to be seen among Ray's training runs: the head is away"
    ]


def test_a_ray_without_the_state_actor_is_told_of_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    importing = builtins.__import__

    def without(name: str, *rest: Any) -> Any:
        if name.startswith("ray.train"):
            raise ModuleNotFoundError(f"No module named {name!r}")
        return importing(name, *rest)

    monkeypatch.setattr(builtins, "__import__", without)
    keeper = TrainTabKeeper()
    run = TrainRun(TAG, "01", "ab", GangPhase.TRAINING, "", 2, {"CPU": 1.0}, 1, None)
    for _ in range(3):
        keeper.show_run(run)
        keeper.show_attempt(TrainAttempt(TAG, 1, "RUNNING", (), {"CPU": 1.0}, 1, None))
    (record,) = caplog.records
    assert "jobs are not to be seen among Ray's training runs: No module named" in record.getMessage()
