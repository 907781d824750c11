"""What the dashboard of a real Ray tells of a job of the service, to those who have the token."""

import contextlib
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from service.accounts.keys import KeyStore
from service.client import Client
from service.jobs.database import migrate
from service.jobs.model import JobRecord
from service.jobs.states import JobState
from service.models.access import Scope
from tests.jobs import tiny_job, write_corpus
from tests.service.serving import Server

pytestmark = pytest.mark.nightly

PAGE = "https://boost.example.org"
NAME = "cola of today"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("service")


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    (folder / "home").mkdir()
    migrate(f"sqlite:///{folder}/home/boost.db")
    server = Server(folder / "home", BOOST_PUBLIC_URL=f"{PAGE}/", BOOST_ALLOWED_PREFIXES=str(folder))
    yield server
    server.end(signal.SIGTERM)


@pytest.fixture(scope="module")
def client(server: Server, folder: Path) -> Iterator[Client]:
    key = KeyStore(f"sqlite:///{folder}/home/boost.db").create("alice", "lab", [Scope.SUBMIT], None).key
    server.until(lambda: (answer := server.answers("/readyz")) and answer.is_success)
    with Client(server.url, api_key=key) as opened:
        yield opened


@pytest.fixture(scope="module")
def dashboard(client: Client, server: Server, folder: Path) -> Iterator[httpx.Client]:
    """With Ray's token. Ray takes a port that is free."""
    token = (folder / "home" / "ray-token").read_text()
    (head,) = server.running("dashboard/dashboard.py")
    listening = [each for each in head.net_connections("inet") if each.status == psutil.CONN_LISTEN]
    for each in listening:
        with httpx.Client(base_url=f"http://127.0.0.1:{each.laddr.port}", timeout=30) as asked:
            if asked.get("/api/version").status_code == 401:
                asked.headers["Authorization"] = f"Bearer {token}"
                yield asked
                return
    raise AssertionError(f"the dashboard is at none of {listening}")


@pytest.fixture(scope="module")
def job(server: Server, client: Client, folder: Path) -> JobRecord:
    """One that has made some steps."""
    corpus = write_corpus(folder / "corpus")
    job = client.submit(tiny_job(corpus, folder / "checkpoints", name=NAME, training={"steps": 1_000_000}))
    server.until(lambda: (newest := client.get(job.id).progress) and newest.step > 5)
    return client.get(job.id)


def run_of(dashboard: httpx.Client, job: JobRecord) -> dict[str, Any]:
    answer = dashboard.get("/api/train/v2/runs/v1")
    if answer.status_code == 500 and "not available" in answer.text:  # it has not been made yet
        return {"status": "none"}
    found = [run for run in answer.raise_for_status().json()["train_runs"] if run["id"] == job.id]
    return found[0] if found else {"status": "none"}


def test_actors_and_placement_groups_say_whose_they_are(dashboard: httpx.Client, job: JobRecord) -> None:
    whose = f"{NAME} ({job.id}, alice of lab)"
    actors = dashboard.get("/logical/actors").raise_for_status().json()["data"]["actors"]
    titles = {actor["reprName"]: actor for actor in actors.values() if whose in actor["reprName"]}
    assert sorted(title.rpartition(": ")[2].split()[0] for title in titles) == ["supervisor", "worker", "worker"]
    supervisor = titles[f"{whose}: supervisor"]
    assert supervisor["name"] == f"{job.id}-1"
    assert job.shape is not None and supervisor["actorId"] == job.shape.supervisor, "where the web page leads to"
    groups = dashboard.get("/api/v0/placement_groups").raise_for_status().json()["data"]["result"]["result"]
    (name,) = [group["name"] for group in groups]
    assert name.startswith(f"{NAME} ({job.id}-1-")


def test_the_driver_says_what_it_is(dashboard: httpx.Client, job: JobRecord) -> None:
    drivers = [each for each in dashboard.get("/api/jobs/").raise_for_status().json() if each["type"] == "DRIVER"]
    assert {"name": "BOOST Service", "page": PAGE}.items() <= drivers[0]["metadata"].items(), drivers


def test_ray_trains_own_metrics_are_exported(server: Server, job: JobRecord) -> None:
    server.until(lambda: f'ray_train_run_id="{job.id}"' in exported(server))
    assert "ray_train_controller_state{" in exported(server)


def test_a_job_is_a_run_until_its_end(
    server: Server, client: Client, dashboard: httpx.Client, job: JobRecord, folder: Path
) -> None:
    server.until(lambda: run_of(dashboard, job)["status"] == "RUNNING")
    run = run_of(dashboard, job)
    assert run["name"] == f"{NAME} ({job.id})"
    assert run["run_settings"]["train_loop_config"] == {
        "page": f"{PAGE}/jobs/{job.id}", "tenant": "lab", "submitted_by": "alice",
    }  # fmt: skip
    server.until(lambda: run_of(dashboard, job)["status_detail"] == client.get(job.id).message)
    (attempt,) = run["attempts"]
    assert [(worker["world_rank"], worker["status"], worker["resources"]) for worker in attempt["workers"]] == [
        (rank, "ALIVE", {"resources": {"CPU": 1.0}}) for rank in (0, 1)
    ]
    assert {worker["pid"] for worker in attempt["workers"]} == set(pids(server))
    client.drill(job.id, {"kind": "kill_rank", "rank": 1})
    server.until(lambda: len(run_of(dashboard, job)["attempts"]) == 2)
    server.until(lambda: run_of(dashboard, job)["status"] == "RUNNING")
    ended, begun = sorted(run_of(dashboard, job)["attempts"], key=lambda attempt: attempt["start_time_ns"])
    assert (ended["status"], begun["status"]) == ("ERRORED", "RUNNING")
    assert ended["workers"][1]["pid"] != begun["workers"][1]["pid"], "that of the killed rank"
    assert ended["end_time_ns"] and begun["end_time_ns"] is None
    client.cancel(job.id)
    server.until(lambda: client.get(job.id).state is JobState.CANCELLED)
    server.until(lambda: run_of(dashboard, job)["status"] == "ABORTED")
    short = client.submit(tiny_job(folder / "corpus", folder / "checkpoints", name="short"))
    server.until(lambda: client.get(short.id).finished)
    server.until(lambda: run_of(dashboard, short)["status"] == "FINISHED")
    run = run_of(dashboard, short)
    assert run["status_detail"] == "trained up to step 8"
    assert [attempt["status"] for attempt in run["attempts"]] == ["FINISHED"]
    assert run["end_time_ns"] > run["start_time_ns"]


def exported(server: Server) -> str:
    """What Prometheus would get from the node."""
    text = ""
    for agent in server.running("ray::DashboardAgent"):
        for each in agent.net_connections("inet"):
            if each.status == psutil.CONN_LISTEN:
                with contextlib.suppress(httpx.HTTPError):
                    text += httpx.get(f"http://127.0.0.1:{each.laddr.port}/metrics", timeout=5).text
    return text


def pids(server: Server) -> Iterator[int]:
    for process in {*server.running("alice of lab): worker"), *server.running("RankWorker")}:
        yield process.pid
