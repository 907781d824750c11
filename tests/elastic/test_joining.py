"""A service on a host that is no node of the Ray cluster: it joins it, and offers nothing."""

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
from service.models.identity import Scope
from tests.hosts import Host, hosts
from tests.jobs import tiny_job, write_corpus

PATIENCE_SECONDS = 120
FRUGAL = ("--object-store-memory=100000000", "--disable-usage-stats")
LONG: dict[str, Any] = {"training": {"steps": 400}, "checkpoint": {"url": None, "every_steps": 200}}
RAY, BOOST = (str(Path(sys.executable).parent / name) for name in ("ray", "boost"))


class OutsideService:
    """``boost serve`` on a host of its own."""

    def __init__(self, host: Host, home: Path, **settings: str) -> None:
        self.url = f"http://{host.address}:8900"
        self._log = home.parent / "serve.log"
        migrate(f"sqlite:///{home}/boost.db")
        store = JobStore(f"sqlite:///{home}/boost.db")
        key = KeyStore(store.engine).create("tester", "default", (Scope.ADMIN,)).key
        store.close()
        self.client = Client(self.url, api_key=key, retry_seconds=30)
        own = {"BOOST_HOME": str(home), "BOOST_HOST": host.address, "BOOST_TLS": "false"}
        with self._log.open("w") as log:
            self.process = subprocess.Popen(
                host.command(BOOST, "serve"), env=os.environ | own | settings, stdout=log, stderr=log
            )

    def readiness(self) -> tuple[int, str]:
        try:
            answer = httpx.get(f"{self.url}/readyz")
        except httpx.TransportError as error:
            return 0, str(error)
        return answer.status_code, answer.text

    def until(self, condition: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_SECONDS
        while not condition():
            assert self.process.poll() is None and time.monotonic() < deadline, self._log.read_text()[-5000:]
            time.sleep(0.1)

    def raylets(self) -> list[psutil.Process]:
        """Of its own node."""
        children = psutil.Process(self.process.pid).children(recursive=True)
        return [child for child in children if child.name() == "raylet"]

    def steps(self, job: str) -> list[int]:
        """Steps that have been reported."""
        return [event.data["step"] for event in self.client.events(job, follow=False) if event.kind == "progress"]


@contextmanager
def cluster(head: Host, worker: Host, token: Path) -> Iterator[None]:
    """A Ray cluster whose head has no CPUs and whose worker has two."""
    environment = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(token)}
    with ExitStack() as undo:
        for host, *role in (
            (head, "--head", "--port=6379", f"--node-ip-address={head.address}", "--num-cpus=0"),
            (worker, f"--address={head.address}:6379", "--num-cpus=2"),
        ):
            folder = undo.enter_context(tempfile.TemporaryDirectory(prefix="join-", ignore_cleanup_errors=True))
            command = host.command(RAY, "start", "--block", f"--temp-dir={folder}", *FRUGAL, *role)
            process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            undo.callback(process.wait, 45)
            undo.callback(process.terminate)
        yield


def test_a_service_outside_the_cluster_trains_on_it(tmp_path: Path) -> None:
    token = tmp_path / "home" / "ray-token"
    token.parent.mkdir()
    token.write_text("ab" * 32)
    corpus = write_corpus(tmp_path / "corpus")
    with hosts(3) as (head, worker, outside), cluster(head, worker, token):
        where = {"BOOST_RAY_ADDRESS": f"{head.address}:6379", "BOOST_ALLOWED_PREFIXES": str(corpus)}
        service = OutsideService(outside, tmp_path / "home", **where)
        try:
            service.until(lambda: service.readiness()[0] == 200)
            service.until(lambda: service.client.nodes().nodes)
            assert [node.total["CPU"] for node in service.client.nodes().nodes] == [2], "neither head nor service"
            job = service.client.submit(tiny_job(corpus, "unused", **LONG)).id
            service.until(lambda: service.steps(job))

            (raylet,) = service.raylets()
            raylet.kill()
            service.until(lambda: "has ended" in service.readiness()[1])
            service.until(lambda: service.readiness()[0] == 200)
            service.until(lambda: service.client.get(job).finished)
            assert service.client.get(job).state == "SUCCEEDED"
            assert service.steps(job) == list(range(1, LONG["training"]["steps"] + 1)), "training went on meanwhile"
        finally:
            raylets = service.raylets()
            service.process.kill()
            service.process.wait()
            _, left = psutil.wait_procs(raylets, timeout=45)
        assert len(raylets) == 1 and not left, "its node goes with it"
