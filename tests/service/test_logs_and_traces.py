"""What a real service and its gangs say of a job's life: the log as JSON, and spans to a collector."""

import json
import signal
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.client import Client
from service.jobs.model import JobRecord
from service.jobs.states import JobState
from tests.jobs import tiny_job, write_corpus
from tests.service.collector import Collector, collector
from tests.service.serving import Server

pytestmark = pytest.mark.nightly

Line = dict[str, Any]

CALLER = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"  # a trace, and a span in it


@dataclass
class Life:
    """A job that a rank was killed of, that went on and was cancelled, and what was heard of it.

    Attributes:
        job: The job.
        service: What the service has logged.
        supervisor: What its gang's supervisor has.
        ranks: What its ranks have.
        spans: What has come to the collector.
    """

    job: JobRecord
    service: list[Line]
    supervisor: list[Line]
    ranks: list[Line]
    spans: Collector


@pytest.fixture(scope="module")
def life(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Life]:
    folder = tmp_path_factory.mktemp("observed")
    spec = tiny_job(write_corpus(folder / "corpus"), folder / "checkpoints", training={"steps": 1_000_000})
    with collector() as spans:
        server = Server(
            folder / "home", BOOST_AUTH="false", BOOST_LOG_FORMAT="json", BOOST_OTLP_ENDPOINT=f"{spans.url}/"
        )
        try:
            server.until(lambda: (ready := server.answers("/readyz")) and ready.is_success)
            headers = {"traceparent": f"00-{'-'.join(CALLER)}-01"}
            answer = httpx.post(f"{server.url}/v1/jobs", json=spec.model_dump(mode="json"), headers=headers)
            job_id = answer.json()["id"]
            with Client(server.url) as client:
                server.until(lambda: (progress := client.get(job_id).progress) and progress.step > 5)
                client.drill(job_id, {"kind": "kill_rank", "rank": 1})
                server.until(lambda: client.get(job_id).restarts)
                supervisor, ranks = (lines_of_actor(server, actor) for actor in ("Supervisor", "RankWorker"))
                client.cancel(job_id)
                server.until(lambda: client.get(job_id).state is JobState.CANCELLED)
                job = client.get(job_id)
            said = lines_of(server.log)  # a signal that ends it has Ray's C++ add a stack as text
        finally:
            server.end(signal.SIGTERM)
        yield Life(job, said, supervisor, ranks, spans)


def lines_of(log: Path) -> list[Line]:
    """All lines, which are objects; Ray marks its files with lines that begin with a colon."""
    return [json.loads(line) for line in log.read_text().splitlines() if not line.startswith(":")]


def lines_of_actor(server: Server, actor: str) -> list[Line]:
    """What the processes of an actor say; Ray has them write to files, which collectors of logs read."""
    return [
        line for process in server.running(actor) for line in lines_of(Path(f"/proc/{process.pid}/fd/2").readlink())
    ]


def test_all_that_the_service_says_is_json(life: Life) -> None:
    lines = life.service
    assert all(datetime.fromisoformat(line["time"]).tzinfo for line in lines)
    assert {"level", "logger", "message", "host"} <= set.intersection(*(set(line) for line in lines))
    assert any(line["logger"] == "uvicorn.error" and "startup complete" in line["message"] for line in lines)
    assert any(
        line["logger"] == "service.gang.ray.private_api" and "A worker died" in line["message"] for line in lines
    )
    (submitted,) = [
        line for line in lines if line["logger"] == "uvicorn.access" and '"POST /v1/jobs ' in line["message"]
    ]
    assert len(submitted["request"]) == 32
    assert submitted["trace_id"] == CALLER[0]


def test_a_jobs_lines_carry_its_id_and_its_trace(life: Life) -> None:
    job = life.job
    told = [line for line in life.service if line.get("job") == job.id]
    states = [(line["message"].split(":")[0], line["attempt"]) for line in told if " is " in line["message"]]
    assert states[:3] == [
        (f"{job.id} is SCHEDULING, HEAD_OF_QUEUE", 0),
        (f"{job.id} is SCHEDULING, GANG_STARTING", 1),
        (f"{job.id} is RUNNING, GANG_STARTED", 1),
    ]
    assert states[-1] == (f"{job.id} is CANCELLED, CANCELLED_BY_USER", 1)
    assert all(line["trace_id"] == CALLER[0] for line in told)


def test_ranks_say_which_they_are(life: Life) -> None:
    up = {line["rank"]: line for line in life.ranks if " is up " in line["message"]}
    assert sorted(up) == [0, 1]
    assert all((line["job"], line["attempt"]) == (life.job.id, 1) for line in up.values())
    assert all(line["job"] == life.job.id for line in life.supervisor)


def test_a_jobs_way_to_its_first_step_is_in_the_trace_of_its_submission(life: Life) -> None:
    (submission,) = life.spans.named("POST /v1/jobs")
    assert (submission.trace, submission.parent) == CALLER
    assert submission.attributes["http.response.status_code"] == 201
    assert submission.resource["service.name"] == "boost"
    children = [span for span in life.spans.spans if (span.trace, span.parent) == (CALLER[0], submission.id)]
    queued, place, start, restart = sorted(children, key=lambda span: span.start)
    assert [span.name for span in (queued, place, start, restart)] == ["queued", "place", "start gang", "restart"]
    assert {span.attributes["boost.job.id"] for span in (queued, place, start)} == {life.job.id}
    assert (queued.end, place.end) == (place.start, start.start)
    assert queued.start == pytest.approx(life.job.submitted_at.timestamp(), abs=1e-5)
    assert start.end == pytest.approx(life.job.started_at.timestamp(), abs=1e-5)


def test_a_restart_is_a_span_with_its_parts(life: Life) -> None:
    (submission,) = life.spans.named("POST /v1/jobs")
    (restart,) = life.spans.named("restart")
    (record,) = life.job.restarts
    assert (restart.trace, restart.parent) == (CALLER[0], submission.id)
    assert restart.attributes["boost.cause"] == record.cause == "WORKER_LOST"
    parts = sorted((span for span in life.spans.spans if span.parent == restart.id), key=lambda span: span.start)
    assert {span.name: span.end - span.start for span in parts} == pytest.approx(record.parts, abs=1e-4)
    assert restart.start == parts[0].start
    assert restart.end == pytest.approx(parts[-1].end, abs=1e-4)


def test_other_requests_have_traces_of_their_own(life: Life) -> None:
    looks = life.spans.named("GET /v1/jobs/{job_id}")
    assert looks
    assert all(span.trace != CALLER[0] and not span.parent for span in looks)
    assert not [span for span in life.spans.spans if "readyz" in span.name]
