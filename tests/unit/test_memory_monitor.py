"""What becomes of actors that Ray's memory monitor has killed: calls raise an error that is no ``RayActorError``."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from ray.exceptions import OutOfMemoryError
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2.api.config import FailureConfig
from ray.train.v2.api.exceptions import ControllerError

from boost_core.messages import Cause
from service.gang.ray import actors, builds, gangs
from service.gang.ray_train.mirror import GangFailurePolicy
from service.gang.status import Orders, PollRequest
from service.security.access import AccessRules

KILLED = OutOfMemoryError("1 worker(s) were killed due to the node running low on memory")


def raise_it(*_: Any, **__: Any) -> NoReturn:
    raise KILLED


@pytest.fixture
def ray_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (actors, gangs):
        monkeypatch.setattr(module, "ready", lambda calls, _seconds: list(calls))
    monkeypatch.setattr("ray.get", raise_it)
    monkeypatch.setattr("ray.wait", lambda calls, **_: (calls, []))


@pytest.mark.usefixtures("ray_says_so")
def test_a_gang_whose_supervisor_was_killed_is_gone() -> None:
    cluster, call = gangs.RayGangs(None, 1, Path("secrets")), SimpleNamespace(remote=lambda *_: "answer")
    cluster._handles["job", 1] = gangs._Handle(SimpleNamespace(poll=call))
    assert cluster.poll([PollRequest(("job", 1), 0, Orders(None, (), Cause.PAUSED))]) == [None]


@pytest.mark.usefixtures("ray_says_so")
def test_a_worker_that_was_killed_before_it_was_up_has_failed() -> None:
    worker = actors.WorkerHandle.__new__(actors.WorkerHandle)
    worker.number, worker.place, worker._node, worker._placing = 1, None, "a", "place"  # type: ignore[assignment]
    assert worker.status().failure == str(KILLED)


@pytest.mark.usefixtures("ray_says_so")
def test_a_build_that_was_killed_is_gone() -> None:
    built = builds.RayBuilds(AccessRules("secrets", None))
    built._answers["build"] = "status"
    assert built.poll("build") is None


def test_a_run_goes_on_without_a_rank_that_was_killed_as_it_began() -> None:
    policy = GangFailurePolicy(FailureConfig(max_failures=-1))
    assert policy.make_decision(ControllerError(KILLED)) is FailureDecision.RETRY
