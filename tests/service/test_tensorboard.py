"""Event files beside the checkpoints, read by TensorBoard's own reader."""

import math
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import patch

import fsspec
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.backend.event_processing.event_multiplexer import EventMultiplexer
from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData

from service.jobs.states import Reason
from service.jobs.store import JobStore
from service.settings import Settings
from service.trackers import tensorboard
from service.trackers.tensorboard import TrackerFolder
from tests.s3 import BUCKET, S3Server, s3_server
from tests.service.records import a_checkpoint, a_restart, a_step, an_evaluation
from tests.service.tracking import forwarding, kill_deliveries, report, tracked_job, wait_for, wait_until_told

KIND = "tensorboard"


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(home=tmp_path / "home", auth=False)


def read(folder: str | Path) -> EventAccumulator:
    reader = EventAccumulator(str(folder), size_guidance={"scalars": 0, "tensors": 0})
    reader.Reload()
    return reader


def points(reader: EventAccumulator, tag: str = "train/loss") -> list[tuple[int, float]]:
    return [(point.step, point.value) for point in reader.Scalars(tag)]


def losses(steps: range) -> list[tuple[int, float]]:
    return [(step, pytest.approx(a_step(step).loss)) for step in steps]


def test_two_runs_compare(store: JobStore, settings: Settings, tmp_path: Path) -> None:
    root = tmp_path / "checkpoints"
    jobs = [tracked_job(store, root, settings, name=name) for name in ("first", "second")]
    with forwarding(store, settings):
        for job, loss in zip(jobs, (1.5, 2.5), strict=True):
            report(store, job, a_step(1, loss=loss), a_step(2, loss=math.nan), an_evaluation(2, loss), a_checkpoint(2))
            store.change(job.id, Reason.TRAINING_FINISHED, "all 10 steps are done")
        for job in jobs:
            wait_until_told(store, job, KIND)
    runs = EventMultiplexer().AddRunsFromDirectory(str(root))
    runs.Reload()
    names = {job.name: f"default/{job.id}/tensorboard" for job in jobs}
    assert set(runs.Runs()) == set(names.values())
    for name, loss in (("first", 1.5), ("second", 2.5)):
        run = names[name]
        curve = [(point.step, point.value) for point in runs.Scalars(run, "train/loss")]
        assert curve == [(1, loss), (2, pytest.approx(math.nan, nan_ok=True))]
        assert [(point.step, point.value) for point in runs.Scalars(run, "validation/loss")] == [(2, loss)]
        (share,) = {point.value for point in runs.Scalars(run, "train/exposed_communication_share")}
        assert share == 0.25
        (about,) = runs.Tensors(run, "job")
        assert f"**{name}**" in about.tensor_proto.string_val[0].decode()
        said = [point.tensor_proto.string_val[0].decode() for point in runs.Tensors(run, "state")]
        assert said[0] == "QUEUED: waits for its turn" and said[-1] == "SUCCEEDED: all 10 steps are done"
        content = runs.SummaryMetadata(run, "_hparams_/session_start_info").plugin_data.content
        hparams = HParamsPluginData.FromString(content).session_start_info.hparams
        assert hparams["training.steps"].number_value == 10 and hparams["name"].string_value == name


def test_a_jobs_folder_is_left_to_its_ranks_until_its_first_step(
    store: JobStore, settings: Settings, tmp_path: Path
) -> None:
    job, ended = (tracked_job(store, tmp_path, settings) for _ in range(2))
    folder = Path(job.checkpoint_url)
    store.change(ended.id, Reason.TRAINING_FAILED, "a rank died")
    with forwarding(store, settings):
        wait_for(store, ended, KIND, lambda tracked, behind: behind == 0)
        wait_for(store, job, KIND, lambda tracked, _: tracked.version == store.get(job.id).version)
        assert not folder.exists() and not Path(ended.checkpoint_url).exists()
        report(store, job, a_step(1))
        wait_until_told(store, job, KIND)
    assert points(read(folder / "tensorboard")) == losses(range(1, 2))
    said = [point.tensor_proto.string_val[0].decode() for point in read(folder / "tensorboard").Tensors("state")]
    assert said[0] == "QUEUED: waits for its turn"


def test_a_step_that_is_done_again_is_there_once(store: JobStore, settings: Settings, tmp_path: Path) -> None:
    job = tracked_job(store, tmp_path, settings)
    with forwarding(store, settings):
        report(store, job, *map(a_step, range(1, 6)))
        wait_until_told(store, job, KIND)
        report(store, job, a_restart(5), a_step(4, loss=0.1), a_step(5, loss=0.1), a_step(6))
        wait_until_told(store, job, KIND)
    folder = Path(job.checkpoint_url) / "tensorboard"
    assert points(read(folder)) == losses(range(1, 7))


def test_killed_between_writing_and_noting_it(
    store: JobStore, database_url: str, settings: Settings, tmp_path: Path
) -> None:
    job = tracked_job(store, tmp_path, settings)
    steps = kill_deliveries(store, database_url, settings, job, KIND)
    assert points(read(Path(job.checkpoint_url) / "tensorboard")) == losses(range(1, steps + 1))


@pytest.mark.full
def test_an_open_reader_sees_what_comes_and_nothing_twice(
    store: JobStore, settings: Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "_FILE_BYTES", 8000)
    job = tracked_job(store, tmp_path, settings)
    folder = Path(job.checkpoint_url) / "tensorboard"
    reader = None
    for first in range(1, 30, 6):
        with forwarding(store, settings, holder="this process"):
            report(store, job, *map(a_step, range(first, first + 6)))
            wait_until_told(store, job, KIND)
        reader = reader or read(folder)
        reader.Reload()
        assert points(reader) == losses(range(1, first + 6))
    assert len(list(folder.iterdir())) > 1


def outlasts_a_late_writer(folder: TrackerFolder, read: Callable[[], bytes]) -> None:
    """A service that stalled for longer than its lease writes again what the next one has continued."""
    assert folder.write("file", 0, b"first") and folder.write("file", 5, b", second")
    assert folder.write("file", 0, b"first") and read() == b"first, second"
    assert folder.write("file", 5, b", sec") and read() == b"first, second"
    assert folder.write("file", 5, b", 2nd") and read() == b"first, 2nd"
    assert not folder.write("file", 20, b"far")


def test_what_the_next_service_has_written_stays(tmp_path: Path) -> None:
    file = tmp_path / KIND / "file"
    outlasts_a_late_writer(TrackerFolder(str(tmp_path), KIND, None), file.read_bytes)


@pytest.mark.full
def test_a_full_disk_delays_the_files_alone(store: JobStore, settings: Settings, small_disk: Path) -> None:
    job = tracked_job(store, small_disk, settings)
    with forwarding(store, settings):
        report(store, job, *map(a_step, range(1, 11)))
        wait_until_told(store, job, KIND)
        report(store, job, *map(a_step, range(11, 201)))  # of which some find room
        failing = wait_for(store, job, KIND, lambda tracked, _: tracked.failures_in_row >= 4)
        assert failing.problem == "[Errno 28] No space left on device"
        subprocess.run(["mount", "-o", "remount,size=64m", small_disk], check=True)
        report(store, job, a_step(201))
        wait_until_told(store, job, KIND)
    assert points(read(Path(job.checkpoint_url) / "tensorboard")) == losses(range(1, 202))
    (fault,) = [event.data for event in store.events(job.id) if event.kind == "fault"]
    assert fault["what"] == "tracker"
    assert fault["message"] == (
        "tensorboard cannot be updated at the moment; delivery is retried: [Errno 28] No space left on device"
    )
    assert store.get(job.id).fault_counts == {"tracker": 1}


def test_a_link_leads_nowhere(store: JobStore, settings: Settings, tmp_path: Path) -> None:
    job = tracked_job(store, tmp_path / "checkpoints", settings)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    Path(job.checkpoint_url).mkdir(parents=True)
    (Path(job.checkpoint_url) / "tensorboard").symlink_to(elsewhere)
    with forwarding(store, settings):
        wait_for(store, job, KIND, lambda tracked, _: tracked.failures > 0)
    assert not list(elsewhere.iterdir())


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server, patch.dict(os.environ, server.environment):
        fsspec.filesystem("s3").clear_instance_cache()
        yield server


@pytest.mark.nightly
def test_on_s3_through_an_outage(
    store: JobStore, settings: Settings, s3: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensorboard, "_FILE_BYTES", 8000)
    job = tracked_job(store, f"s3://{BUCKET}/runs", settings)
    with forwarding(store, settings):
        report(store, job, *map(a_step, range(1, 8)))
        wait_until_told(store, job, KIND)
        s3.stop()
        report(store, job, *map(a_step, range(8, 10)))
        wait_for(store, job, KIND, lambda tracked, _: tracked.failures > 0)
        s3.start()
        report(store, job, a_step(10))
        wait_until_told(store, job, KIND)
    folder, disk = f"{job.checkpoint_url}/tensorboard", fsspec.filesystem("s3")
    outlasts_a_late_writer(
        TrackerFolder(f"s3://{BUCKET}/late", KIND, None), lambda: disk.cat(f"{BUCKET}/late/{KIND}/file")
    )
    assert len(disk.ls(folder)) > 1
    assert points(read(folder)) == losses(range(1, 11))
