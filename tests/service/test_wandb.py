"""Runs written by Weights & Biases' own package: its files read as they are, and what a server gets of it."""

import base64
import json
import math
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
from wandb.proto.wandb_internal_pb2 import Record

from boost_core.config.job import WandbConfig
from service.jobs.model import JobRecord
from service.jobs.states import Reason
from service.jobs.store import JobStore
from service.jobs.trackers import Tracked, TrackerStore
from service.settings import Settings
from service.trackers import curves, forwarder, wandb
from service.trackers.forwarder import deliver
from service.trackers.opening import open_tracker, tracker_errors
from tests.service.records import a_restart, a_spec, a_step, an_evaluation
from tests.service.test_trackers import write_secret
from tests.service.tracking import forwarding, kill_deliveries, report, tracked_job, wait_for, wait_until_told
from tests.wandb_server import WandbServer, wandb_server

KIND = "wandb"
KEY = "k" * 40
OFFLINE = {"wandb": {"mode": "offline", "project": "low-rank", "tags": ["first"]}}
ONLINE = {"tensorboard": False, "wandb": {"entity": "lab", "credentials": "lab"}}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", auth=False, public_url="https://boost.example.org")


@pytest.fixture(autouse=True)
def without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(forwarder.PAUSE_SECONDS, KIND, 0.0)


@pytest.fixture
def server(settings: Settings) -> Iterator[WandbServer]:
    with wandb_server() as running:
        write_secret(settings, "default", "lab", api_key=KEY, base_url=running.url)
        yield running


def records(path: Path) -> Iterator[Record]:
    """What a file holds: records in pieces, of which none crosses a block of 32 KiB, after 7 bytes of its own."""
    content, at, record = path.read_bytes(), 7, b""
    assert content[:4] == b":W&B"
    while at + 7 <= len(content):
        if (left := 2**15 - at % 2**15) < 7:
            at += left
            continue
        _, size, piece = struct.unpack_from("<IHB", content, at)
        record += content[at + 7 : at + 7 + size]
        at += 7 + size
        if piece in (1, 4):  # whole, or the last
            yield Record.FromString(record)
            record = b""


def of_kind(job: JobRecord, kind: str) -> list[Any]:
    files = sorted((Path(job.checkpoint_url) / "offline-wandb").glob("*.wandb"))
    return [getattr(each, kind) for file in files for each in records(file) if each.WhichOneof("record_type") == kind]


def rows(job: JobRecord) -> list[dict[str, Any]]:
    return [
        {"/".join(item.nested_key) or item.key: json.loads(item.value_json) for item in row.item}
        for row in of_kind(job, "history")
    ]


def points(rows: list[dict[str, Any]], curve: str = "train/loss") -> list[tuple[int, float]]:
    return [(row["step"], float(row[curve])) for row in rows if curve in row]


def losses(steps: range) -> list[tuple[int, float]]:
    return [(step, pytest.approx(a_step(step).loss)) for step in steps]


@pytest.mark.nightly
def test_files_for_wandb_sync_go_on_where_a_service_has_died(
    server: WandbServer, store: JobStore, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (forwarder, wandb):
        monkeypatch.setattr(module, "BATCH", 6)
    job = tracked_job(store, tmp_path, settings, trackers=OFFLINE, group="ablation", tags=["first", "short"])
    report(store, job, *map(a_step, range(1, 8)), a_restart(7), a_step(6, loss=0.1), a_step(7, loss=0.1))
    progress = TrackerStore(store.engine)
    with patch.object(TrackerStore, "write", side_effect=SystemExit), pytest.raises(SystemExit):  # it is not noted
        deliver(store, progress, progress.one(job.id, KIND), open_tracker(settings, KIND, store.get(job.id)))
    assert points(rows(job)), "but written"
    with forwarding(store, settings):
        report(store, job, a_step(8, loss=math.nan), an_evaluation(8, 2.5))
        store.change(job.id, Reason.TRAINING_FINISHED, "all 10 steps are done")
        wait_until_told(store, job, KIND)
    written = rows(job)
    assert points(written)[:-1] == losses(range(1, 8)) and points(written)[-1] == (
        8,
        pytest.approx(math.nan, nan_ok=True),
    )
    assert points(written, "validation/loss") == [(8, 2.5)]
    assert [row["_step"] for row in written] == sorted({row["_step"] for row in written})
    happened = {event.id: event.time.timestamp() for event in store.events(job.id)}
    assert all(row["_timestamp"] == pytest.approx(happened[row["_step"]]) for row in written)
    runs = of_kind(job, "run")
    assert len(runs) > 1 and {(run.run_id, run.display_name, run.resume) for run in runs} == {(job.id, job.name, True)}
    assert runs[0].project == "low-rank" and list(runs[0].tags) == ["first", "short"]
    assert runs[0].run_group == "ablation"
    config = {item.key: json.loads(item.value_json) for item in runs[0].config.update}
    assert config["training"]["steps"] == 10 and config["model"]["preset"] == "tiny"
    assert not server.histories
    folder, environment = f"{job.checkpoint_url}/offline-wandb", {"WANDB_BASE_URL": server.url, "WANDB_API_KEY": KEY}
    command = [sys.executable, "-m", "wandb", "sync", "--yes", folder]
    subprocess.run(command, env=os.environ | environment, cwd=tmp_path, check=True, capture_output=True)
    assert points(server.rows(job.id), "validation/loss") == [(8, 2.5)]
    assert points(server.rows(job.id))[:-1] == losses(range(1, 8))


@pytest.mark.nightly
def test_a_server_gets_each_point_once_and_is_asked_what_it_has(
    server: WandbServer, store: JobStore, settings: Settings, tmp_path: Path
) -> None:
    job = tracked_job(store, tmp_path, settings, trackers=ONLINE)
    with forwarding(store, settings):
        report(store, job, *map(a_step, range(1, 4)))
        told = wait_until_told(store, job, KIND)
        assert told.kept["url"] == f"{server.url}/lab/boost/runs/{job.id}" and not server.ended
        server.takes_rows = False  # of which the package says that all is well
        report(store, job, a_step(4), a_restart(4), a_step(3, loss=0.1), a_step(5))
        failing = wait_for(store, job, KIND, lambda tracked, _: tracked.failures_in_row > 0)
        assert failing.problem.startswith(f"{server.url} has points up to event ")
        server.takes_rows = True
        store.change(job.id, Reason.TRAINING_FAILED, "a rank died")
        wait_until_told(store, job, KIND)
    assert points(server.rows(job.id)) == losses(range(1, 6))
    assert server.ended == {job.id: 1}
    assert server.runs[job.id]["displayName"] == job.name
    assert json.loads(server.runs[job.id]["config"])["training"]["value"]["steps"] == 10
    assert server.authorizations == {f"Basic {base64.b64encode(f'api:{KEY}'.encode()).decode()}"}


@pytest.mark.parametrize("others", [{}, {"no_proxy": "[::1],fd00::/8"}, {"http_proxy": "", "all_proxy": "socks5h://p"}])
def test_no_proxy_is_asked_for_a_server_on_this_machine(
    server: WandbServer, unused_url: str, others: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in ({"http_proxy": unused_url, "no_proxy": ""} | others).items():
        monkeypatch.setenv(name, value)
    tracker = wandb.Wandb(WandbConfig(credentials="lab"), {"api_key": KEY, "base_url": server.url})
    assert tracker._last_event(SimpleNamespace(id="job-1")) == 0


@pytest.mark.nightly
def test_a_server_that_is_away_or_silent_delays_no_other_tracker(
    store: JobStore, settings: Settings, tmp_path: Path, unused_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(curves, "_SECONDS", 1.0)
    with socket.create_server(("127.0.0.1", 0)) as listening:
        silent = f"http://127.0.0.1:{listening.getsockname()[1]}"
        both = ONLINE | {"tensorboard": True}
        for tenant, url in (("away", unused_url), ("silent", silent)):
            write_secret(settings, tenant, "lab", api_key=KEY, base_url=url)
        jobs = [tracked_job(store, tmp_path, settings, tenant=tenant, trackers=both) for tenant in ("away", "silent")]
        with forwarding(store, settings):
            for job, url in zip(jobs, (unused_url, silent), strict=True):
                report(store, job, a_step(1))
                wait_until_told(store, job, "tensorboard")
                failing = wait_for(store, job, KIND, lambda tracked, _: tracked.failures_in_row >= 4)
                assert failing.problem.startswith(f"{url} does not answer")
    for job in jobs:
        (fault,) = [event.data for event in store.events(job.id) if event.kind == "fault"]
        assert fault["what"] == "tracker" and fault["message"].startswith("wandb cannot be updated")


@pytest.mark.full
def test_a_package_that_does_not_end_is_ended(
    server: WandbServer, store: JobStore, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wandb, "PROCESS_SECONDS", 0.2)  # less than the interpreter takes to start
    job = tracked_job(store, tmp_path, settings, trackers=ONLINE)
    with forwarding(store, settings):
        report(store, job, a_step(1))
        failing = wait_for(store, job, KIND, lambda tracked, _: tracked.failures > 0)
    assert failing.problem == "wandb did not finish within 0.2 seconds" and job.id not in server.histories


def test_a_server_is_asked_what_it_has_without_the_place_of_a_process(
    store: JobStore, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free: list[int] = []

    @contextmanager
    def logged(_: object) -> Iterator[tuple[str, str]]:
        with wandb._room:
            yield "its page", ""

    def last_event(*_: object) -> int:
        free.append(wandb._room._value)
        return 1_000_000

    monkeypatch.setattr(wandb, "_logged", logged)
    monkeypatch.setattr(wandb.Wandb, "_last_event", last_event)
    job = tracked_job(store, tmp_path, settings, trackers=ONLINE)
    write_secret(settings, "default", "lab", api_key=KEY)
    report(store, job, a_step(1))
    deliver(store, TrackerStore(store.engine), Tracked(job.id, KIND), open_tracker(settings, KIND, job))
    assert free == [wandb._TOGETHER, wandb._TOGETHER]


def test_where_the_package_is_missing_the_job_is_refused(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = a_spec(trackers=OFFLINE)
    assert not tracker_errors(spec, settings, "default")
    monkeypatch.setattr("service.trackers.opening.find_spec", lambda _: None)
    (error,) = tracker_errors(spec, settings, "default")
    assert error.field == "trackers.wandb" and error.message.startswith("wandb is not installed")


@pytest.mark.nightly
def test_killed_after_each_request(
    server: WandbServer, store: JobStore, database_url: str, settings: Settings, tmp_path: Path
) -> None:
    job = tracked_job(store, tmp_path, settings, trackers=ONLINE)
    steps = kill_deliveries(store, database_url, settings, job, KIND)
    assert points(server.rows(job.id)) == losses(range(1, steps + 1))
