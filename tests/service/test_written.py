"""What the whole service writes anywhere, searched for the secrets that its jobs use: a real Ray, a real S3 server."""

import os
import signal
import stat
from collections.abc import Iterator
from pathlib import Path

import fsspec
import httpx
import pytest

from service.accounts.keys import KeyStore
from service.client import ApiError, Client
from service.jobs.database import migrate
from service.jobs.states import JobState
from service.models.access import Scope
from tests.jobs import tiny_job, write_corpus
from tests.s3 import BUCKET, CREDENTIALS, S3Server, s3_server
from tests.service.serving import Server, short_folder

pytestmark = pytest.mark.nightly

KEY, SECRET = CREDENTIALS["AWS_ACCESS_KEY_ID"], CREDENTIALS["AWS_SECRET_ACCESS_KEY"]
WRONG = "wrong/secret+of+the+lab"
PAGES = ("/v1/jobs", "/v1/audit", "/v1/nodes", "/v1/queues", "/metrics", "/openapi.json")


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with s3_server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture
def server(s3: S3Server, tmp_path: Path) -> Iterator[Server]:
    """A service with two secrets of the tenant's, one of which is wrong. It writes to its home and to ``TMPDIR``."""
    home = tmp_path / "home"
    for name, secret in (("right", SECRET), ("wrong", WRONG)):
        folder = tmp_path / "secrets" / "lab" / name
        folder.mkdir(parents=True)
        (folder / "access_key_id").write_text(KEY)
        (folder / "secret_access_key").write_text(secret)
        (folder / "endpoint_url").write_text(s3.environment["AWS_ENDPOINT_URL"])
        (folder / "region").write_text("us-east-1")
    home.mkdir()
    migrate(f"sqlite:///{home}/boost.db")
    settings = {"BOOST_SECRETS_DIR": str(tmp_path / "secrets"), "BOOST_ALLOWED_PREFIXES": f"{tmp_path},s3://{BUCKET}"}
    with short_folder() as scratch:  # Ray puts sockets there
        server = Server(home, TMPDIR=scratch, **settings)
        yield server
        server.end(signal.SIGTERM)


def test_secrets_are_in_no_record_log_event_or_error(server: Server, s3: S3Server, tmp_path: Path) -> None:
    home = Path(server.environment["BOOST_HOME"])
    key = KeyStore(f"sqlite:///{home}/boost.db").create("ci", "lab", [Scope.ADMIN], None).key
    options = {"key": KEY, "secret": SECRET, "endpoint_url": s3.environment["AWS_ENDPOINT_URL"]}
    corpus = write_corpus(tmp_path / "text")
    fsspec.filesystem("s3", **options).put(f"{corpus}/", f"s3://{BUCKET}/text/", recursive=True)
    server.until(lambda: (answer := server.answers("/readyz")) and answer.is_success)
    said = []
    with Client(server.url, api_key=key) as client:
        local = tiny_job(corpus, f"s3://{BUCKET}/runs")
        long = {"steps": 100, "evaluate_every_steps": 1000}
        remote = tiny_job(Path("text"), f"s3://{BUCKET}/runs", training=long, checkpoint={"every_steps": 50})
        remote = remote.model_dump(mode="json")
        remote["data"]["source"]["paths"] = [f"s3://{BUCKET}/text"]
        trained = client.submit(remote | {"credentials": "right"}).id
        denied = client.submit(local.model_dump(mode="json") | {"credentials": "wrong"}).id
        refusals = [
            remote | {"credentials": "wrong"},
            remote | {"aws_secret_access_key": SECRET},
            remote | {"credentials": SECRET},
            remote | {"checkpoint": {"url": f"s3://{KEY}:{SECRET}@{BUCKET}/runs"}},
        ]
        for spec in refusals:
            with pytest.raises(ApiError) as refused:
                client.submit(spec)
            said.append(f"{refused.value.detail} {refused.value.errors}")
        server.until(lambda: client.get(trained).progress)
        client.profile(trained, {"steps": 1})
        trace = next(client.events(trained, kinds=["profile"])).data["url"]
        with fsspec.open(trace, "rb", compression="gzip", **options) as stream:
            said.append(stream.read().decode())
        assert trace.startswith(f"s3://{BUCKET}/runs/{trained}/profiles/step-") and "traceEvents" in said[-1]
        server.until(lambda: client.get(trained).finished and client.get(denied).finished)
        assert client.get(trained).state is JobState.SUCCEEDED, client.get(trained).message
        assert client.get(denied).state is JobState.FAILED
        assert client.checkpoints(trained).checkpoints
        with Client(server.url, api_key=key, retry_seconds=0) as hasty, pytest.raises(ApiError) as away:
            hasty.checkpoints(denied)
        said.append(away.value.detail)
        for job_id in (trained, denied):
            said += [event.model_dump_json() for event in client.events(job_id, follow=False)]
            said.append(client.get(job_id).model_dump_json())
    with httpx.Client(base_url=server.url, headers={"Authorization": f"Bearer {key}"}) as http:
        said += [http.get(page).text for page in PAGES]
    assert any("credentials" in text for text in said)
    assert not [text for text in said if any(secret in text for secret in (KEY, SECRET, WRONG, key))]
    files = list(_files(home)) + list(_files(Path(server.environment["TMPDIR"]))) + [server.log]
    assert any(file.name == "boost.db" for file in files) and any("gcs_server" in file.name for file in files)
    assert not [file for file in files for secret in (KEY, SECRET, WRONG, key) if secret.encode() in file.read_bytes()]


def _files(folder: Path) -> Iterator[Path]:
    for place, _, names in os.walk(folder):
        for name in names:
            file = Path(place) / name
            if stat.S_ISREG(file.lstat().st_mode):
                yield file
