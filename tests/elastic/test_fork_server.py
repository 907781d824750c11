"""Ranks as forks, on Ray itself: what that does with them, and what of Ray they lean on."""

import hashlib
import inspect
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray
from ray._private.runtime_env.context import RuntimeEnvContext
from ray._private.workers import default_worker, setup_worker
from ray.exceptions import RayActorError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from service.gang.ray.fork_server import PRELOADED, PYTHON_OF_FORKS
from service.gang.ray.private_api import OF_A_WORKER
from tests.elastic.ray_cluster import Nodes
from tests.elastic.test_ray_contract import within, workers

pytestmark = pytest.mark.nightly

SOURCES = {  # of what a fork runs, and of what runs its client
    "default_worker": (default_worker, "797c8e149c69"),
    "setup_worker": (setup_worker, "9b99dcb0e740"),
    "exec_worker": (RuntimeEnvContext.exec_worker, "ff162b2b53cd"),
}


@pytest.mark.parametrize("name", SOURCES)
def test_rays_way_to_start_a_worker_is_what_it_was_when_it_was_read(name: str) -> None:
    """After a change of Ray: read what has changed, see that forks still hold, and take the new digest."""
    source, digest = SOURCES[name]
    assert hashlib.sha256(inspect.getsource(source).encode()).hexdigest()[:12] == digest


class Rank:
    """What a rank's process is."""

    def tell(self) -> dict[str, Any]:
        before = {*PRELOADED, *OF_A_WORKER} <= sys.modules.keys()
        import torch

        sys.stdout.write("a line for the log\n")
        return {
            "pid": os.getpid(), "server": os.getppid(), "preloaded": before, "id": ray.ObjectRef.from_random().hex(),
            "cuda": torch.cuda.is_initialized() or torch.cuda._is_in_bad_fork(),
            "raylet": int(os.environ["RAY_RAYLET_PID"]), "job": os.environ["RAY_JOB_ID"],
        }  # fmt: skip


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes(1)
    yield nodes
    nodes.close()


def started(node: str, count: int) -> list[tuple[Any, dict[str, Any]]]:
    """Ranks on a node, and what they tell."""
    actor: Any = ray.remote(Rank)
    there = NodeAffinitySchedulingStrategy(node, soft=False)
    options = {"num_cpus": 0, "scheduling_strategy": there, "runtime_env": {"py_executable": PYTHON_OF_FORKS}}
    ranks = [actor.options(**options).remote() for _ in range(count)]
    return list(zip(ranks, ray.get([rank.tell.remote() for rank in ranks], timeout=60), strict=True))


def clients(raylet: int) -> set[int]:
    """The processes that stand for ranks."""
    children = psutil.Process(raylet).children()
    return {child.pid for child in children if any("fork_client" in argument for argument in child.cmdline())}


def test_whoever_joins_the_cluster_next_has_ranks_too(nodes: Nodes) -> None:
    (node,) = workers()
    ((_, of_the_first),) = started(node, 1)
    ray.shutdown()
    ray.init(nodes.address, namespace="boost", log_to_driver=False, logging_level="ERROR")
    ((rank, of_the_next),) = started(node, 1)
    assert of_the_next["job"] == ray.get_runtime_context().get_job_id() != of_the_first["job"]
    ray.kill(rank)
    assert within(60, lambda: not clients(of_the_next["raylet"]))


def test_ranks_are_forks_of_their_nodes_server(nodes: Nodes) -> None:
    (node,) = workers()
    (rank, one), (_, two) = started(node, 2)  # at once, where there is no server
    server, raylet = psutil.Process(one["server"]), one["raylet"]
    assert one["server"] == two["server"]
    assert (one["preloaded"], one["cuda"], server.num_threads()) == (True, False, 1)
    assert one["id"] != two["id"]
    assert one["job"] == ray.get_runtime_context().get_job_id()
    assert len(clients(raylet)) == 2
    title = psutil.Process(one["pid"]).cmdline()[0]
    assert title.startswith("ray::Rank")
    (log,) = Path(nodes.cluster.head_node.get_logs_dir_path()).glob(f"worker-*-{one['pid']}.out")
    assert "a line for the log" in log.read_text()
    # A rank is killed, and another by Ray.
    os.kill(one["pid"], signal.SIGKILL)
    with pytest.raises(RayActorError):
        ray.get(rank.tell.remote(), timeout=60)
    assert within(60, lambda: len(clients(raylet)) == 1)
    ((third, three),) = started(node, 1)
    assert three["server"] == server.pid
    ray.kill(third)
    assert within(60, lambda: not psutil.pid_exists(three["pid"]) and len(clients(raylet)) == 1)
    # The server is killed while it is asked: its rank lives on, and the next one has another server.
    server.suspend()
    with ThreadPoolExecutor() as asking:
        answer = asking.submit(started, node, 1)
        assert within(60, lambda: len(clients(raylet)) == 2)
        time.sleep(0.5)  # for it to ask
        server.kill()
        ((_, four),) = answer.result()
    assert four["server"] != server.pid
    assert psutil.pid_exists(two["pid"])
    # With the node all of this goes.
    left = [psutil.Process(pid) for pid in {two["pid"], four["pid"], four["server"], *clients(raylet)}]
    assert len(left) == 5
    os.kill(raylet, signal.SIGKILL)
    assert within(180, lambda: not any(process.is_running() for process in left)), left
