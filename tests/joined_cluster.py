"""A Ray cluster on hosts of its own, and a service on another host that is no node of it."""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from service.accounts.keys import KeyStore
from service.client import Client
from service.jobs.database import migrate
from service.jobs.store import JobStore
from service.models.access import Scope
from tests.hosts import Host
from tests.processes import name_of, started_by

PATIENCE_SECONDS = 240
FRUGAL = ("--object-store-memory=100000000", "--disable-usage-stats")
RAY, BOOST = (str(Path(sys.executable).parent / name) for name in ("ray", "boost"))


class OutsideService:
    """``boost serve`` on a host of its own.

    Args:
        host: Where it runs.
        home: Its folder.
        key: An operator's key of it.
        command: How it is started there.
        environment: Environment variables.
    """

    def __init__(self, host: Host, home: Path, key: str, command: list[str], environment: dict[str, str]) -> None:
        self.url = f"http://{host.address}:8900"
        self.log = home.parent / "serve.log"
        self.client = Client(self.url, api_key=key, retry_seconds=30)
        own = {"BOOST_HOME": str(home), "BOOST_HOST": "0.0.0.0", "BOOST_TLS": "false"}
        with self.log.open("w") as log:
            self.process = subprocess.Popen(host.command(*command), env=environment | own, stdout=log, stderr=log)

    def readiness(self) -> tuple[int, str]:
        try:
            answer = httpx.get(f"{self.url}/readyz")
        except httpx.TransportError as error:
            return 0, str(error)
        return answer.status_code, answer.text

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self.log.read_text()[-5000:]
            time.sleep(0.1)

    def tree(self) -> list[psutil.Process]:
        return started_by(self.process.pid)

    def raylets(self) -> list[psutil.Process]:
        """Of its own node."""
        return [child for child in self.tree() if name_of(child) == "raylet"]

    def steps(self, job: str) -> list[int]:
        """Steps that have been reported."""
        return [event.data["step"] for event in self.client.events(job, follow=False) if event.kind == "progress"]


def first_key(home: Path) -> str:
    """An operator's key, in a new database of SQLite."""
    home.mkdir(parents=True, exist_ok=True)
    migrate(f"sqlite:///{home}/boost.db")
    store = JobStore(f"sqlite:///{home}/boost.db")
    key = KeyStore(store.engine).create("tester", "default", (Scope.ADMIN,)).key
    store.close()
    return key


@contextmanager
def cluster(head: Host, worker: Host, token: Path) -> Iterator[str]:
    """A Ray cluster whose head has no CPUs and whose worker has two; its address."""
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    address = f"{head.address}:6379"
    processes: list[subprocess.Popen[bytes]] = []
    with ExitStack() as undo:
        for host, *role in (
            (head, "--head", "--port=6379", f"--node-ip-address={head.address}", "--num-cpus=0"),
            (worker, f"--address={address}", "--num-cpus=2"),
        ):
            folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="join-", ignore_cleanup_errors=True))
            command = host.command(RAY, "start", "--block", f"--temp-dir={folder}", *FRUGAL, *role)
            process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            undo.callback(process.wait, 90)
            processes.append(process)
        try:
            yield address
        finally:
            for process in reversed(processes):  # a node that has lost its head takes half a minute to end
                process.terminate()
                process.wait(90)
