"""Runs on a real MLflow server, read by MLflow's own client."""

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.jobs.states import JobState, Reason
from service.jobs.store import JobStore
from service.settings import Settings
from service.trackers.curves import Batch, Entry
from service.trackers.mlflow import Mlflow
from tests.mlflow_server import MlflowServer, mlflow_server
from tests.service.conftest import free_port
from tests.service.records import a_restart, a_step, an_evaluation
from tests.service.tracking import forwarding, kill_deliveries, report, tracked_job, wait_for, wait_until_told

KIND = "mlflow"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    with mlflow_server(tmp_path_factory.mktemp("mlflow"), free_port()) as running:
        yield running


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", auth=False, public_url="https://boost.example.org")


def to(server: MlflowServer, **changes: str) -> dict[str, object]:
    return {"tensorboard": False, "mlflow": {"tracking_uri": server.url} | changes}


def points(server: MlflowServer, run_id: str, key: str = "train/loss") -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in server.client().get_metric_history(run_id, key)]


def losses(steps: range) -> list[tuple[int, float]]:
    return [(step, pytest.approx(a_step(step).loss)) for step in steps]


@pytest.mark.nightly
def test_two_runs_compare(server: MlflowServer, store: JobStore, settings: Settings, tmp_path: Path) -> None:
    labels = {"group": "ablation", "tags": ["short", "tiny"]}
    jobs = [
        tracked_job(store, tmp_path, settings, name=name, trackers=to(server), **labels) for name in ("first", "second")
    ]
    with forwarding(store, settings):
        for job, loss in zip(jobs, (1.5, 2.5), strict=True):
            report(store, job, a_step(1, loss=loss), a_step(2, loss=math.nan), an_evaluation(2, loss))
        store.change(jobs[0].id, Reason.TRAINING_FINISHED, "all 10 steps are done")
        store.change(jobs[1].id, Reason.TRAINING_FAILED, "a rank died")
        told = [wait_until_told(store, job, KIND) for job in jobs]
    client = server.client()
    experiment = client.get_experiment_by_name("boost")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert {name: run.info.status for name, run in runs.items()} == {"first": "FINISHED", "second": "FAILED"}
    for job, tracked, loss in zip(jobs, told, (1.5, 2.5), strict=True):
        run = runs[job.name]
        assert tracked.kept["url"].endswith(f"/runs/{run.info.run_id}")
        curve = points(server, run.info.run_id)
        assert curve[0] == (1, loss) and curve[1][0] == 2 and math.isnan(curve[1][1])
        assert points(server, run.info.run_id, "validation/loss") == [(2, loss)]
        assert run.data.params["training.steps"] == "10" and run.data.params["model.preset"] == "tiny"
        assert run.data.tags["mlflow.source.name"] == f"https://boost.example.org/jobs/{job.id}"
        assert run.data.tags["boost.group"] == "ablation" and run.data.tags["boost.tags"] == "short, tiny"
        assert run.info.end_time is not None


@pytest.mark.nightly
def test_a_server_that_is_killed_in_between_has_each_point_once(
    server: MlflowServer, store: JobStore, settings: Settings, tmp_path: Path
) -> None:
    job = tracked_job(store, tmp_path, settings, trackers=to(server, experiment="killed"))
    with forwarding(store, settings):
        report(store, job, *map(a_step, range(1, 4)))
        run_id = wait_until_told(store, job, KIND).kept["run"]
        server.kill()
        report(store, job, a_step(4), a_restart(4), a_step(3, loss=0.1), a_step(4, loss=0.1), a_step(5))
        wait_for(store, job, KIND, lambda tracked, _: tracked.failures_in_row >= 3)
        server.start()
        report(store, job, *map(a_step, range(6, 9)))
        tracked = wait_until_told(store, job, KIND)
    assert tracked.kept["run"] == run_id
    assert points(server, run_id) == losses(range(1, 9))
    faults = [event.data for event in store.events(job.id) if event.kind == "fault"]
    assert [fault["what"] for fault in faults] == ["tracker"]
    assert f"{server.url} does not answer" in faults[0]["message"]


@pytest.mark.full
def test_as_many_points_as_a_request_holds(
    server: MlflowServer, store: JobStore, settings: Settings, tmp_path: Path
) -> None:
    labels = {"group": "ablation", "tags": ["short"]}
    job = tracked_job(store, tmp_path, settings, trackers=to(server, experiment="many"), **labels)
    names = [f"train/{name}" for name in range(9)]
    steps = range(1, 113)  # the first 111 have 999 points
    entries = [Entry(step, job.submitted_at, step, dict.fromkeys(names, float(step))) for step in steps]
    last = Entry(113, job.submitted_at, 112, {}, "failed: " + "x" * 10_000, JobState.FAILED)
    run_id = Mlflow(server.url, "many", {}, None).send(Batch(job, [*entries, last]), {})["run"]
    for name in names:
        assert points(server, run_id, name) == [(step, float(step)) for step in steps]
    run = server.client().get_run(run_id)
    assert run.info.status == "FAILED" and run.data.tags["boost.state"].startswith("failed: x")


@pytest.mark.nightly
def test_killed_after_each_request(
    server: MlflowServer, store: JobStore, database_url: str, settings: Settings, tmp_path: Path
) -> None:
    job = tracked_job(store, tmp_path, settings, trackers=to(server, experiment="crashes"))
    steps = kill_deliveries(store, database_url, settings, job, KIND)
    client = server.client()
    (run,) = client.search_runs([client.get_experiment_by_name("crashes").experiment_id])
    assert points(server, run.info.run_id) == losses(range(1, steps + 1))
    assert run.data.params["optimizer.kind"] == "adamw"
