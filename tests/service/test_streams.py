"""Event streams over real HTTP, as many as people open, while several processes write and connections break."""

import asyncio
import itertools
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

import httpx
import pytest
from httpx_sse import aconnect_sse
from sqlalchemy import event, insert, update
from sqlalchemy.exc import OperationalError

from service.accounts import keys
from service.accounts.keys import KeyStore
from service.api import event_streams
from service.jobs.model import JobRecord
from service.jobs.patch import JobPatch
from service.jobs.store import JobStore
from service.jobs.tables import EventRow, JobRow
from service.models.access import Scope
from service.settings import Settings
from tests.postgres import PostgresServer
from tests.service.conftest import RunningApi
from tests.service.records import a_log_line, a_spec, a_step, finish, numbered, start

Answer = TypeVar("Answer")

CLIENTS = 100
STEPS = 20
LISTENERS = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'LISTEN%'"

OnPostgres = pytest.mark.parametrize("database", ["postgresql"])


@pytest.fixture
def apis(database_url: str, tmp_path: Path) -> Iterator[list[RunningApi]]:
    """Two servers on one database, each with a store of its own, as processes have."""
    settings = Settings(home=tmp_path / "home", database_url=database_url, auth=False, rate_per_second=10_000)
    running = [RunningApi(JobStore(database_url), settings) for _ in range(2)]
    yield running
    for each in running:
        each.stop()


@pytest.fixture
def deaf(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is found by looking, so that what arrives has been pushed."""
    for name in ("LOOK_SECONDS", "LOOK_SECONDS_WHEN_NOTIFIED"):
        monkeypatch.setattr(event_streams, name, 3600.0)


async def streamed(urls: list[str], job_id: str, clients: int, when_open: Callable[[], object]) -> list[list[int]]:
    """The ids that clients receive until their streams end; something is done when all have the job's first events."""
    opened = asyncio.Semaphore(0)
    seen: list[list[int]] = [[] for _ in range(clients)]

    async def follow(http: httpx.AsyncClient, url: str, ids: list[int]) -> None:
        async with aconnect_sse(http, "GET", f"{url}/v1/jobs/{job_id}/events") as source:
            assert source.response.status_code == 200, await source.response.aread()
            async for sent in source.aiter_sse():
                if sent.data:
                    ids.append(int(sent.id))
                    opened.release()

    async with (
        asyncio.timeout(60),
        httpx.AsyncClient(limits=httpx.Limits(max_connections=None), timeout=60) as http,
        asyncio.TaskGroup() as tasks,
    ):
        for url, ids in zip(itertools.cycle(urls), seen, strict=False):
            tasks.create_task(follow(http, url, ids))
        for _ in range(4 * clients):  # a running job's
            await opened.acquire()
        await asyncio.to_thread(when_open)
    return seen


def running_job(store: JobStore) -> JobRecord:
    return start(store, store.create(a_spec(), "/checkpoints").id)


@pytest.mark.full
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_a_hundred_clients_get_everything_once_and_in_order(deaf: None, api: RunningApi, store: JobStore) -> None:
    job = running_job(store)

    def write() -> None:
        for step in range(1, STEPS + 1):
            store.append_reports(job.id, 1, numbered(a_step(step), a_log_line("x"), first=2 * step - 1))
        finish(store, job.id)

    seen = asyncio.run(streamed([api.url], job.id, CLIENTS, write))
    assert seen == [[each.id for each in store.events(job.id)]] * CLIENTS


@pytest.mark.nightly
@OnPostgres
def test_clients_of_one_process_are_told_what_others_write(deaf: None, apis: list[RunningApi], store: JobStore) -> None:
    job = running_job(store)
    stores = [store, *(api.app.state.context.store for api in apis)]

    def write() -> None:
        until(lambda: all(api.app.state.context.feeds._is_notified for api in apis))
        writers = [threading.Thread(target=patch, args=(each, number)) for number, each in enumerate(stores)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join()
        finish(store, job.id)

    def patch(writer: JobStore, number: int) -> None:
        for step in range(1, STEPS + 1):
            writer.patch(job.id, JobPatch(priority=10 * step + number))

    assert listeners(store) == []
    seen = asyncio.run(streamed([api.url for api in apis], job.id, CLIENTS, write))
    expected = [each.id for each in store.events(job.id)]
    assert len(expected) == 4 + 3 * STEPS + 1
    assert seen == [expected] * CLIENTS
    until(lambda: listeners(store) == [])  # nobody follows any more


@pytest.mark.full
@OnPostgres
def test_nothing_is_lost_when_postgresql_lets_go(
    apis: list[RunningApi], store: JobStore, postgres: PostgresServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_streams, "RETRY_SECONDS", 0.2)
    job = running_job(store)

    def write() -> None:
        for step in range(1, STEPS + 1):
            store.append_reports(job.id, 1, numbered(a_step(step), first=step))
            if step % 5 == 0:
                end_listeners(store)
        postgres.restart()
        store.append_reports(job.id, 1, numbered(a_step(STEPS + 1), first=STEPS + 1))
        until(lambda: len(listeners(store)) == len(apis))
        finish(store, job.id)

    seen = asyncio.run(streamed([api.url for api in apis], job.id, 10, write))
    assert seen == [[each.id for each in store.events(job.id)]] * 10


@pytest.mark.nightly
@OnPostgres
def test_what_a_release_writes_that_tells_nobody_is_found(apis: list[RunningApi], store: JobStore) -> None:
    job = running_job(store)

    def write() -> None:
        with store.engine.begin() as connection:
            connection.execute(update(JobRow).values(version=JobRow.version + 1))
            values = {"job_id": job.id, "attempt": 1, "kind": "drill", "time": job.submitted_at, "data": {}}
            connection.execute(insert(EventRow).values(**values))
        time.sleep(2 * event_streams.LOOK_SECONDS)
        finish(store, job.id)

    seen = asyncio.run(streamed([apis[0].url], job.id, 1, write))
    assert seen == [[each.id for each in store.events(job.id)]]


@OnPostgres
def test_ids_of_a_jobs_events_grow_in_the_order_of_commits(database_url: str) -> None:
    first, second, watching = (JobStore(database_url) for _ in range(3))
    job = running_job(first)
    wrote, go_on = threading.Event(), threading.Event()

    def before_commit(_: object) -> None:
        wrote.set()
        assert go_on.wait(20)

    event.listen(first.engine, "commit", before_commit)
    slow = threading.Thread(target=first.append_reports, args=(job.id, 1, numbered(a_step(1))))
    fast = threading.Thread(target=second.patch, args=(job.id, JobPatch(priority=7)))
    slow.start()
    assert wrote.wait(20)  # it has an id, and is not to be seen
    fast.start()
    fast.join(0.5)
    assert fast.is_alive() and len(watching.events(job.id)) == 4
    go_on.set()
    fast.join(20)
    slow.join(20)
    assert [each.kind for each in watching.events(job.id)[4:]] == ["progress", "patch"]


@pytest.mark.full
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_streams_go_on_when_the_database_comes_back(
    api: RunningApi, store: JobStore, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_streams, "WATCH_SECONDS", 0.05)
    monkeypatch.setattr(event_streams, "LOOK_SECONDS", 0.1)
    job, elsewhere = running_job(store), JobStore(database_url)
    is_away, refused = False, 0

    def refuse(*_: object) -> None:
        nonlocal refused
        if is_away:
            refused += 1
            raise OperationalError(None, None, ConnectionError("gone"))

    def write() -> None:
        nonlocal is_away
        is_away = True
        elsewhere.append_reports(job.id, 1, numbered(a_step(1)))
        until(lambda: refused > 5)
        is_away = False
        finish(elsewhere, job.id)

    event.listen(store.engine, "before_cursor_execute", refuse)
    seen = asyncio.run(streamed([api.url], job.id, 3, write))
    assert seen == [[each.id for each in store.events(job.id)]] * 3


@pytest.mark.full
def test_a_client_that_leaves_in_the_middle_of_an_answer_is_forgotten(api: RunningApi, store: JobStore) -> None:
    job, feeds = running_job(store), api.app.state.context.feeds
    store.append_reports(job.id, 1, numbered(*(a_log_line("x" * 50_000) for _ in range(200))))
    with socket.create_connection(("127.0.0.1", api.port)) as client:  # its buffers hold a part of that
        client.sendall(f"GET /v1/jobs/{job.id}/events HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
        assert client.recv(100).startswith(b"HTTP/1.1 200")
        until(lambda: feeds._feeds)
    until(lambda: not feeds._feeds)


@pytest.mark.full
@pytest.mark.parametrize("database", ["sqlite", "postgresql"])
def test_an_event_that_cannot_be_read_ends_its_jobs_streams_alone(api: RunningApi, store: JobStore) -> None:
    job, other = running_job(store), running_job(store)
    with httpx.Client(base_url=api.url) as http:
        streams = [http.stream("GET", f"/v1/jobs/{each.id}/events?after=0") for each in (job, other)]
        with streams[0] as broken, streams[1] as good:
            ends, goes_on = broken.iter_lines(), good.iter_lines()
            next(ends), next(goes_on)
            with store.engine.begin() as connection:  # as a later release may
                values = {"job_id": job.id, "attempt": 1, "kind": "unheard-of", "time": job.submitted_at, "data": []}
                connection.execute(insert(EventRow).values(**values))
            store.append_reports(job.id, 1, numbered(a_step(1)))
            list(ends)
            finish(store, other.id)
            assert any("SUCCEEDED" in line for line in goes_on)


@pytest.mark.full
def test_a_key_that_another_process_revokes_ends_its_streams(
    guarded: RunningApi, store: JobStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "REMEMBERED_SECONDS", 0.5)
    job = running_job(store)
    elsewhere = KeyStore(store.engine)
    made = [elsewhere.create(name, "default", (Scope.READ,)) for name in ("revoked", "good")]
    with httpx.Client(base_url=guarded.url) as http:
        streams = [http.stream("GET", f"/v1/jobs/{job.id}/events", headers=bearer(each.key)) for each in made]
        with streams[0] as revoked, streams[1] as good:
            ends, goes_on = revoked.iter_lines(), good.iter_lines()
            next(ends), next(goes_on)
            elsewhere.revoke(made[0].id)
            list(ends)
            assert not store.get(job.id).finished
            finish(store, job.id)
            assert any("SUCCEEDED" in line for line in goes_on)


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"}


def listeners(store: JobStore) -> list[int]:
    with store.engine.connect() as connection:
        return list(connection.exec_driver_sql(LISTENERS.replace("%", "%%")).scalars())


def end_listeners(store: JobStore) -> None:
    found = until(lambda: listeners(store))
    with store.engine.connect() as connection:
        for pid in found:
            connection.exec_driver_sql(f"SELECT pg_terminate_backend({pid})")


def until(condition: Callable[[], Answer]) -> Answer:
    deadline = time.monotonic() + 60
    while not (answer := condition()):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return answer
