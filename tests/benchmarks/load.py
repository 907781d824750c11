"""The API under load: a thousand queued jobs, a hundred clients that follow a running one, many that ask for lists.

``python -m tests.benchmarks.load`` writes docs/figures/load.md; it needs ``wrk`` (``apt-get install wrk``) and takes
some three minutes on two cores.
"""

import argparse
import asyncio
import re
import signal
import subprocess
import tempfile
import threading
import time
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path

import psutil

from boost_core.config import JobSpec
from service.client import AsyncClient, Client
from tests.benchmarks.figures import FIGURES, milliseconds, write_table
from tests.jobs import tiny_job, write_corpus
from tests.service.serving import Server

CONNECTIONS = 16
PAGE = "/v1/jobs?limit=100"
SETTINGS = {"BOOST_AUTH": "false", "BOOST_RATE_PER_SECOND": "1000000", "BOOST_STREAMS_PER_KEY": "1000"}
SAMPLE_SECONDS = 0.5


@dataclass
class Delays:
    """How long after each step its event has reached each of the clients that follow.

    Attributes:
        seconds: Of all events and clients.
    """

    seconds: list[float] = field(default_factory=list)

    async def follow(self, url: str, job_id: str, after: int) -> None:
        """Be one of the clients, until cancelled."""
        async with AsyncClient(url) as client:
            async for event in client.events(job_id, after=after):
                if event.kind == "progress":
                    self.seconds.append((datetime.now(UTC) - event.time).total_seconds())


class Memory:
    """Watches the resident memory of a process, in bytes, until it is stopped."""

    def __init__(self, pid: int) -> None:
        self._process, self.most = psutil.Process(pid), 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()

    def _watch(self) -> None:
        while not self._stop.wait(SAMPLE_SECONDS):
            self.most = max(self.most, self._process.memory_info().rss)

    def stop(self) -> None:
        self._stop.set()
        self._thread.join()


def submit_all(client: Client, spec: JobSpec, jobs: int) -> list[float]:
    """Submit jobs one after the other; seconds that each took."""
    seconds = []
    for _ in range(jobs):
        begun = time.perf_counter()
        client.submit(spec)
        seconds.append(time.perf_counter() - begun)
    return seconds


async def follow_for(url: str, job_id: str, after: int, clients: int, seconds: float) -> Delays:
    """Have clients follow a job for a while."""
    delays = Delays()
    tasks = [asyncio.create_task(delays.follow(url, job_id, after)) for _ in range(clients)]
    done, _ = await asyncio.wait(tasks, timeout=seconds)
    for task in done:
        task.result()  # one that has ended has failed: the job goes on
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return delays


def wrk(url: str, seconds: float) -> dict[str, str]:
    """Ask for a page of jobs over and over; latencies as ``wrk`` prints them, requests a second, and errors."""
    command = ["wrk", "-t2", f"-c{CONNECTIONS}", f"-d{seconds:.0f}s", "--latency", url + PAGE]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = dict(re.findall(r"^\s+(50%|99%)\s+(\S+)\s*$", text, re.MULTILINE))
    rate = re.search(r"Requests/sec:\s+(\S+)", text)
    errors = re.search(r"Non-2xx or 3xx responses: (\d+)", text)
    assert rate is not None, text
    return {**found, "a second": rate.group(1), "refused": errors.group(1) if errors else "0"}


def measure(folder: Path, jobs: int, clients: int, seconds: float) -> list[tuple[str, str]]:
    """The whole measurement as rows of a table."""
    server = Server(folder / "home", **SETTINGS)
    endless = {"steps": 10**6, "evaluate_every_steps": 10**5}
    spec = tiny_job(write_corpus(folder / "corpus"), folder / "c", training=endless, checkpoint={"every_steps": 10**5})
    try:
        server.until(lambda: (answer := server.answers("/readyz")) and answer.is_success)
        memory = Memory(server.process.pid)
        with Client(server.url) as client:
            running = client.submit(spec).id
            server.until(lambda: (newest := client.get(running).progress) and newest.step > 10)
            submissions = submit_all(client, spec, jobs)
            alone = _followed(client, server.url, running, clients, seconds)
            listed: dict[str, dict[str, str]] = {}
            asking = threading.Thread(target=lambda: listed.update(page=wrk(server.url, seconds)))
            asking.start()
            loaded = _followed(client, server.url, running, clients, seconds)
            asking.join()
            client.cancel(running)
        memory.stop()
    finally:
        server.end(signal.SIGTERM)
    page = listed["page"]
    return [
        ("submitting a job: median, p99", ", ".join(milliseconds(submissions, 50, 99))),
        (f"{clients} clients follow a job: events received", f"{len(alone.seconds):,}"),
        ("delay of a step's event: median, p99", ", ".join(milliseconds(alone.seconds, 50, 99))),
        (f"with lists of 100 jobs over {CONNECTIONS} connections: requests per second", page["a second"]),
        ("a list's latency: median, p99", f"{page['50%']}, {page['99%']}"),
        ("lists refused", page["refused"]),
        ("delay of a step's event: median, p99, meanwhile", ", ".join(milliseconds(loaded.seconds, 50, 99))),
        ("peak memory of the service's process", f"{memory.most / 2**20:.0f} MiB"),
    ]


def _followed(client: Client, url: str, job_id: str, clients: int, seconds: float) -> Delays:
    newest = max(event.id for event in client.events(job_id, follow=False))
    return asyncio.run(follow_for(url, job_id, newest, clients, seconds))


def main() -> None:
    """Measure and write the figure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", type=int, default=1000)
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--seconds", type=float, default=30.0)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="load-") as folder:
        rows = measure(Path(folder), given.jobs, given.clients, given.seconds)
    title = f"{given.jobs} queued jobs, one training"
    write_table(FIGURES / "load.md", ["", title], rows)


if __name__ == "__main__":
    main()
