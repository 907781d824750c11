"""CPU time per API request, compared with bare FastAPI routes that return the same bytes.

``python -m tests.benchmarks.requests_cost`` writes docs/figures/requests_cost.md; it takes two minutes on two cores.
There are two bare routes: an ``async def`` one, which runs in the event loop, and a ``def`` one, which FastAPI runs in
a thread. The API reads SQLite in the event loop where that is short, and writes in a thread. All apps run in processes
of their own, under uvicorn with the same settings. The API is called with a key, has its default settings and SQLite,
and schedules nothing, so all CPU time of its process is for the requests. Each batch is sent one request after the
other over one connection that stays open, with a key of its own: a single key may not send as many as all batches
together.
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
from service.models.access import Scope
from service.settings import Settings
from tests.benchmarks.figures import FIGURES, write_table

SPEC = b'{"name": "cost", "model": {"preset": "60m"}, "training": {"steps": 100}}'
WARM_UP = 5
BARE_REQUESTS = 1000  # in a batch: the clock of a process ticks every 10 ms
SERVICE, BARE = "tests.service.small_server", "tests.benchmarks.requests_cost"
IN_THREAD = "--in-thread"


@dataclass(frozen=True)
class Asked:
    """A route that is asked for.

    Attributes:
        method: How.
        path: Where.
        requests: How often in a batch.
        aim: Maximum CPU time: as a multiple of a bare route's, or in milliseconds.
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

    def __init__(self, module: str, folder: Path, *options: str) -> None:
        with (folder / f"{module}.log").open("wb") as log:
            command = [sys.executable, "-m", module, str(folder), *options]
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
def running(module: str, folder: Path, *options: str) -> Iterator[Process]:
    """A server, as long as it is needed."""
    process = Process(module, folder, *options)
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
            with running(BARE, folder) as in_loop, running(BARE, folder, IN_THREAD) as in_thread:
                often = replace(asked, requests=BARE_REQUESTS)
                costs = [
                    (in_loop.batch(often, "")[0], in_thread.batch(often, "")[0], service.batch(asked, key())[0])
                    for _ in range(rounds)
                ]
            rows.append(_row(asked, len(answer), costs))
    return rows


def _row(asked: Asked, size: int, costs: Sequence[tuple[Cost, Cost, Cost]]) -> tuple[str, ...]:
    times = [statistics.median(each[app].cpu for each in costs) for app in range(3)]
    ratios = [statistics.median(api.cpu / each[bare].cpu for each in costs for api in each[2:]) for bare in (0, 1)]
    path = "/v1/jobs/{job_id}" if asked.path.startswith("/v1/jobs/") else asked.path
    return (
        f"`{asked.method} {path}`",
        f"{size / 1000:.1f} kB",
        *(f"{milliseconds:.2f} ms" for milliseconds in times),
        f"{statistics.median(api.wall for _, _, api in costs):.2f} ms",
        *(f"{ratio:.1f}" for ratio in ratios),
        asked.aim,
    )


def serve_bare(folder: Path, in_thread: bool) -> None:
    """Serve the other app: each route returns what the API has returned."""
    app, content = FastAPI(), (folder / "answer").read_bytes()

    def answer() -> Response:
        return Response(content, media_type="application/json")

    async def answer_in_loop() -> Response:
        return answer()

    for path in ("/v1/jobs", "/v1/queues", "/metrics", "/v1/jobs/{job_id}"):
        app.add_api_route(path, answer if in_thread else answer_in_loop, methods=["GET", "POST"])
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
    """Measure and write the figure; with a folder, serve the bare app."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("bare", nargs="?", type=Path, help=argparse.SUPPRESS)
    parser.add_argument(IN_THREAD, action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=5)
    given = parser.parse_args()
    if given.bare:
        serve_bare(given.bare, given.in_thread)
        return
    with tempfile.TemporaryDirectory(prefix="cost-") as folder:
        rows = measure(Path(folder), given.jobs, given.rounds)
    header = [
        f"{given.jobs:,} jobs in the record", "response", "bare async def: CPU", "bare def: CPU", "API: CPU",
        "API: wall", "API / bare async def", "API / bare def", "aim",
    ]  # fmt: skip
    write_table(FIGURES / "requests_cost.md", header, rows)


if __name__ == "__main__":
    main()
