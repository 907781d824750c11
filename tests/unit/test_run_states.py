"""Ray Train's own controller and worker group under a gang's decisions, in one process without a cluster."""

import asyncio
import inspect
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray
from ray._common.usage import usage_lib
from ray.exceptions import RayActorError
from ray.train.v2._internal.callbacks import state_manager as state_callback
from ray.train.v2._internal.execution.worker_group import worker_group
from ray.train.v2._internal.state import state_manager
from ray.train.v2._internal.state.state_actor import TrainStateActor
from ray.train.v2.api import data_parallel_trainer, train_fn_utils

from service.gang.assignment import End, GangContext, RankEnd, WorkerPlace
from service.gang.control.port import Finish
from service.gang.ray.supervisor import Supervisor
from service.gang.ray_train import mirror
from service.gang.ray_train.mirror import RunState, TrainRun
from service.gang.ray_train.rank_worker import BROKEN_UP
from service.gang.status import GangPhase, JobTag
from service.logs import LogFormat
from service.security.access import Access
from tests.idle_rank import Rank, assigned
from tests.jobs import tiny_job

HALTED, FINISHED = RankEnd(End.HALTED), RankEnd(End.FINISHED)


class Handle:
    """An actor of this process; ``alive``: whether it answers."""

    def __init__(self, actor: Any, calls: ThreadPoolExecutor) -> None:
        self.actor, self.alive, self._calls = actor, True, calls
        self._actor_id = SimpleNamespace(hex=lambda: "ab")

    def __getattr__(self, name: str) -> Any:
        method = SimpleNamespace(remote=lambda *args, **more: self._called(name, *args, **more))
        method.options = lambda **_: method
        return method

    def _called(self, name: str, *args: Any, **more: Any) -> "Future[Any]":
        if self.alive:
            return self._calls.submit(_run, getattr(self.actor, name), *args, **more)
        gone: Future[Any] = Future()
        gone.set_exception(RayActorError())
        return gone


def _run(method: Callable[..., Any], *args: Any, **more: Any) -> Any:
    return asyncio.run(method(*args, **more)) if inspect.iscoroutinefunction(method) else method(*args, **more)


def _get(refs: Any, timeout: float | None = None) -> Any:
    return [_get(ref, timeout) for ref in refs] if isinstance(refs, list) else refs.result(timeout)


def _wait(refs: list[Any], num_returns: int = 1, timeout: float | None = None) -> tuple[list[Any], list[Any]]:
    done = wait(refs, timeout).done
    return [ref for ref in refs if ref in done], [ref for ref in refs if ref not in done]


class Run:
    """A run of Ray Train, and what its list of runs has of it."""

    def __init__(self, folder: Path, calls: ThreadPoolExecutor, state: TrainStateActor) -> None:
        self._calls, self._state = calls, state
        self._ranks: list[Rank] = []
        context = GangContext(JobTag("job-1", 1, "cola", "lab", "alice"), Access(), range(0), LogFormat.TEXT)
        self.train_run = TrainRun(tiny_job("unused", folder), context)

    def rank(self, pid: int) -> Any:
        place = WorkerPlace("node", "10.0.0.1", ("0",), pid, "host", "ab")
        self._ranks.append(Rank())
        return SimpleNamespace(actor=Handle(self._ranks[-1], self._calls), place=place, resources={"CPU": 1.0})

    def close(self) -> None:
        """Let no thread wait any more."""
        for rank in self._ranks:
            rank.stop(HALTED)
            rank.abort()

    def form(self, generation: int, *ranks: Any) -> list[Any]:
        """The ends of a generation's ranks."""
        ends = [each.actor.train.remote(assigned(generation, rank), None, {}, None) for rank, each in enumerate(ranks)]
        self.train_run.form(generation, ranks)
        return ends

    @property
    def status(self) -> tuple[str, str | None]:
        run = self._state.get_train_runs().get("job-1")
        return (run.status.value, run.status_detail) if run else ("NONE", None)

    @property
    def attempts(self) -> dict[str, tuple[str, list[int]]]:
        attempts = self._state.get_train_run_attempts()["job-1"].values()
        return {each.attempt_id: (each.status.value, [rank.pid for rank in each.workers]) for each in attempts}

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + 10
        while not condition():
            assert time.monotonic() < deadline, (self.status, self.attempts)
            time.sleep(0.005)


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    calls, state = ThreadPoolExecutor(16), TrainStateActor()
    runtime = SimpleNamespace(
        get_node_id=lambda: "node", get_actor_id=lambda: "ab", get_job_id=lambda: "01",
        current_actor=Handle(Supervisor.__new__(Supervisor), calls), gcs_address="127.0.0.1:6379",
    )  # fmt: skip
    for owner, name, stand_in in (
        (ray, "get", _get), (ray, "wait", _wait), (ray, "put", lambda value: value),
        (ray, "get_runtime_context", lambda: runtime),
        (state_callback.ray.runtime_context, "get_runtime_context", lambda: runtime),
        (usage_lib, "record_library_usage", lambda *_: None),
        (data_parallel_trainer, "tag_train_v2_trainer", lambda *_: None),
        (train_fn_utils, "record_extra_usage_tag", lambda *_: None),
        (mirror, "_start_state_actor", lambda _: None),
        (state_manager, "get_or_create_state_actor", lambda: Handle(state, calls)),
        (worker_group.ray_state, "get_max_resources_from_cluster_config", lambda: None),
        (worker_group, "SynchronizationActor", None),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, stand_in)
    run = Run(tmp_path, calls, state)
    yield run
    run.close()
    calls.shutdown(wait=False, cancel_futures=True)


@pytest.mark.full
def test_a_life_with_a_fault_a_halt_and_a_generation_that_cannot_start(run: Run, tmp_path: Path) -> None:
    rank, lost = run.rank(1), run.rank(2)
    run.train_run.say("waits for 2 CPUs")
    ends = run.form(1, rank)
    run.until(lambda: run.status == ("RUNNING", "waits for 2 CPUs") and run.attempts == {"1.1": ("RUNNING", [1])})
    rank.actor.save.remote(3, str(tmp_path))
    rank.actor.stop.remote(RankEnd(End.CONNECTION, "lost its connection"))
    assert _get(ends)[0].how is End.CONNECTION
    run.until(lambda: run.status[0] == "RESTARTING")
    lost.actor.alive = False
    ends = run.form(2, rank, lost)
    run.until(lambda: run.attempts == {"1.1": ("ERRORED", [1]), "1.2": ("ERRORED", [])})
    rank.actor.abort.remote()
    assert ends[0].result().message == BROKEN_UP
    ends = run.form(3, rank)
    run.until(lambda: run.attempts.get("1.3") == ("RUNNING", [1]))
    rank.actor.stop.remote(HALTED)
    assert _get(ends) == [HALTED]
    run.train_run.halted()
    ends = run.form(4, run.rank(4), rank)
    run.until(lambda: run.attempts.get("1.4") == ("RUNNING", [4, 1]))
    assert run.attempts["1.3"] == ("FINISHED", [1])
    run.train_run.check()
    run.train_run.finish(Finish(GangPhase.PAUSED, ""))


@pytest.mark.full
def test_the_result_has_the_last_checkpoint(run: Run, tmp_path: Path) -> None:
    rank = run.rank(1)
    ends = run.form(1, rank)
    run.until(lambda: run.attempts.get("1.1") == ("RUNNING", [1]))
    for step in (3, 6):
        _get(rank.actor.save.remote(step, str(tmp_path)))
    rank.actor.stop.remote(FINISHED)
    assert _get(ends) == [FINISHED]
    run.train_run.finish(Finish(GangPhase.SUCCEEDED, "trained 8 steps"))
    assert (run.status, run.attempts) == (("FINISHED", "trained 8 steps"), {"1.1": ("FINISHED", [1])})
    result = run.train_run.result
    assert result is not None and result.checkpoint is not None
    assert (result.checkpoint.path, result.metrics) == (f"{tmp_path}/step-00000006", {"step": 6, "bytes": 1})
    run.train_run.check()


@pytest.mark.parametrize(("phase", "status"), [(GangPhase.FAILED, "ERRORED"), (GangPhase.PAUSED, "ABORTED")])
@pytest.mark.parametrize("formed", [False, True])
def test_a_run_ends_as_the_gang_does(run: Run, phase: GangPhase, status: str, formed: bool) -> None:
    rank, failed = run.rank(1), phase is GangPhase.FAILED
    if formed:
        ends = run.form(1, rank)
        rank.actor.stop.remote(RankEnd(End.LASTING, "no text") if failed else RankEnd(End.STORED))
        _get(ends)
    run.train_run.finish(Finish(phase, "as it was told"))
    assert run.status == (status, "as it was told")
    assert run.attempts == ({"1.1": (status, [1])} if formed else {})


def test_a_run_that_ends_by_itself_is_told_of(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RunState, "say", lambda *_: 1 / 0)
    run.train_run.say("trains")
    run.until(lambda: not run.train_run._thread.is_alive())
    with pytest.raises(RuntimeError, match="division by zero"):
        run.train_run.check()
