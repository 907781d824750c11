"""The fork server without Ray, whose part a script plays: its raylet is a process that sleeps, its worker prints."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from service.gang.ray import fork_client, fork_server
from service.gang.ray.fork_server import ForkServer

SERVER = """
import os, socket, sys
import changing
from service.gang.ray.fork_client import _server_of
from service.gang.ray.fork_server import ForkServer, become
listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
folder, address = _server_of(sys.argv)
listener.bind(address)
os.close(folder)
listener.listen()
server = ForkServer(listener, os.pidfd_open(int(sys.argv[2])))
print("up", flush=True)
if request := server.serve():
    become(request)
"""
WORKER = """
import json, os, random, sys, time
import numpy as np
seen = {
    "pid": os.getpid(), "parent": os.getppid(), "arguments": sys.argv, "name": __name__, "path": sys.path[0],
    "folder": os.getcwd(), "environment": dict(os.environ), "input": sys.stdin.read(), "group": os.getpgid(0),
    "files": sorted(os.listdir("/proc/self/fd")), "threads": len(os.listdir("/proc/self/task")),
    "random": [random.random(), np.random.random()],
}
print(json.dumps(seen), flush=True)
print("said aside", file=sys.stderr, flush=True)
time.sleep(float(sys.argv[1]))
sys.exit(int(sys.argv[2]))
"""


def ends(process: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while process():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.01)
    return True


def lives(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


class Node:
    """A node of Ray's: a raylet, and a folder where its sockets would be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.raylet = subprocess.Popen(["sleep", "600"])
        self.environment = os.environ | {
            "RAY_RAYLET_PID": str(self.raylet.pid), "PYTHONPATH": str(folder), "ODD": "a\nb=c\udcff",
        }  # fmt: skip
        (folder / "changing.py").write_text("")
        self.worker = folder / "worker.py"
        self.worker.write_text(WORKER)
        self.named = f"--raylet-name={folder}/raylet"
        self.started: list[subprocess.Popen[str]] = [self.raylet]

    def start(self, *command: object, **more: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)], text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, cwd=self.folder, **{"env": self.environment} | more,
        )  # fmt: skip
        self.started.append(process)
        return process

    def serve(self) -> subprocess.Popen[str]:
        server = self.start("-c", SERVER, self.named, self.raylet.pid)
        assert server.stdout and server.stdout.readline() == "up\n"
        return server

    def work(self, seconds: float = 600, status: int = 0, **more: Any) -> subprocess.Popen[str]:
        return self.start("-I", "-S", fork_client.__file__, self.worker, seconds, status, self.named, **more)

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    node = Node(tmp_path)
    yield node
    node.close()


def seen(worker: subprocess.Popen[str]) -> dict[str, Any]:
    assert worker.stdout
    return json.loads(worker.stdout.readline())


def test_a_fork_is_as_a_process_that_was_started_by_itself(node: Node) -> None:
    own = node.start(node.worker, 0, 0, node.named)
    usual, error = own.communicate()
    server = node.serve()
    client, another = node.work(0), node.work(0)
    fork, sibling, expected = seen(client), seen(another), json.loads(usual)
    same = ["arguments", "name", "path", "folder", "environment", "input", "files", "threads"]
    assert {each: fork[each] for each in same} == {each: expected[each] for each in same}
    assert fork["parent"] == sibling["parent"] == server.pid
    assert fork["group"] == fork["pid"], "Ray may signal a worker's group"
    assert len({*fork["random"], *sibling["random"], *expected["random"]}) == 6
    assert error == "said aside\n"
    assert client.stderr and client.stderr.readline() == "said aside\n"


def test_a_client_stands_for_its_fork(node: Node) -> None:
    node.serve()
    ended, kept, killed = node.work(0, 3), node.work(), node.work()
    ended.wait(60)
    there = seen(killed)["pid"]
    killed.kill()
    assert ends(lambda: lives(there))
    os.kill(seen(kept)["pid"], signal.SIGKILL)
    kept.wait(60)


def test_nothing_outlives_the_nodes_raylet(node: Node) -> None:
    server, client = node.serve(), node.work()
    fork = seen(client)["pid"]
    node.raylet.kill()
    server.wait(60)
    client.wait(60)
    assert not lives(fork)


def test_forks_outlive_their_server(node: Node) -> None:
    server, client = node.serve(), node.work()
    fork = seen(client)["pid"]
    server.kill()
    server.wait()
    time.sleep(0.1)
    assert lives(fork) and client.poll() is None
    os.kill(fork, signal.SIGKILL)
    client.wait(60)


@pytest.mark.full
def test_a_worker_is_a_fork_of_the_next_server_where_its_own_ends(node: Node) -> None:
    server = node.serve()
    (node.folder / "changing.py").write_text("# what the server has imported is not what is installed now")
    client = node.work(0)
    worker = seen(client)
    assert worker["pid"] != client.pid and worker["parent"] != server.pid
    assert (client.wait(60), server.wait(60)) == (0, 0)


def test_a_worker_starts_by_itself_where_others_could_read_what_it_says(node: Node) -> None:
    (node.folder / "raylet.forks").mkdir()
    (node.folder / "raylet.forks").chmod(0o755)
    client = node.work(0)
    assert seen(client)["pid"] == client.pid


def test_a_server_that_nobody_needs_ends(node: Node, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server, "IDLE_SECONDS", 0.01)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(node.folder / "server"))
        listener.listen()
        assert ForkServer(listener, os.pidfd_open(node.raylet.pid)).serve() is None


def test_another_environment_has_another_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = set()
    for name, value in (("RAY_JOB_ID", "01000000"), ("RAY_JOB_ID", "02000000"), ("NCCL_DEBUG", "INFO")):
        monkeypatch.setenv(name, value)
        folder, address = fork_client._server_of([f"--raylet-name={tmp_path}/raylet"])
        os.close(folder)
        names.add(address.rpartition("/")[2])
    assert len(names) == 3


def test_a_client_does_not_wait_for_its_own_lock_after_a_server_that_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[str] = []

    def start(address: str) -> None:
        started.append(address)
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(address)

    flock = fork_client.fcntl.flock
    monkeypatch.setattr(fork_client.fcntl, "flock", lambda folder, how: flock(folder, how | fork_client.fcntl.LOCK_NB))
    monkeypatch.setattr(fork_client, "_start_server", start)
    monkeypatch.setattr(fork_client.os, "execv", lambda *_: sys.exit("starts by itself"))
    monkeypatch.setattr(sys, "argv", ["fork_client", f"--raylet-name={tmp_path}/raylet"])
    with pytest.raises(SystemExit, match="starts by itself"):
        fork_client.main()
    assert len(started) == fork_client.TRIES
