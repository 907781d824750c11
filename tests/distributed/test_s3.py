"""Data from and checkpoints to a real S3 server, through s3fs."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.config import JobSpec
from boost_core.config.reports import Report
from tests.distributed.recording import losses, train_and_record, train_and_record_warnings
from tests.jobs import tiny_job, write_corpus
from tests.ranks import Ranks
from tests.s3 import BUCKET, S3Server, s3_server

AWAY_SECONDS = 20
LONG = {"steps": 60, "evaluate_every_steps": 60}


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment.items():
            patch.setenv(name, value)
        fsspec.filesystem("s3").clear_instance_cache()
        yield server


def with_environment(environment: dict[str, str], spec) -> list:
    os.environ.update(environment)
    return train_and_record(spec)


def test_trains_from_s3_to_s3_and_resumes(s3: S3Server, ranks: Ranks, tmp_path: Path) -> None:
    local = write_corpus(tmp_path / "corpus")
    fsspec.filesystem("s3").put(f"{local}/", f"{BUCKET}/corpus/", recursive=True)
    on_disk = tiny_job(local, tmp_path / "local")
    expected, _ = ranks.run(2, with_environment, s3.environment, on_disk)
    on_s3 = tiny_job(f"s3://{BUCKET}/corpus", f"s3://{BUCKET}/runs/a")
    got, _ = ranks.run(2, with_environment, s3.environment, on_s3)
    assert losses(got) == losses(expected)

    folder = CheckpointFolder(f"s3://{BUCKET}/runs/a")
    assert folder.steps() == [3, 6, 8]
    saved = next(report for report in got if report.kind == "checkpoint")
    assert saved.url == f"s3://{BUCKET}/runs/a/step-00000003"
    assert saved.bytes == folder.manifest(3).bytes > 0

    fsspec.filesystem("s3").rm(f"{BUCKET}/runs/a/step-00000008/manifest.json")
    resumed, _ = ranks.run(2, with_environment, s3.environment, on_s3)
    assert resumed[0].resumed_from == f"s3://{BUCKET}/runs/a/step-00000006"
    assert losses(resumed) == {step: loss for step, loss in losses(expected).items() if step > 6}


def test_a_store_that_is_away_for_a_while_costs_time_and_no_step(s3: S3Server, ranks: Ranks, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    expected, _ = ranks.run(2, train_and_record, tiny_job(corpus, tmp_path / "local", training=LONG))
    job = tiny_job(corpus, f"s3://{BUCKET}/runs/away", training=LONG, checkpoint={"every_steps": 10})

    def be_away_for_a_while() -> None:
        while not CheckpointFolder(job.checkpoint.url).steps():
            time.sleep(0.1)
        s3.stop()
        time.sleep(AWAY_SECONDS)
        s3.start()

    absence = threading.Thread(target=be_away_for_a_while)
    absence.start()
    started = time.monotonic()
    (got, warnings), _ = ranks.run(2, with_environment_and_warnings, s3.environment, job)
    absence.join()
    assert time.monotonic() - started > AWAY_SECONDS
    assert losses(got) == losses(expected)
    assert CheckpointFolder(job.checkpoint.url).steps() == list(range(10, 61, 10))
    assert any("cannot be written" in line and "the next try is in" in line for line in warnings)


def with_environment_and_warnings(environment: dict[str, str], spec: JobSpec) -> tuple[list[Report], list[str]]:
    os.environ.update(environment)
    return train_and_record_warnings(spec)


def test_a_bucket_that_is_not_there_fails_before_training(s3: S3Server, ranks: Ranks, tmp_path: Path) -> None:
    job = tiny_job(write_corpus(tmp_path / "corpus"), "s3://no-such-bucket/runs")
    with pytest.raises(FileNotFoundError, match="bucket does not exist"):
        ranks.run(2, with_environment, s3.environment, job)
