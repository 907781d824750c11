"""What followers of a job are given, straight from the feeds: everything once, in order, for one read a change."""

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from sqlalchemy import event

from boost_core.messages import LogLine, Report
from service.accounts.keys import ANONYMOUS, KeyStore
from service.api import event_streams
from service.api.event_streams import Feeds, Follower
from service.jobs.database import migrate
from service.jobs.queries import EventFilter
from service.jobs.store import JobStore
from tests.service.records import a_log_line, a_spec, a_step, finish, numbered, start

ALL = EventFilter()


@pytest.fixture
def store(tmp_path: Path) -> JobStore:
    url = f"sqlite:///{tmp_path}/boost.db"
    migrate(url)
    return JobStore(url)


@pytest.fixture
def job_id(store: JobStore) -> str:
    """A running job, which has four events."""
    return start(store, store.create(a_spec(), "/checkpoints").id).id


def feeds_of(store: JobStore) -> Feeds:
    return Feeds(store, KeyStore(store.engine), threading.Event())


def kept_bytes(feeds: Feeds) -> int:
    return sum(feed.size for feed in feeds._feeds.values())


class Writer:
    """Appends reports to a job, one write after another."""

    def __init__(self, store: JobStore, job_id: str) -> None:
        self._store, self._job_id, self._next = store, job_id, 1

    async def __call__(self, *reports: Report) -> None:
        numbers = numbered(*reports, first=self._next)
        self._next += len(reports)
        await asyncio.to_thread(self._store.append_reports, self._job_id, 1, numbers)


async def ids_of(follower: Follower, pause: Callable[[], Awaitable[None]] | None = None) -> list[int]:
    """Follow to the end."""
    seen: list[int] = []
    while batch := await follower.next():
        seen += [each.event.id for each in batch]
        assert [each.encoded.id for each in batch] == [str(each.event.id) for each in batch]
        if pause:
            await pause()
    return seen


@asynccontextmanager
async def following(feeds: Feeds, job_id: str, *wanted: tuple[EventFilter, int]) -> AsyncIterator[list[list[int]]]:
    """Followers of a job, each with its filter and where it begins; at the end, what they have seen."""
    results: list[list[int]] = []

    async def follow(which: EventFilter, after: int) -> list[int]:
        with feeds.follow(job_id, ANONYMOUS, which, after) as follower:
            return await ids_of(follower)

    async with asyncio.timeout(20):
        tasks = [asyncio.create_task(follow(*each)) for each in wanted]
        await asyncio.sleep(0.1)
        yield results
        results += await asyncio.gather(*tasks)


def test_a_hundred_followers_cost_one_read_a_change(store: JobStore, job_id: str) -> None:
    reads: list[str] = []
    event.listen(store.engine, "before_cursor_execute", lambda *given: reads.append(given[2]))

    async def follow() -> list[list[int]]:
        write, feeds = Writer(store, job_id), feeds_of(store)
        async with following(feeds, job_id, *[(ALL, 4)] * 100) as results:
            reads.clear()
            for step in range(1, 11):
                await write(a_step(step))
                await asyncio.sleep(0.02)
            store.request_cancel(job_id)
            finish(store, job_id)
        return results

    assert asyncio.run(follow()) == [[each.id for each in store.events(job_id, 4)]] * 100
    assert len([read for read in reads if "FROM events" in read and "events.data" in read]) <= 12


@pytest.mark.full
@pytest.mark.parametrize("kept", [0, 2000, pytest.param(2**20, marks=pytest.mark.nightly)])
def test_whoever_joins_when_and_wants_what_misses_nothing(
    store: JobStore, job_id: str, kept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_streams, "KEPT_BYTES", kept)
    monkeypatch.setattr(event_streams, "BATCH", 7)
    chance = random.Random(kept)
    begun = store.events(job_id)[-1].time
    filters = [
        ALL,
        EventFilter(kinds=frozenset({"progress"})),
        EventFilter(kinds=frozenset({"log"}), rank=1),
        EventFilter(kinds=frozenset({"log"}), levels=frozenset({"ERROR", "WARNING"})),
        EventFilter(since=begun + timedelta(milliseconds=50)),
        EventFilter(kinds=frozenset({"evaluation"})),
    ]

    async def idle() -> None:
        await asyncio.sleep(chance.choice([0, 0, 0.001, 0.03]))

    async def follow_later(feeds: Feeds, which: EventFilter, after: int) -> list[int]:
        await asyncio.sleep(chance.uniform(0, 0.3))
        with feeds.follow(job_id, ANONYMOUS, which, after) as follower:
            return await ids_of(follower, idle)

    async def follow() -> None:
        write, feeds = Writer(store, job_id), feeds_of(store)
        wanted = [(which, after) for which in filters for after in (0, 3, 17, 10**6)]
        async with asyncio.timeout(30):
            tasks = [asyncio.create_task(follow_later(feeds, *each)) for each in wanted]
            for _ in range(30):
                await write(*(a_report(chance) for _ in range(chance.choice([1, 1, 2, 20]))))
                await asyncio.sleep(chance.choice([0, 0.02]))
            finish(store, job_id)
            for (which, after), task in zip(wanted, tasks, strict=True):
                assert await task == [each.id for each in store.events(job_id, after, wanted=which)], (which, after)
        assert not feeds._feeds

    asyncio.run(follow())


def a_report(chance: random.Random) -> Report:
    line = LogLine(
        rank=chance.randrange(3), level=chance.choice(["INFO", "ERROR"]), message="x" * chance.randrange(300)
    )
    reports: list[Report] = [a_step(chance.randrange(1, 10)), line, a_log_line("y")]
    return chance.choice(reports)


def test_a_filter_means_the_same_here_as_in_the_database(store: JobStore, job_id: str) -> None:
    chance = random.Random(1)
    store.append_reports(job_id, 1, numbered(*(a_report(chance) for _ in range(60))))
    events = store.events(job_id)
    for kinds in (None, frozenset({"log"}), frozenset({"state", "progress"})):
        for since in (None, events[20].time):
            for rank in (None, 0, 1, 2):
                for levels in (None, frozenset({"ERROR"}), frozenset({"INFO", "other"})):
                    which = EventFilter(kinds, since, rank, levels)
                    assert [each for each in events if which.matches(each)] == store.events(job_id, wanted=which)


@pytest.mark.full
def test_one_who_does_not_read_holds_up_nobody_and_little_is_kept(
    store: JobStore, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_streams, "KEPT_BYTES", 50_000)

    async def follow() -> None:
        write, feeds = Writer(store, job_id), feeds_of(store)
        with feeds.follow(job_id, ANONYMOUS, ALL, 4) as idler:
            async with following(feeds, job_id, (ALL, 4)) as results:
                for _ in range(40):
                    await write(*(LogLine(rank=0, level="INFO", message="x" * 1000) for _ in range(10)))
                    await asyncio.sleep(0.005)
                    assert kept_bytes(feeds) <= 2 * 50_000
                finish(store, job_id)
            assert results == [await ids_of(idler)] == [[each.id for each in store.events(job_id, 4)]]

    asyncio.run(follow())


def test_what_all_have_seen_is_not_kept(store: JobStore, job_id: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_streams, "WATCH_SECONDS", 0.02)

    async def follow() -> None:
        write, feeds = Writer(store, job_id), feeds_of(store)
        async with following(feeds, job_id, (ALL, 0), (ALL, 4)):
            await write(*(a_log_line("x" * 1000) for _ in range(50)))
            async with asyncio.timeout(5):
                while kept_bytes(feeds):
                    await asyncio.sleep(0.01)
            finish(store, job_id)

    asyncio.run(follow())


def test_what_nobody_tells_of_is_found_all_the_same(
    store: JobStore, job_id: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(event_streams, "WATCH_SECONDS", 0.02)
    monkeypatch.setattr(event_streams, "LOOK_SECONDS", 0.05)
    unheard = JobStore(store.engine)

    async def follow() -> list[list[int]]:
        feeds = feeds_of(store)
        async with following(feeds, job_id, (ALL, 0)) as results:
            await asyncio.to_thread(unheard.append_reports, job_id, 1, numbered(a_step(1)))
            await asyncio.sleep(0.2)
            await asyncio.to_thread(finish, unheard, job_id)
        return results

    assert asyncio.run(follow()) == [[each.id for each in store.events(job_id)]]
