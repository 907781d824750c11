"""A job's named secret at work on a real S3 server: in ranks for all of their process, at the door for one look-up."""

import gc
import logging
import os
import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import fsspec
import pytest

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.config import DataConfig, JobSpec, SourceConfig
from boost_core.config.data_files import UnfitData, check_data
from boost_core.config.storage import giving_up_soon
from boost_core.config.training import CorpusConfig
from boost_core.data.tokenize import tokenize
from boost_core.messages import LogLine
from service.gang.assignment import RankEnd
from service.gang.worker.rank_metrics import LogReports
from service.gang.worker.worker import end_of
from service.security.access import Access
from service.security.redaction import redact_logs
from service.security.secrets import SecretReference, load
from tests.distributed.recording import losses, train_and_record
from tests.jobs import tiny_job, write_corpus
from tests.ranks import Ranks
from tests.s3 import BUCKET, CREDENTIALS, S3Server, s3_server

WRONG = "wrong/secret+of+red"
DENIED = "Forbidden|does not match the signature"  # without a message where the request has none


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    """A server that nothing in this process's environment leads to."""
    with s3_server(tmp_path_factory.mktemp("s3")) as server, pytest.MonkeyPatch.context() as patch:
        for name in (*server.environment, "AWS_SESSION_TOKEN", "AWS_PROFILE"):
            patch.delenv(name, raising=False)
        yield server


@pytest.fixture(scope="module")
def secrets(s3: S3Server, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Tenant blue has the right secret, and tenant red one that is wrong, under the same name."""
    folder = tmp_path_factory.mktemp("secrets")
    for tenant, key in (("blue", CREDENTIALS["AWS_SECRET_ACCESS_KEY"]), ("red", WRONG)):
        where = folder / tenant / "prod-s3"
        where.mkdir(parents=True)
        (where / "access_key_id").write_text(CREDENTIALS["AWS_ACCESS_KEY_ID"])
        (where / "secret_access_key").write_text(f"{key}\n")
        (where / "endpoint_url").write_text(s3.environment["AWS_ENDPOINT_URL"])
        (where / "region").write_text("us-east-1")
    return folder


def options(secrets: Path, tenant: str) -> dict:
    return load(SecretReference(str(secrets), tenant, "prod-s3")).storage_options()


@pytest.fixture
def corpus(secrets: Path, tmp_path: Path) -> str:
    local, url = write_corpus(tmp_path / "corpus"), f"s3://{BUCKET}/{tmp_path.name}/corpus"
    fsspec.filesystem("s3", **options(secrets, "blue")).put(f"{local}/", f"{url}/", recursive=True)
    return url


class Lines:
    def __init__(self) -> None:
        self.lines: list[LogLine] = []

    def report(self, line: LogLine) -> None:
        self.lines.append(line)


def as_a_rank(reference: SecretReference, spec: JobSpec) -> tuple[list, RankEnd | None, list[str]]:
    """What a rank's process does with its secret: reports, how it ended if it failed, and log lines."""
    assert not os.environ.keys() & {*CREDENTIALS, "AWS_ENDPOINT_URL", "AWS_DEFAULT_REGION"}
    redact_logs()
    logger, heard = logging.getLogger("boost_core"), Lines()
    handler = LogReports(heard, 0)
    logger.addHandler(handler)
    try:
        Access(reference).configure()
        return train_and_record(spec), None, [line.message for line in heard.lines]
    except Exception as error:
        logger.exception("stops")
        end = end_of(error)
        traceback.clear_frames(error.__traceback__)  # as a rank does, so that the other ones notice
    finally:
        logger.removeHandler(handler)
        gc.collect()
    return [], end, [line.message for line in heard.lines]


@pytest.fixture
def own_ranks(s3: S3Server) -> Iterator[Ranks]:
    """Processes of one job's, since a secret is there for all of a process."""
    pool = Ranks()
    yield pool
    pool.close()


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["text", "tokenized"])
def test_ranks_train_with_their_jobs_secret(
    own_ranks: Ranks, secrets: Path, corpus: str, tmp_path: Path, kind: str
) -> None:
    source = SourceConfig(kind="text", paths=(str(tmp_path / "corpus"),))
    paths = {"text": (str(tmp_path / "corpus"), corpus), "tokenized": (str(tmp_path / "tokens"), f"{corpus}-tokens")}
    if kind == "tokenized":
        corpus_of_text = CorpusConfig(source=source, validation_fraction=0.2, shard_tokens=4000)
        tokenize(corpus_of_text, paths[kind][0], lambda *_: None)
        filesystem = fsspec.filesystem("s3", **options(secrets, "blue"))
        filesystem.put(f"{paths[kind][0]}/", f"{paths[kind][1]}/", recursive=True)
    on_disk, on_s3 = ({"source": {"kind": kind, "paths": [path]}} for path in paths[kind])
    job = tiny_job(tmp_path, f"s3://{BUCKET}/{tmp_path.name}/runs", data=on_s3)
    reference = SecretReference(str(secrets), "blue", "prod-s3")
    (first, end, _), _ = own_ranks.run(2, as_a_rank, reference, job)
    assert end is None, end
    expected, _ = own_ranks.run(2, train_and_record, tiny_job(tmp_path, tmp_path / "runs", data=on_disk))
    assert losses(first) == losses(expected)

    folder = CheckpointFolder(job.checkpoint.url, options(secrets, "blue"))
    assert folder.steps() == [3, 6, 8]
    folder.remove(8)
    (resumed, end, _), _ = own_ranks.run(2, as_a_rank, reference, job)
    assert (end, resumed[0].resumed_from) == (None, f"{job.checkpoint.url}/step-00000006")


@pytest.mark.nightly
@pytest.mark.parametrize("where", ["data", "checkpoint"])
def test_ranks_with_a_wrong_secret_fail_and_do_not_tell_it(
    own_ranks: Ranks, secrets: Path, corpus: str, tmp_path: Path, where: str
) -> None:
    places = {
        "data": (f"{corpus}/{WRONG}", tmp_path / "runs"),  # which errors name
        "checkpoint": (tmp_path / "corpus", f"s3://{BUCKET}/{tmp_path.name}/runs"),
    }
    reference = SecretReference(str(secrets), "red", "prod-s3")
    outcomes = own_ranks.run(2, as_a_rank, reference, tiny_job(*places[where]))
    ends = [end.message for _, end, _ in outcomes if end is not None]
    assert any(re.search(DENIED, message) for message in ends), ends
    said = "\n".join([*ends, *(line for *_, lines in outcomes for line in lines)])
    assert "Traceback (most recent call last)" in said
    assert WRONG not in said and CREDENTIALS["AWS_ACCESS_KEY_ID"] not in said
    assert (f"{corpus}/[redacted]" in said) is (where == "data")


@pytest.mark.full
def test_the_door_looks_up_with_each_tenants_own_secret(secrets: Path, corpus: str) -> None:
    right, wrong = (giving_up_soon(options(secrets, tenant)) for tenant in ("blue", "red"))
    source = {"kind": "text", "paths": [corpus]}
    data = DataConfig.model_validate({"source": source, "tokenizer": f"{corpus}-tokenizer.json"})
    filesystem, path = fsspec.url_to_fs(f"{corpus}-tokenizer.json", **right)
    filesystem.pipe_file(path, b'{"model": {"vocab": {"a": 0}}}')
    for _ in range(2):  # what one may see stays hidden from the other
        check_data(data, 256, 32, right)
        with pytest.raises(UnfitData, match=DENIED):
            check_data(data, 256, 32, wrong)


@pytest.mark.full
def test_what_has_just_been_uploaded_is_found(secrets: Path, corpus: str) -> None:
    right = options(secrets, "blue")
    data = DataConfig.model_validate({"source": {"kind": "text", "paths": [f"{corpus}/later"]}})
    filesystem, folder = fsspec.url_to_fs(f"{corpus}/later", **right)
    filesystem.pipe_file(f"{folder}/0.txt", b"too little")
    with pytest.raises(UnfitData, match="too little"):
        check_data(data, 256, 32, right)
    filesystem.pipe_file(f"{folder}/1.txt", b"enough " * 100)
    filesystem.pipe_file(f"{folder}/0.txt", b"enough " * 100)
    check_data(data, 256, 32, right)
