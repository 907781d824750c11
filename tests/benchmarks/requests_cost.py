"""What requests cost the API's process, beside a bare FastAPI route that answers with the same bytes.

``python -m tests.benchmarks.requests_cost`` writes docs/figures/requests_cost.md; it takes a minute on two cores. Both
apps run in processes of their own, under uvicorn with the same settings. The API is asked with a key, has its
default settings and SQLite, and nothing is scheduled, so that what its process works is for the requests alone. Each
batch is sent one request after the other over one connection that stays open, and with a key of its own: one key may
not send as many as there are in all.
"""

import argparse
import http.client
import logging
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from http import HTTPStatus
from pathlib import Path

import psutil
import uvicorn
from fastapi import FastAPI, Response

from boost_core.config import JobSpec
from service.accounts.keys import KeyStore
from service.api.server import MOST_HEADER_BYTES, listen
from service.jobs.database import migrate
from service.jobs.store import JobStore
from service.models.identity import Scope
from service.settings import Settings
from tests.benchmarks.figures import FIGURES, write_table

SPEC = b'{"name": "cost", "model": {"preset": "60m"}, "training": {"steps": 100}}'
WARM_UP = 5
BARE_REQUESTS = 1000  # in a batch: the clock of a process ticks every 10 ms
SERVICE, BARE = "tests.service.small_server", "tests.benchmarks.requests_cost"


@dataclass(frozen=True)
class Asked:
    """A route that is asked for.

    Attributes:
        method: How.
        path: Where.
        requests: How often in a batch.
        aim: What it may cost at most: so many times the bare route, or milliseconds of CPU.
        body: What is sent along.
    """

    method: str
    path: str
    requests: int
    aim: str
    body: bytes | None = None


@dataclass(frozen=True)
class Cost:
    """Of one request, in milliseconds: what the server's process works, and what the client waits."""

    cpu: float
    wall: float


class Process:
    """A server in a process of its own, which prints the port that it listens on."""

    def __init__(self, module: str, folder: Path) -> None:
        with (folder / f"{module}.log").open("wb") as log:
            command = [sys.executable, "-m", module, str(folder)]
            self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log)
        assert self._process.stdout is not None
        self._port = int(self._process.stdout.readline())
        self._worked = psutil.Process(self._process.pid)

    def batch(self, asked: Asked, key: str) -> tuple[Cost, bytes]:
        """What requests cost, and the last answer."""
        with closing(http.client.HTTPConnection("127.0.0.1", self._port, timeout=30)) as connection:
            for _ in range(WARM_UP):
                content = _answer(connection, asked, key)
            cpu, began = self._cpu_seconds(), time.perf_counter()
            for _ in range(asked.requests):
                _answer(connection, asked, key)
            worked, waited = self._cpu_seconds() - cpu, time.perf_counter() - began
        return Cost(1000 * worked / asked.requests, 1000 * waited / asked.requests), content

    def _cpu_seconds(self) -> float:
        times = self._worked.cpu_times()
        return times.user + times.system

    def end(self) -> None:
        self._process.terminate()
        self._process.wait(30)


def _answer(connection: http.client.HTTPConnection, asked: Asked, key: str) -> bytes:
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request(asked.method, asked.path, asked.body, headers)
    answer = connection.getresponse()
    content = answer.read()
    assert answer.status in (HTTPStatus.OK, HTTPStatus.CREATED), content
    return content


@contextmanager
def running(module: str, folder: Path) -> Iterator[Process]:
    """A server, as long as it is needed."""
    process = Process(module, folder)
    try:
        yield process
    finally:
        process.end()


def fill(folder: Path, jobs: int) -> tuple[KeyStore, str]:
    """A record with queued jobs; gives its keys, and the id of one of the jobs."""
    settings = Settings(home=folder)
    migrate(settings.database_url)
    store, spec = JobStore(settings.database_url), JobSpec.model_validate_json(SPEC)
    ids = [store.create(spec, settings.checkpoint_root).id for _ in range(jobs)]
    return KeyStore(store.engine), ids[jobs // 2]


def measure(folder: Path, jobs: int, rounds: int) -> list[tuple[str, ...]]:
    """The whole measurement as rows of a table."""
    keys, job_id = fill(folder, jobs)
    routes = [
        Asked("GET", f"/v1/jobs/{job_id}", 400, "3"),
        Asked("GET", "/v1/jobs?limit=100", 400, "3"),
        Asked("GET", "/v1/queues", 400, "4"),
        Asked("GET", "/metrics", 20, "40 ms"),
        Asked("POST", "/v1/jobs", 200, "8", SPEC),  # the last: there are more jobs then
    ]

    def key() -> str:
        return keys.create("cost", "default", [Scope.ADMIN]).key

    rows = []
    with running(SERVICE, folder) as service:
        for asked in routes:
            answer = service.batch(replace(asked, requests=1), key())[1]
            (folder / "answer").write_bytes(answer)
            with running(BARE, folder) as bare:
                often = replace(asked, requests=BARE_REQUESTS)
                costs = [(bare.batch(often, "")[0], service.batch(asked, key())[0]) for _ in range(rounds)]
            rows.append(_row(asked, len(answer), costs))
    return rows


def _row(asked: Asked, size: int, costs: Sequence[tuple[Cost, Cost]]) -> tuple[str, ...]:
    ratios = [api.cpu / bare.cpu for bare, api in costs if bare.cpu]
    times = [
        statistics.median(getattr(pair[app], what) for pair in costs) for what in ("cpu", "wall") for app in (0, 1)
    ]
    path = "/v1/jobs/{job_id}" if asked.path.startswith("/v1/jobs/") else asked.path
    return (
        f"`{asked.method} {path}`",
        f"{size / 1000:.1f} kB",
        *(f"{milliseconds:.2f} ms" for milliseconds in times),
        f"{statistics.median(ratios):.1f}" if ratios else "",
        asked.aim,
    )


def serve_bare(folder: Path) -> None:
    """The other app: each route answers with what the API has answered."""
    app, content = FastAPI(), (folder / "answer").read_bytes()

    async def answer() -> Response:
        return Response(content, media_type="application/json")

    for path in ("/v1/jobs", "/v1/queues", "/metrics", "/v1/jobs/{job_id}"):
        app.add_api_route(path, answer, methods=["GET", "POST"])
    logging.basicConfig(level=logging.INFO)  # each request is logged, as the API does
    listener = socket.socket(fileno=listen("127.0.0.1", 0).detach())  # known to be TCP, so that nothing is held back
    sys.stdout.write(f"{listener.getsockname()[1]}\n")
    sys.stdout.flush()
    config = uvicorn.Config(
        app, loop="asyncio", http="h11", ws="none", h11_max_incomplete_event_size=MOST_HEADER_BYTES,
        proxy_headers=False, server_header=False, log_config=None,
    )  # fmt: skip
    uvicorn.Server(config).run([listener])


def main() -> None:
    """Measure and write the figure; with a folder, be the bare app."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bare", nargs="?", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.bare:
        serve_bare(given.bare)
        return
    with tempfile.TemporaryDirectory(prefix="cost-") as folder:
        rows = measure(Path(folder), given.jobs, given.rounds)
    header = [
        f"{given.jobs:,} jobs in the record", "response", "bare: CPU", "API: CPU", "bare: wall", "API: wall",
        "CPU, API relative to bare", "aim",
    ]  # fmt: skip
    write_table(FIGURES / "requests_cost.md", header, rows)


if __name__ == "__main__":
    main()
