"""Event streams alone: a hundred clients follow a job whose step is stored ten times a second, without Ray or a gang.

``python -m tests.benchmarks.streams`` writes docs/figures/streams.md; it needs PostgreSQL (``make postgresql``) and
takes two minutes on two cores.
"""

import argparse
import asyncio
import contextlib
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import psutil
from httpx_sse import aconnect_sse

from service.api.app import create_app
from service.api.middleware.connections import raise_descriptor_limit
from service.api.server import ApiServer, listen
from service.jobs.database import migrate
from service.jobs.outlook import Outlook
from service.jobs.store import JobStore
from service.settings import Settings
from tests.benchmarks.figures import FIGURES, milliseconds, write_table
from tests.postgres import postgres_server
from tests.service.records import a_spec, a_step, numbered, start

STEP_SECONDS = 0.1
WARM_UP_STEPS = 10
HERE, ELSEWHERE = "the server's", "another"


@dataclass
class Arrivals:
    """When which step's event has reached a client, by the machine's monotonic clock.

    Attributes:
        times: Step and time of all clients.
        opened: How many clients have got an answer.
    """

    times: list[tuple[int, float]] = field(default_factory=list)
    opened: int = 0

    async def follow(self, http: httpx.AsyncClient, job_id: str) -> None:
        """Be one of the clients, until cancelled."""
        async with aconnect_sse(http, "GET", f"/v1/jobs/{job_id}/events?kind=progress") as source:
            self.opened += 1
            async for event in source.aiter_sse():
                if event.data:
                    self.times.append((event.json()["data"]["step"], time.monotonic()))


def serve(url: str, home: Path) -> None:
    """Serve the API; write steps from this process when asked to on stdin."""
    raise_descriptor_limit()
    settings = Settings(home=home, database_url=url, auth=False, rate_per_second=1_000_000)
    store, listener = JobStore(url), listen("127.0.0.1", 0)
    threading.Thread(target=obey, args=(store,), daemon=True).start()
    say(listener.getsockname()[1])
    ApiServer(create_app(store, settings, Outlook), settings).run([listener])


def obey(store: JobStore) -> None:
    """Read ``JOB SECONDS`` from stdin, and do it."""
    for line in sys.stdin:
        job_id, seconds = line.split()
        write_steps(store, job_id, float(seconds))


def write_steps(store: JobStore, job_id: str, seconds: float) -> None:
    """Store a step every tenth of a second, and then say when each was committed."""
    committed, begun, step = {}, time.monotonic(), 0
    while (due := step * STEP_SECONDS) < seconds:
        time.sleep(max(0.0, begun + due - time.monotonic()))
        step += 1
        store.append_reports(job_id, 1, numbered(a_step(step, steps=10**6), first=step))
        committed[step] = time.monotonic()
    say(*(f"{number}:{moment}" for number, moment in committed.items()))


def say(*words: object) -> None:
    """Write a line to whoever has started this process."""
    sys.stdout.write(" ".join(map(str, words)) + "\n")
    sys.stdout.flush()


def told(process: subprocess.Popen[str]) -> str:
    """The next line of a process."""
    assert process.stdout is not None
    line = process.stdout.readline()
    assert line, "the process has ended"
    return line


def started(*arguments: str) -> subprocess.Popen[str]:
    """This module in a process of its own."""
    command = [sys.executable, "-m", "tests.benchmarks.streams", *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def measure(url: str, writer: str, clients: int, seconds: float, home: Path) -> list[str]:
    """One row of the table.

    Args:
        url: An empty database.
        writer: In whose process steps are stored.
        clients: How many follow.
        seconds: For how long.
        home: A folder of the server's own.
    """
    migrate(url)
    store = JobStore(url)
    job = store.create(a_spec(), "/checkpoints")
    start(store, job.id)
    store.close()
    server = started("--serve", url, "--home", str(home))
    writing = server if writer == HERE else started("--write", url)
    try:
        port = int(told(server))
        arrivals, committed, busy = asyncio.run(follow(port, job.id, clients, seconds, server, writing))
    finally:
        for process in {server, writing}:
            process.kill()
            process.wait()
    delays = [at - committed[step] for step, at in arrivals.times if step > WARM_UP_STEPS]
    assert len(arrivals.times) == clients * len(committed), (len(arrivals.times), len(committed))
    return [f"{len(delays):,}", *milliseconds(delays, 50, 99), f"{100 * busy:.0f} %"]


async def follow(
    port: int, job_id: str, clients: int, seconds: float, server: subprocess.Popen[str], writing: subprocess.Popen[str]
) -> tuple[Arrivals, dict[int, float], float]:
    """Have clients follow while steps are written.

    Returns:
        What has arrived when, what was committed when, and the server's CPU time a second.
    """
    arrivals, limits = Arrivals(), httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", limits=limits, timeout=None) as http:
        tasks = [asyncio.create_task(arrivals.follow(http, job_id)) for _ in range(clients)]
        while arrivals.opened < clients:
            await asyncio.sleep(0.1)
        await asyncio.sleep(1)
        before, begun = cpu_seconds(server), time.monotonic()
        assert writing.stdin is not None
        print(job_id, seconds, file=writing.stdin, flush=True)
        line = await asyncio.to_thread(told, writing)
        busy = (cpu_seconds(server) - before) / (time.monotonic() - begun)
        await asyncio.sleep(3)  # for what is still on its way
        for task in tasks:
            assert not task.done(), task
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    pairs = [word.split(":") for word in line.split()]
    return arrivals, {int(number): float(moment) for number, moment in pairs}, busy


def cpu_seconds(process: subprocess.Popen[str]) -> float:
    """What a process has used so far."""
    times = psutil.Process(process.pid).cpu_times()
    return times.user + times.system


def main() -> None:
    """Measure and write the figure; or be one of the processes that takes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    parser.add_argument("--write", help=argparse.SUPPRESS)
    parser.add_argument("--home", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        serve(given.serve, given.home)
    elif given.write:
        obey(JobStore(given.write))
    else:
        write_figure(given.clients, given.seconds)


def write_figure(clients: int, seconds: float) -> None:
    rows = []
    with contextlib.ExitStack() as held:
        folder = Path(held.enter_context(tempfile.TemporaryDirectory(prefix="streams-")))
        postgres = held.enter_context(postgres_server())
        sqlite = f"sqlite:///{folder}/boost.db"
        cases = [
            ("SQLite", HERE, sqlite),
            *(("PostgreSQL", who, postgres.create_database()) for who in (HERE, ELSEWHERE)),
        ]
        for number, (database, writer, url) in enumerate(cases):
            row = [database, writer, *measure(url, writer, clients, seconds, folder / f"home-{number}")]
            say(*row)
            rows.append(row)
    title = [
        "database",
        "writing process",
        "events received",
        "delay: median",
        "99th percentile",
        "server's CPU, share of a core",
    ]
    write_table(FIGURES / "streams.md", title, rows)


if __name__ == "__main__":
    main()
