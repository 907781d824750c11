"""Short reads happen in the event loop, which waits for no lock and for no long read."""

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from contextlib import closing
from typing import TypeVar

import pytest
from sqlalchemy import make_url, text, update

from service.accounts.tenants_and_queues import QuotaStore
from service.api.limits import ShortReads
from service.jobs.store import JobStore
from service.jobs.tables import JobRow
from tests.service.records import a_spec

ROOT = "file:///checkpoints"
COUNTING = "WITH RECURSIVE n(i) AS (VALUES (1) UNION ALL SELECT i + 1 FROM n WHERE i < :most) SELECT count(*) FROM n"

T = TypeVar("T")


def ran(store: JobStore, read: Callable[[JobStore], T]) -> tuple[T, list[bool]]:
    """What a read returns, and of each time that it was tried whether in the event loop's thread."""
    tries: list[bool] = []

    def noted(given: JobStore) -> T:
        tries.append(threading.current_thread() is threading.main_thread())
        return read(given)

    reads = ShortReads(store)
    try:
        return asyncio.run(reads.run(noted)), tries
    finally:
        reads.close()


def counted(most: int) -> Callable[[JobStore], int]:
    def read(store: JobStore) -> int:
        with store.engine.connect() as connection:
            return int(connection.execute(text(COUNTING), {"most": most}).scalar_one())

    return read


def test_what_is_known_is_read_in_the_loop(store: JobStore) -> None:
    jobs = [store.create(a_spec(), ROOT) for _ in range(20)]
    listed = store.page()[0]
    assert ran(store, lambda given: given.get(jobs[7].id)) == (jobs[7], [True])
    assert ran(store, lambda given: list(given.page()[0])) == (list(listed), [True])
    assert ran(store, lambda given: QuotaStore(given).queues()) == (QuotaStore(store).queues(), [True])


def test_what_was_written_since_is_seen(store: JobStore, database_url: str) -> None:
    job, reads = store.create(a_spec(), ROOT), ShortReads(store)
    assert asyncio.run(reads.run(lambda given: given.get(job.id).state)) == "QUEUED"
    JobStore(database_url).request_cancel(job.id)
    assert asyncio.run(reads.run(lambda given: given.get(job.id).state)) == "CANCELLED"
    reads.close()


def test_many_records_are_made_in_a_thread(store: JobStore, database_url: str) -> None:
    for _ in range(5):
        store.create(a_spec(), ROOT)
    jobs, tries = ran(JobStore(database_url), lambda given: given.page()[0])
    assert (len(jobs), tries) == (5, [True, False])


def test_many_records_are_changed_in_a_thread(store: JobStore) -> None:
    for _ in range(5):
        store.create(a_spec(), ROOT)
    store.page()
    with store.engine.begin() as connection:
        connection.execute(update(JobRow).values(waiting_for="a GPU"))
    jobs, tries = ran(store, lambda given: given.page()[0])
    assert ({job.waiting_for for job in jobs}, tries) == ({"a GPU"}, [True, False])


def test_a_file_that_is_locked_at_the_start_is_opened_later(store: JobStore, database_url: str) -> None:
    job = store.create(a_spec(), ROOT)
    store.close()
    with closing(sqlite3.connect(make_url(database_url).database or "", isolation_level=None)) as other:
        other.execute("PRAGMA locking_mode = EXCLUSIVE")
        other.execute("BEGIN EXCLUSIVE")
        reads = ShortReads(store)
    assert asyncio.run(reads.run(lambda given: (given is not store, given.get(job.id)))) == (True, job)
    reads.close()


def test_long_reads_are_repeated_in_a_thread(store: JobStore) -> None:
    assert ran(store, counted(1_000)) == (1_000, [True])
    assert ran(store, counted(300_000)) == (300_000, [True, False])


def test_work_is_counted_per_read(store: JobStore) -> None:
    reads = ShortReads(store)

    async def often() -> None:
        for _ in range(200):  # far more work than one read may do
            assert await reads.run(lambda given: given is not store and counted(1_000)(given)) == 1_000

    asyncio.run(often())
    reads.close()


def test_the_loop_never_waits_for_a_lock(store: JobStore) -> None:
    def lock(given: JobStore) -> bool:  # readers wait for no locks of SQLite's log but in rare moments
        with given.engine.connect() as connection:
            connection.execute(text("BEGIN IMMEDIATE"))
            connection.rollback()
        return True

    async def read_while_locked() -> bool:
        reads = ShortReads(store)
        with store.engine.connect() as connection:
            connection.execute(text("BEGIN IMMEDIATE"))
            reading = asyncio.create_task(reads.run(lock))
            await asyncio.sleep(0)  # here it would wait, and only the loop can release the lock
            assert not reading.done()
            connection.rollback()
        found = await reading
        reads.close()
        return found

    assert asyncio.run(read_while_locked())


@pytest.mark.parametrize("database", ["postgresql"])
def test_other_databases_are_read_in_threads(store: JobStore) -> None:
    job = store.create(a_spec(), ROOT)
    assert ran(store, lambda given: given.get(job.id)) == (job, [False])
