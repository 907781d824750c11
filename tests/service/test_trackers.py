"""What users and operators see of trackers, and that none of them holds another one up."""

import json
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest
from sqlalchemy import update

from service.client import Client
from service.jobs.leases import Leases
from service.jobs.states import Reason
from service.jobs.store import JobStore
from service.jobs.tables import TrackerRow
from service.jobs.trackers import Tracked, TrackerStore
from service.models.access import Scope
from service.security.secrets import SecretUnusable
from service.settings import Settings
from service.trackers import curves, forwarder
from service.trackers.forwarder import LEASE, THREADS_PER_TENANT, Forwarder, deliver
from service.trackers.opening import open_tracker, tracker_errors
from tests.service.command_line import run_boost
from tests.service.conftest import RunningApi, With
from tests.service.records import GOOD, a_step, start
from tests.service.routes import GOOD_FOR_ALL
from tests.service.scraping import Scrape
from tests.service.tracking import forwarding, report, tracked_job, wait_for, wait_until_told

ON_BOTH = pytest.mark.parametrize("database", ["sqlite", "postgresql"])
TOKEN = "a-token-that-nobody-is-to-see"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", auth=False)


@contextmanager
def answering(status: int, headers: dict[str, str], body: bytes = b"{}") -> Iterator[tuple[str, list[dict[str, str]]]]:
    """A server that gives one answer; its address, and the headers of what it was sent."""
    seen: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            seen.append({name.lower(): value for name, value in self.headers.items()})
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}", seen
        server.shutdown()
        thread.join()


def write_secret(settings: Settings, tenant: str, name: str, **values: str) -> None:
    folder = settings.secrets_dir / tenant / name
    folder.mkdir(parents=True)
    for file, value in values.items():
        (folder / file).write_text(value)


@pytest.mark.full
def test_a_job_shows_how_far_its_trackers_are(
    api: RunningApi, client: Client, store: JobStore, tmp_path: Path, unused_url: str
) -> None:
    spec = GOOD | {"checkpoint": {"url": str(tmp_path)}, "trackers": {"mlflow": {"tracking_uri": unused_url}}}
    job = client.submit(spec)
    mlflow, tensorboard = client.trackers(job.id).trackers
    assert (mlflow.kind, mlflow.place, mlflow.behind, mlflow.problem) == ("mlflow", unused_url, 1, None)
    assert (tensorboard.kind, tensorboard.place) == ("tensorboard", f"{job.checkpoint_url}/tensorboard")
    for kept in ({"url": "https://user:password@mlflow/#/runs/1"}, {}):  # as the release before stored it
        with store.engine.begin() as connection:
            connection.execute(update(TrackerRow).values(kept=kept))
        assert client.trackers(job.id).trackers[0].place == unused_url
    start(store, job.id)
    report(store, job, a_step(1))
    with forwarding(store, api.settings):
        wait_until_told(store, job, "tensorboard")
        wait_for(store, job, "mlflow", lambda tracked, _: tracked.failures > 0)
    mlflow, tensorboard = client.trackers(job.id).trackers
    assert mlflow.behind >= 1 and mlflow.failing_since is not None
    assert mlflow.problem and mlflow.problem.startswith(f"{unused_url} does not answer")
    assert (tensorboard.behind, tensorboard.problem) == (0, None)
    shown = run_boost("show", job.id, "--url", api.url).stdout
    assert f"tensorboard {job.checkpoint_url}/tensorboard\n" in shown
    assert f"mlflow      {unused_url}, {mlflow.behind} events behind, failing: {unused_url} does not answer" in shown
    with httpx.Client(base_url=api.url) as http:
        samples = [each for each in Scrape(http).samples() if each.name.startswith("boost_job_tracker_")]
    values = {(each.name, each.labels["tracker"]): each.value for each in samples if each.labels["job_id"] == job.id}
    assert values["boost_job_tracker_events_behind", "tensorboard"] == 0
    assert values["boost_job_tracker_events_behind", "mlflow"] == mlflow.behind
    assert values["boost_job_tracker_failures_total", "mlflow"] >= mlflow.failures > 0


def test_what_is_behind_is_counted_for_those_asked_for_and_up_to_a_limit(
    store: JobStore, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (tracked_job(store, tmp_path, settings) for _ in range(2))
    report(store, first, *map(a_step, range(1, 9)))
    trackers = TrackerStore(store.engine)
    (all_of_it,) = (count for _, count in trackers.of_job(first.id))
    assert all_of_it > 8
    monkeypatch.setattr("service.jobs.trackers.MOST_COUNTED_OF_EACH", 5)
    assert [count for _, count in trackers.of_job(first.id)] == [all_of_it]
    assert [(tracked.job_id, count) for tracked, count in trackers.of_jobs([first.id])] == [(first.id, 5)]
    counts = {tracked.job_id: count for tracked, count in trackers.of_jobs([first.id, second.id])}
    assert counts == {first.id: 5, second.id: min(5, all_of_it - 8)}


@pytest.mark.full
def test_a_job_may_have_none(client: Client, store: JobStore) -> None:
    job = client.submit(GOOD | {"trackers": {"tensorboard": False}})
    assert client.trackers(job.id).trackers == []


@pytest.mark.full
@ON_BOTH
def test_a_job_that_is_retried_is_told_on(store: JobStore, settings: Settings, tmp_path: Path) -> None:
    job = tracked_job(store, tmp_path, settings)
    with forwarding(store, settings):
        report(store, job, a_step(1))
        store.change(job.id, Reason.TRAINING_FAILED, "a rank died")
        before = wait_until_told(store, job, "tensorboard")
        wait_for(store, job, "tensorboard", lambda *_: not TrackerStore(store.engine).pending())
        store.retry(job.id)
        assert wait_until_told(store, job, "tensorboard").event_id > before.event_id


def test_the_tracker_of_a_job_that_has_ended_is_given_up_in_the_end(
    store: JobStore, settings: Settings, tmp_path: Path, unused_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(forwarder, "GIVEN_UP_AFTER", timedelta(0))
    trackers = {"tensorboard": False, "mlflow": {"tracking_uri": unused_url}}
    job = tracked_job(store, tmp_path, settings, trackers=trackers)
    progress = TrackerStore(store.engine)
    with forwarding(store, settings):
        wait_for(store, job, "mlflow", lambda tracked, _: tracked.failures > 1)
        assert progress.pending(), "it still trains"
        store.change(job.id, Reason.TRAINING_FAILED, "a rank died")
        wait_for(store, job, "mlflow", lambda *_: not progress.pending())
    assert progress.one(job.id, "mlflow").problem


@pytest.mark.full
def test_a_server_that_never_answers_holds_up_nobody_else(store: JobStore, settings: Settings, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        uri = f"http://127.0.0.1:{silent.getsockname()[1]}"
        waits = {"tensorboard": False, "mlflow": {"tracking_uri": uri}}
        stuck = [
            tracked_job(store, tmp_path, settings, tenant="a", trackers=waits) for _ in range(3 * THREADS_PER_TENANT)
        ]
        others = [tracked_job(store, tmp_path, settings, tenant=tenant) for tenant in ("a", "b")]
        with forwarding(store, settings):
            for job in (*stuck, *others):
                report(store, job, a_step(1))
            for job in others:
                wait_until_told(store, job, "tensorboard")
            assert all(store.get(job.id).progress for job in stuck)
        told = [TrackerStore(store.engine).one(job.id, "mlflow") for job in stuck]
        assert all(tracked.event_id == 0 for tracked in told)


@pytest.mark.full
@ON_BOTH
def test_one_service_at_a_time_tells(store: JobStore, settings: Settings, tmp_path: Path) -> None:
    leases = Leases(store.engine, "another service")
    lease = leases.take(LEASE, 60)
    assert lease is not None
    job = tracked_job(store, tmp_path, settings)
    report(store, job, a_step(1))
    stale = TrackerStore(store.engine, lease)
    tracked = stale.one(job.id, "tensorboard")
    with forwarding(store, settings):
        leases.renew(lease, 0.0)
        told = wait_until_told(store, job, "tensorboard")
    assert not stale.write(told, tracked, open_=True), "its lease has gone"
    assert TrackerStore(store.engine).one(job.id, "tensorboard") == told


def test_the_lease_is_given_back_once_no_delivery_is_in_progress(
    store: JobStore, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_end, others = threading.Event(), threading.Event(), Leases(store.engine, "another service")

    class Slow:
        def send(self, *_: object) -> dict[str, Any]:
            begun.set()
            may_end.wait()
            return {}

    job = tracked_job(store, tmp_path, settings)
    stopped = Forwarder(store, Leases(store.engine, "this service"), lambda *_: Slow())
    stopped.start()
    begun.wait()
    monkeypatch.setattr(forwarder, "STOP_SECONDS", 0.1)
    stopped.stop()
    assert others.take(LEASE, 60) is None, "the delivery may still write"
    monkeypatch.setattr(forwarder, "STOP_SECONDS", 60)
    threading.Timer(0.2, may_end.set).start()
    stopped.stop()
    assert others.take(LEASE, 60) is not None
    assert TrackerStore(store.engine).one(job.id, "tensorboard").event_id > 0


@pytest.mark.full
@pytest.mark.parametrize("kind", ["mlflow", "wandb"])
def test_an_answer_that_never_ends_is_given_up(
    store: JobStore, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(curves, "LONGEST_SECONDS", 0.2)
    trackers = {"tensorboard": False, kind: {"credentials": "lab"}}
    with socket.create_server(("127.0.0.1", 0)) as listening:
        url = f"http://127.0.0.1:{listening.getsockname()[1]}"

        def dribble() -> None:
            connection, _ = listening.accept()
            with connection, suppress(OSError):  # it is ended
                connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
                for _ in range(100):
                    connection.sendall(b" ")
                    time.sleep(0.05)

        thread = threading.Thread(target=dribble)
        thread.start()
        write_secret(settings, "default", "lab", tracking_uri=url, base_url=url, api_key=TOKEN)
        job = tracked_job(store, tmp_path, settings, trackers=trackers)
        report(store, job, a_step(1))
        with pytest.raises(ConnectionError, match="its answer takes longer"):
            deliver(store, TrackerStore(store.engine), Tracked(job.id, kind), open_tracker(settings, kind, job))
        thread.join()


def test_a_secrets_address_holds_no_password(store: JobStore, settings: Settings, tmp_path: Path) -> None:
    url = f"https://user:{TOKEN}@tracker.lab"
    write_secret(settings, "default", "lab", tracking_uri=url, base_url=url, api_key="k" * 40)
    trackers = {"mlflow": {"credentials": "lab"}, "wandb": {"credentials": "lab"}}
    job = tracked_job(store, tmp_path, settings, trackers=trackers)
    errors = tracker_errors(job.spec, settings, "default")
    assert [error.field for error in errors] == ["trackers.mlflow.credentials", "trackers.wandb.credentials"]
    assert errors[0].message.startswith(
        "tracking_uri of the secret 'lab' of tenant 'default' is no http(s) address without"
    )
    assert TOKEN not in repr(errors)
    with pytest.raises(SecretUnusable, match="base_url of the secret"):
        open_tracker(settings, "wandb", job)


@pytest.mark.full
def test_a_token_goes_to_its_server_alone(store: JobStore, settings: Settings, tmp_path: Path) -> None:
    trackers = {"tensorboard": False, "mlflow": {"credentials": "lab"}}
    with answering(200, {}) as (elsewhere, never), answering(307, {"Location": elsewhere}) as (uri, seen):
        write_secret(settings, "default", "lab", tracking_uri=uri, token=TOKEN)
        job = tracked_job(store, tmp_path, settings, trackers=trackers)
        with forwarding(store, settings):
            failing = wait_for(store, job, "mlflow", lambda tracked, _: tracked.failures > 0)
    assert seen[0]["authorization"] == f"Bearer {TOKEN}" and not never
    assert failing.problem == f"{uri} answers experiments/get-by-name with 307"


def test_what_a_server_says_is_bounded_and_redacted(store: JobStore, settings: Settings, tmp_path: Path) -> None:
    trackers = {"tensorboard": False, "mlflow": {"credentials": "lab"}}
    body = json.dumps({"error_code": "DENIED", "message": f"not {TOKEN} {'x' * 2000}"}).encode()
    with answering(403, {}, body) as (uri, _):
        write_secret(settings, "default", "lab", tracking_uri=uri, token=TOKEN)
        job = tracked_job(store, tmp_path, settings, trackers=trackers)
        with forwarding(store, settings):
            failing = wait_for(store, job, "mlflow", lambda tracked, _: tracked.failures > 0)
    assert failing.problem and len(failing.problem) <= 500
    assert failing.problem.startswith(f"{uri} answers experiments/get-by-name with 403 DENIED not [redacted] xxx")


def test_with_authentication_only_allowed_servers_may_be_named(guarded: RunningApi, client_with: With) -> None:
    http, spec = client_with(Scope.SUBMIT), GOOD_FOR_ALL

    def answer(**mlflow: str) -> httpx.Response:
        return http.post("/v1/jobs/dry-run", json=spec | {"trackers": {"mlflow": mlflow}})

    (error,) = answer(tracking_uri="http://169.254.169.254/latest").json()["errors"]
    assert error["field"] == "trackers.mlflow.tracking_uri"
    assert error["message"] == "is not a server that jobs may name; the service allows none, or set credentials"
    allowed = guarded.settings.model_copy(update={"tracking_uris": ("https://mlflow.lab",)})
    object.__setattr__(guarded.app.state.context, "settings", allowed)
    assert answer(tracking_uri="https://mlflow.lab/").status_code == 200
    (error,) = answer(tracking_uri="https://mlflow.lab.evil.org").json()["errors"]
    assert error["message"] == "is not a server that jobs may name; use https://mlflow.lab, or set credentials"


def test_settings_name_servers_and_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BOOST_TRACKING_URIS", "https://one.example.org/, http://two:5000")
    monkeypatch.setenv("BOOST_TENSORBOARD", "false")
    settings = Settings()
    assert settings.tracking_uris == ("https://one.example.org", "http://two:5000")
    assert settings.tensorboard is False
