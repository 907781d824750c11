"""Stores that do not answer and files that are none, in a job's spec: they hold up the tenant that names them alone."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from service.api.limits import THREADS_PER_TENANT
from service.jobs.model import Owner
from service.jobs.store import JobStore
from service.models.access import Scope
from service.settings import Settings
from tests.service.conftest import RunningApi, With
from tests.service.hostile import hostile_server, until
from tests.service.records import a_spec
from tests.service.routes import GOOD_FOR_ALL

MANY = 45  # more than the threads that all other requests share
STORE_SECONDS = 2.0
PROMPT_SECONDS = 10.0  # this machine may be busy; who has to wait for a store waits for minutes

Begin = Callable[..., tuple[RunningApi, With]]


@pytest.fixture
def secrets(tmp_path: Path) -> Path:
    folder = tmp_path / "secrets" / "hostile" / "own-s3"
    folder.mkdir(parents=True)
    (folder / "access_key_id").write_text("test-key")
    (folder / "secret_access_key").write_text("test-secret")
    (folder / "region").write_text("us-east-1")
    return folder


@pytest.fixture
def begin(store: JobStore, database_url: str, tmp_path: Path) -> Iterator[Begin]:
    with ExitStack() as ends:

        def begin() -> tuple[RunningApi, With]:
            settings = Settings(
                home=tmp_path / "home", secrets_dir=tmp_path / "secrets", database_url=database_url,
                store_seconds=STORE_SECONDS, allowed_prefixes=("/", "s3://bucket"),
            )  # fmt: skip
            server = RunningApi(store, settings)
            ends.callback(server.stop)
            made = With(server)
            ends.callback(made.close)
            return server, made

        yield begin


def on_s3(**data: object) -> dict:
    source = {"kind": "text", "paths": ["s3://bucket/corpus"]}
    return GOOD_FOR_ALL | {"credentials": "own-s3", "data": {"source": source} | data}


def threads_at_stores() -> int:
    return sum(thread.name == "store" for thread in threading.enumerate())


def is_unavailable(answer: httpx.Response, names: str) -> bool:
    assert (answer.status_code, answer.json()["code"]) == (503, "store-unavailable"), answer.text
    assert names in answer.json()["detail"] and "test-secret" not in answer.text
    return int(answer.headers["retry-after"]) >= 1


def prompt(call: Callable[[], httpx.Response]) -> httpx.Response:
    before = time.monotonic()
    answer = call()
    assert time.monotonic() - before < PROMPT_SECONDS
    return answer


@pytest.mark.nightly
@pytest.mark.parametrize("trickles", [False, True], ids=["silent", "trickling"])
def test_a_store_that_does_not_answer_holds_up_its_own_tenant_alone(
    begin: Begin, secrets: Path, store: JobStore, trickles: bool
) -> None:
    server, client_with = begin()
    hostile, other = client_with(Scope.SUBMIT, tenant="hostile"), client_with(Scope.SUBMIT, tenant="other")
    job = store.create(a_spec(credentials="own-s3", checkpoint={"url": "s3://bucket/runs"}), "", Owner("hostile", "x"))
    with hostile_server(trickles=trickles) as url, ThreadPoolExecutor(MANY + 1) as pool:
        (secrets / "endpoint_url").write_text(url)
        asked = [pool.submit(hostile.post, "/v1/jobs/dry-run", json=on_s3(), timeout=60) for _ in range(MANY)]
        asked.append(pool.submit(hostile.get, f"/v1/jobs/{job.id}/checkpoints", timeout=60))
        until(lambda: threads_at_stores() == THREADS_PER_TENANT)
        assert prompt(lambda: other.get("/readyz")).status_code == 200
        assert prompt(lambda: other.post("/v1/jobs/dry-run", json=GOOD_FOR_ALL)).status_code == 200
        assert prompt(lambda: other.post("/v1/jobs", json=GOOD_FOR_ALL)).status_code == 201
        assert prompt(lambda: hostile.get("/v1/jobs")).status_code == 200
        *dry_runs, listing = [each.result() for each in asked]
        assert all(is_unavailable(answer, "'s3://bucket/corpus'") for answer in dry_runs)
        assert is_unavailable(listing, "s3://bucket/runs")

        assert threads_at_stores() == THREADS_PER_TENANT, "they wait on, and nobody is told so twice"
        again = hostile.post("/v1/jobs", json=on_s3(), timeout=60)
        assert is_unavailable(again, "earlier requests wait for stores that do not respond")
        assert threads_at_stores() == THREADS_PER_TENANT
        assert [each["id"] for each in hostile.get("/v1/jobs").json()["jobs"]] == [job.id]
        assert server.stop() < PROMPT_SECONDS, "nobody waits for these threads"
    until(lambda: threads_at_stores() == 0)


@pytest.mark.full
def test_what_the_tenant_waits_for_is_free_again_when_the_store_has_ended(begin: Begin, secrets: Path) -> None:
    _, client_with = begin()
    hostile = client_with(Scope.SUBMIT, tenant="hostile")
    with hostile_server() as url, ThreadPoolExecutor(THREADS_PER_TENANT) as pool:
        (secrets / "endpoint_url").write_text(url)
        list(pool.map(lambda _: hostile.post("/v1/jobs/dry-run", json=on_s3()), range(THREADS_PER_TENANT)))
        assert threads_at_stores() == THREADS_PER_TENANT
    until(lambda: threads_at_stores() == 0)
    assert hostile.post("/v1/jobs/dry-run", json=GOOD_FOR_ALL).status_code == 200


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("pipe", "is not a regular file"),
        ("/dev/zero", "is not a regular file"),
        ("link to a pipe", "is not a regular file"),
        ("folder", "is not a regular file"),
        ("3 GB", "has 3000000000 bytes, and 67108864 is the limit"),
    ],
)
def test_only_regular_files_of_a_fitting_size_are_read(begin: Begin, tmp_path: Path, kind: str, problem: str) -> None:
    path = tmp_path / "tokenizer.json"
    match kind:
        case "pipe":
            os.mkfifo(path)
        case "link to a pipe":
            os.mkfifo(tmp_path / "pipe")
            path.symlink_to(tmp_path / "pipe")
        case "folder":
            path.mkdir()
        case "3 GB":
            with path.open("wb") as stream:
                stream.truncate(3_000_000_000)
        case _:
            path.symlink_to(kind)
    _, client_with = begin()
    data = GOOD_FOR_ALL["data"] | {"tokenizer": str(path)}
    answer = client_with(Scope.SUBMIT).post("/v1/jobs/dry-run", json=GOOD_FOR_ALL | {"data": data})
    assert answer.status_code == 422, answer.text
    (error,) = answer.json()["errors"]
    assert error["field"] == "data.tokenizer"
    assert problem in error["message"]
    until(lambda: threads_at_stores() == 0)
