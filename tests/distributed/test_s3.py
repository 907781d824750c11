"""Data from and checkpoints to a real S3 server, through s3fs."""

import os
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from boost_core.checkpoint.folder import CheckpointFolder
from tests.distributed.recording import losses, train_and_record
from tests.jobs import tiny_job, write_corpus
from tests.ranks import Ranks
from tests.s3 import BUCKET, s3_server


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with s3_server(tmp_path_factory.mktemp("s3")) as environment, pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        fsspec.filesystem("s3").clear_instance_cache()
        yield


def with_environment(environment: dict[str, str], spec) -> list:
    os.environ.update(environment)
    return train_and_record(spec)


def test_trains_from_s3_to_s3_and_resumes(s3: None, ranks: Ranks, tmp_path: Path) -> None:
    local = write_corpus(tmp_path / "corpus")
    fsspec.filesystem("s3").put(f"{local}/", f"{BUCKET}/corpus/", recursive=True)
    environment = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}

    on_disk = tiny_job(local, tmp_path / "local")
    expected, _ = ranks.run(2, with_environment, environment, on_disk)
    on_s3 = tiny_job(f"s3://{BUCKET}/corpus", f"s3://{BUCKET}/runs/a")
    got, _ = ranks.run(2, with_environment, environment, on_s3)
    assert losses(got) == losses(expected)

    folder = CheckpointFolder(f"s3://{BUCKET}/runs/a")
    assert folder.steps() == [3, 6, 8]
    saved = next(report for report in got if report.kind == "checkpoint")
    assert saved.url == f"s3://{BUCKET}/runs/a/step-00000003"
    assert saved.bytes == folder.manifest(3).bytes > 0

    fsspec.filesystem("s3").rm(f"{BUCKET}/runs/a/step-00000008/manifest.json")
    resumed, _ = ranks.run(2, with_environment, environment, on_s3)
    assert resumed[0].resumed_from == f"s3://{BUCKET}/runs/a/step-00000006"
    assert losses(resumed) == {step: loss for step, loss in losses(expected).items() if step > 6}
