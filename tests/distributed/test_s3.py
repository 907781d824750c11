"""Data from and checkpoints to a real S3 server, through s3fs."""

import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import patch

import fsspec
import pytest

from boost_core.checkpoint import saver
from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.config import JobSpec
from boost_core.messages import Report
from tests.distributed.recording import Recorder, losses, read_reports, train_and_record, train_and_record_warnings
from tests.distributed.test_resume import kill, start
from tests.jobs import tiny_job, write_corpus
from tests.ranks import Ranks
from tests.s3 import BUCKET, S3Server, s3_server

AWAY_SECONDS = 30  # s3fs tries again by itself for a good part of it
SHORT_RETRIES = (1.0, 2.0, 4.0)
STEP_SECONDS = 0.2
LONG = {"steps": 60, "evaluate_every_steps": 60}


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server, patch.dict(os.environ, server.environment):
        fsspec.filesystem("s3").clear_instance_cache()
        yield server


def with_environment(environment: dict[str, str], spec) -> list:
    os.environ.update(environment)
    return train_and_record(spec)


@pytest.mark.nightly
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


@pytest.mark.nightly
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
    saved = CheckpointFolder(job.checkpoint.url).steps()
    assert (saved[0], saved[-1]) == (10, 60), "while the store is away, newer copies take the place of older ones"
    assert any("cannot be written" in line and "the next try is in" in line for line in warnings)


@pytest.mark.nightly
def test_a_store_that_is_away_when_a_job_starts_is_waited_for(s3: S3Server, ranks: Ranks, tmp_path: Path) -> None:
    job = tiny_job(write_corpus(tmp_path / "corpus"), f"s3://{BUCKET}/runs/late")
    s3.stop()
    return_of_the_store = threading.Timer(AWAY_SECONDS, s3.start)
    return_of_the_store.start()
    (got, warnings), _ = ranks.run(2, with_environment_and_warnings, s3.environment, job)
    return_of_the_store.join()
    assert sorted(losses(got)) == list(range(1, 9))
    assert any("cannot be listed; retrying in" in line for line in warnings)


@pytest.mark.nightly
def test_a_store_that_denies_us_costs_checkpoints_and_no_step(s3: S3Server, ranks: Ranks, tmp_path: Path) -> None:
    job = tiny_job(
        write_corpus(tmp_path / "corpus"), f"s3://{BUCKET}/runs/denied", training=LONG, checkpoint={"every_steps": 10}
    )
    folder = CheckpointFolder(job.checkpoint.url)

    def deny_for_a_while() -> None:
        while not folder.steps():
            time.sleep(0.1)
        s3.stop()
        s3.start(secret="another")
        time.sleep(sum(SHORT_RETRIES) + 4)
        s3.stop()
        s3.start()

    denial = threading.Thread(target=deny_for_a_while)
    denial.start()
    (got, warnings), _ = ranks.run(2, with_short_retries, s3.environment, job)
    denial.join()
    assert len(losses(got)) == 60
    assert any("does not match the signature" in line for line in warnings), warnings
    assert any("cannot be written" in line and "continues without it" in line for line in warnings)
    saved = folder.steps()
    assert saved[0] == 10 and saved[-1] == 60 and 30 not in saved
    assert [report.step for report in got if report.kind == "checkpoint"] == saved


def with_short_retries(environment: dict[str, str], job: JobSpec) -> tuple[list[Report], list[str]]:
    def slowly(recorder: Recorder, report: Report) -> None:
        recorder.reports.append(report)
        time.sleep(STEP_SECONDS if report.kind == "progress" else 0)

    # Steps take long enough for the store to fail between two checkpoints, however fast the machine is.
    with patch.object(saver, "RETRY_SECONDS", SHORT_RETRIES), patch.object(Recorder, "report", slowly):
        return with_environment_and_warnings(environment, job)


@pytest.mark.nightly
def test_killed_in_mid_upload_the_checkpoint_before_is_there(s3: S3Server, ranks: Ranks, tmp_path: Path) -> None:
    spec = tiny_job(
        write_corpus(tmp_path / "corpus"), f"s3://{BUCKET}/runs/killed", training=LONG | {"steps": 30},
        model={"hidden_size": 256, "intermediate_size": 1024, "rank": 64}, checkpoint={"every_steps": 2},
    )  # fmt: skip
    folder, store = CheckpointFolder(spec.checkpoint.url), fsspec.filesystem("s3", use_listings_cache=False)

    def half_written() -> list[str]:
        """Steps whose shards are in the store, at least in part, and that are not committed."""
        paths = store.find(f"{BUCKET}/runs/killed") if folder.steps() else []
        begun = {path.split("/")[3] for path in paths}
        return sorted(begun - {path.split("/")[3] for path in paths if path.endswith("manifest.json")})

    process = start(spec, tmp_path, "before", environment=s3.environment)
    deadline = time.monotonic() + 90
    while not half_written():
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()[0]
    kill(process)
    left, committed = half_written(), folder.steps()
    assert left, "the save had come to its end"
    assert f"step-{committed[-1]:08}" < left[-1]

    after, _ = ranks.run(2, with_environment, s3.environment, spec)
    assert after[0].step == committed[-1]
    assert folder.steps()[-1] == 30
    before = losses(read_reports(tmp_path / "before.jsonl"))
    assert all(loss == before[step] for step, loss in losses(after).items() if step in before)


def with_environment_and_warnings(environment: dict[str, str], spec: JobSpec) -> tuple[list[Report], list[str]]:
    os.environ.update(environment)
    return train_and_record_warnings(spec)


@pytest.mark.full
def test_a_bucket_that_is_not_there_fails_before_training(s3: S3Server, ranks: Ranks, tmp_path: Path) -> None:
    job = tiny_job(write_corpus(tmp_path / "corpus"), "s3://no-such-bucket/runs")
    with pytest.raises(FileNotFoundError, match="bucket does not exist"):
        ranks.run(2, with_environment, s3.environment, job)
