"""The log of a real service as JSON, and those of its gangs."""

import json
import signal
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from service.client import Client
from service.jobs.model import JobRecord
from service.jobs.states import JobState
from tests.jobs import tiny_job, write_corpus
from tests.service.serving import Server

Line = dict[str, Any]


def lines_of(log: Path) -> list[Line]:
    """All lines, which are objects; Ray marks its files with lines that begin with a colon."""
    return [json.loads(line) for line in log.read_text().splitlines() if not line.startswith(":")]


def stderr_of(server: Server, actor: str) -> list[Path]:
    """Where the processes of an actor write; Ray has them write to files, which collectors of logs read."""
    found = [process for process in server.tree() if actor in " ".join(process.cmdline())]
    return [Path(f"/proc/{process.pid}/fd/2").readlink() for process in found]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    home = tmp_path_factory.mktemp("service") / "home"
    server = Server(home, BOOST_AUTH="false", BOOST_LOG_FORMAT="json")
    server.until(lambda: (ready := server.answers("/readyz")) and ready.is_success)
    yield server
    server.end(signal.SIGTERM)


@pytest.fixture(scope="module")
def lives(
    server: Server, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[JobRecord, dict[str, list[Line]]]]:
    """A job that was cancelled, and what its gang's processes had written by then."""
    folder = tmp_path_factory.mktemp("job")
    with Client(server.url) as client:
        job = client.submit(
            tiny_job(write_corpus(folder / "corpus"), folder / "checkpoints", training={"steps": 1_000_000})
        )
        server.until(lambda: (progress := client.get(job.id).progress) and progress.step > 5)
        logs = {
            actor: [line for log in stderr_of(server, actor) for line in lines_of(log)]
            for actor in ("Supervisor", "RankActor")
        }
        client.cancel(job.id)
        server.until(lambda: client.get(job.id).state is JobState.CANCELLED)
        yield client.get(job.id), logs


def test_all_that_the_service_says_is_json(server: Server, lives: tuple[JobRecord, dict[str, list[Line]]]) -> None:
    lines = lines_of(server.log)
    assert all(datetime.fromisoformat(line["time"]).tzinfo for line in lines)
    assert {"level", "logger", "message", "host"} <= set.intersection(*(set(line) for line in lines))
    assert any(line["logger"] == "uvicorn.error" and "startup complete" in line["message"] for line in lines)
    submitted = [line for line in lines if line["logger"] == "uvicorn.access" and '"POST /v1/jobs ' in line["message"]]
    assert [len(line["request"]) for line in submitted] == [32]


def test_a_jobs_lines_carry_its_id(server: Server, lives: tuple[JobRecord, dict[str, list[Line]]]) -> None:
    job, _ = lives
    told = [line for line in lines_of(server.log) if line.get("job") == job.id]
    states = [(line["message"].split(":")[0], line["attempt"]) for line in told]
    assert states == [
        (f"{job.id} is SCHEDULING, HEAD_OF_QUEUE", 0),
        (f"{job.id} is SCHEDULING, GANG_STARTING", 1),
        (f"{job.id} is RUNNING, GANG_STARTED", 1),
        (f"{job.id} is CANCELLED, CANCELLED_BY_USER", 1),
    ]
    assert all(line["logger"].startswith("service.scheduler") for line in told)


def test_ranks_say_which_they_are(lives: tuple[JobRecord, dict[str, list[Line]]]) -> None:
    job, logs = lives
    up = {line["rank"]: line for line in logs["RankActor"] if " is up " in line["message"]}
    assert sorted(up) == [0, 1]
    assert all((line["job"], line["attempt"]) == (job.id, 1) for line in up.values())
    assert all(line["job"] == job.id for line in logs["Supervisor"])
