"""A gang that does not answer, and whose processes cannot all be killed, is not taken for gone."""

from types import SimpleNamespace
from typing import Any

import pytest

from service.gang.ray import gangs as module
from service.gang.ray.gangs import RayGangs
from service.gang.status import Orders, PollRequest

GANG = "job-1", 1


@pytest.fixture
def unkillable(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Processes that cannot be killed. The supervisor, 1, has a name in Ray until it is."""
    left, killed = [2], set[int]()

    def end(_: str, pids: list[int], __: float) -> list[int]:
        killed.update(set(pids) - set(left))
        return [pid for pid in pids if pid in left]

    def supervisor(_: str) -> Any:
        if 1 in killed:
            raise ValueError("there is no such actor")
        return SimpleNamespace(_actor_id=SimpleNamespace(hex=lambda: "1"))

    monkeypatch.setattr(module, "end_processes", end)
    monkeypatch.setattr(module.private_api, "require_head", lambda: None)
    monkeypatch.setattr(module.private_api, "actor_processes", lambda _: ({"node": [1]}, {"node": [2, 3]}))
    monkeypatch.setattr(module.ray, "get", lambda answers, timeout: answers)
    monkeypatch.setattr(module.ray, "get_actor", supervisor)
    monkeypatch.setattr(module.ray, "kill", lambda _: None)
    monkeypatch.setattr(module, "ready", lambda *_: [])
    return left


def test_it_is_silent_until_none_is_left(unkillable: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    gangs, clock = RayGangs.__new__(RayGangs), SimpleNamespace(time=100.0)
    gangs._handles, gangs._left = {}, {}
    monkeypatch.setattr(module.time, "monotonic", lambda: clock.time)
    with pytest.raises(RuntimeError, match=r"its processes \[2\] cannot be killed"):
        gangs.end_hung(*GANG)
    clock.time += 7
    (status,) = gangs.poll([PollRequest(GANG, 0, Orders(None, (), None))])
    assert status is not None and status.silent_seconds == 7, "its job gets no other gang yet"
    with pytest.raises(RuntimeError, match="cannot be killed"):
        gangs.end_hung(*GANG)
    unkillable.clear()
    gangs.end_hung(*GANG)
    assert gangs.poll([PollRequest(GANG, 0, Orders(None, (), None))]) == [None]
