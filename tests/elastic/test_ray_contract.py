"""What the gang leans on and Ray does not promise, on the version that is pinned."""

import os
import signal
import time
import tomllib
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

import psutil
import pytest
import ray
from ray.exceptions import OutOfMemoryError, RayActorError
from ray.train.v2._internal.execution.failure_handling import FailureDecision
from ray.train.v2.api.config import FailureConfig
from ray.train.v2.api.exceptions import ControllerError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from boost_core.messages import Cause
from service.gang.control.fault_detection import NodeWatch
from service.gang.ray import actors, builds, gangs
from service.gang.ray.actors import end_processes
from service.gang.ray.private_api import actor_processes, draining_nodes, free_memory, free_resources, node_table
from service.gang.ray.supervisor import cluster_nodes, lost_nodes
from service.gang.ray_train.mirror import GangFailurePolicy
from service.gang.status import Orders, PollRequest
from service.security.access import AccessRules
from tests.elastic.ray_cluster import Nodes


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes(3)
    yield nodes
    nodes.close()


def within(seconds: float, condition: Callable[[], object]) -> bool:
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


class Sleeper:
    def pid(self) -> int:
        return os.getpid()


def workers() -> list[str]:
    return [node["NodeID"] for node in node_table() if node["Alive"] and node["Resources"].get("CPU")]


def test_ray_is_pinned_to_the_version_that_is_tested() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (pin,) = [each for each in project["optional-dependencies"]["service"] if each.startswith("ray[")]
    assert pin.endswith(f"=={version('ray')}")


@pytest.mark.full
def test_the_node_table_tells_resources_labels_and_addresses(nodes: Nodes) -> None:
    assert len(workers()) == 3
    for node in node_table():
        assert node["Labels"]["ray.io/node-id"] == node["NodeID"]
        assert node["NodeManagerAddress"]
        assert int(node["NodeManagerPort"])


@pytest.mark.full
def test_free_resources_are_by_node_and_shrink_as_they_are_taken(nodes: Nodes) -> None:
    group = placement_group([{"CPU": 2}])
    ray.get(group.ready())
    assert within(5, lambda: sorted(free_resources()[node].get("CPU", 0) for node in workers()) == [0, 2, 2])
    remove_placement_group(group)
    assert within(5, lambda: all(free_resources()[node].get("CPU", 0) == 2 for node in workers()))


def test_free_memory_is_a_part_of_what_there_is() -> None:
    assert 0 < free_memory() < psutil.virtual_memory().total


@pytest.mark.full
def test_a_bundle_can_be_kept_off_nodes(nodes: Nodes) -> None:
    *avoided, only = workers()
    group = placement_group([{"CPU": 1}], bundle_label_selector=[{"ray.io/node-id": f"!in({','.join(avoided)})"}])
    ray.get(group.ready(), timeout=60)
    assert within(5, lambda: free_resources()[only].get("CPU", 0) == 1)
    remove_placement_group(group)


@pytest.mark.full
def test_the_head_can_be_asked_for(nodes: Nodes) -> None:
    where = ray.remote(lambda: ray.get_runtime_context().get_node_id())
    node = ray.get(where.options(num_cpus=0, resources={"node:__internal_head__": 0.001}).remote())
    assert node not in workers()


@pytest.mark.nightly
def test_killing_a_stopped_process_through_ray_alone_does_not_end_it(nodes: Nodes) -> None:
    actor = ray.remote(Sleeper).options(num_cpus=0).remote()
    pid = ray.get(actor.pid.remote())
    os.kill(pid, signal.SIGSTOP)
    ray.kill(actor)
    time.sleep(1)
    os.kill(pid, 0)  # it is still there: why the gang kills such processes from outside
    os.kill(pid, signal.SIGKILL)


class Parent:
    def start(self) -> tuple[int, int]:
        self.child = ray.remote(Sleeper).options(num_cpus=0).remote()
        return os.getpid(), ray.get(self.child.pid.remote())


@pytest.mark.nightly
def test_the_processes_of_an_actor_and_of_those_it_started_end_although_they_are_stopped(nodes: Nodes) -> None:
    parent = ray.remote(Parent).options(num_cpus=0, name="parent", lifetime="detached").remote()
    pid, child = ray.get(parent.start.remote())
    own, started = actor_processes(parent._actor_id.hex())
    assert ([*own.values()], [*started.values()]) == ([[pid]], [[child]])
    os.kill(pid, signal.SIGSTOP)
    for processes, seconds in ((own, 0.0), (started, 5.0)):
        for node, pids in processes.items():
            assert ray.get(end_processes(node, pids, seconds), timeout=60) == []
    assert not psutil.pid_exists(pid) and not psutil.pid_exists(child)
    assert within(10, lambda: actor_processes(parent._actor_id.hex()) == ({}, {}))


@pytest.mark.nightly
def test_a_notice_is_seen_and_a_lost_node_is_known_before_ray_knows(nodes: Nodes) -> None:
    noticed, lost, _ = workers()
    # A node on which nothing runs goes away at once.
    there = NodeAffinitySchedulingStrategy(noticed, soft=False)
    resident = ray.remote(Sleeper).options(num_cpus=1, scheduling_strategy=there).remote()
    ray.get(resident.pid.remote())
    nodes.drain(noticed, seconds=300)
    assert within(5, lambda: noticed in draining_nodes())
    assert draining_nodes()[noticed] == pytest.approx(time.time() + 300, abs=10)
    watch, now = NodeWatch(), time.monotonic()
    alive, leaving = cluster_nodes()
    assert {noticed, lost} <= alive
    watch.see(alive, leaving, now)
    assert watch.leaving.keys() == {noticed}
    assert now + 270 < watch.leaving[noticed] <= now + 290, "it says when"
    assert lost_nodes([noticed, lost]) == (set(), set())
    nodes.remove(lost)
    assert lost_nodes([noticed, lost]) == ({lost}, set())
    assert watch.probed(*lost_nodes([noticed, lost]), now) == {lost}
    assert lost in workers()
    assert watch.unusable(now) == {noticed, lost}


# What becomes of actors that Ray's memory monitor has killed: calls raise an error that is no ``RayActorError``.

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


HUNG = "job-1", 1


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

    monkeypatch.setattr(gangs, "end_processes", end)
    monkeypatch.setattr(gangs.private_api, "require_head", lambda: None)
    monkeypatch.setattr(gangs.private_api, "node_table", lambda: [{"NodeID": "node", "Alive": True}])
    monkeypatch.setattr(gangs.private_api, "actor_processes", lambda _: ({"node": [1]}, {"node": [2, 3]}))
    monkeypatch.setattr(gangs.ray, "get", lambda answers, timeout: answers)
    monkeypatch.setattr(gangs.ray, "get_actor", supervisor)
    monkeypatch.setattr(gangs.ray, "kill", lambda _: None)
    monkeypatch.setattr(gangs, "ready", lambda *_: [])
    return left


@pytest.mark.parametrize("how", ["killed", "its node has gone"])
def test_a_hung_gang_is_silent_until_no_process_is_left(
    unkillable: list[int], monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    cluster, clock = gangs.RayGangs(None, 1, Path("secrets")), SimpleNamespace(time=100.0)
    monkeypatch.setattr(gangs.time, "monotonic", lambda: clock.time)
    with pytest.raises(RuntimeError, match=r"its processes \[2\] cannot be killed"):
        cluster.end_hung(*HUNG)
    clock.time += 7
    (status,) = cluster.poll([PollRequest(HUNG, 0, Orders(None, (), Cause.PAUSED))])
    assert status is not None and status.silent_seconds == 7, "its job gets no other gang yet"
    with pytest.raises(RuntimeError, match="cannot be killed"):
        cluster.end_hung(*HUNG)
    if how == "killed":
        unkillable.clear()
    else:
        monkeypatch.setattr(gangs.private_api, "node_table", lambda: [{"NodeID": "node", "Alive": False}])
    cluster.end_hung(*HUNG)
    assert cluster.poll([PollRequest(HUNG, 0, Orders(None, (), Cause.PAUSED))]) == [None]


@pytest.mark.full
def test_a_run_goes_on_without_a_rank_that_was_killed_as_it_began() -> None:
    assert not issubclass(OutOfMemoryError, RayActorError)
    policy = GangFailurePolicy(FailureConfig(max_failures=-1))
    assert policy.make_decision(ControllerError(KILLED)) is FailureDecision.RETRY
