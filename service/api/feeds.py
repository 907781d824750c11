"""What open event streams are fed from: the events of a followed job, read and encoded once for all of its streams.

A job's ``Feed`` holds its newest events. It is read anew whenever the job has been written to, as this process knows by
itself, other processes tell through PostgreSQL, and a look at all followed jobs' versions now and then finds where
neither does. A stream that starts further back, or whose client is slow, reads the record by itself until it has
caught up with the feed. Ids of a job's events grow in the order of commits, so that nothing comes in between later.
"""

import asyncio
import logging
import threading
import time
import uuid
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TypeVar

import anyio
import anyio.to_thread
from fastapi.sse import ServerSentEvent
from sqlalchemy.exc import SQLAlchemyError

from service.accounts.keys import KeyStore
from service.accounts.principal import Principal
from service.jobs.model import JobEvent
from service.jobs.notifications import can_listen, listening, send_probe
from service.jobs.queries import EventFilter, Position
from service.jobs.store import JobStore

BATCH = 100  # events read, or given to a stream, in one go
KEPT_BYTES = 16 * 2**20  # of all feeds together, counted as JSON
WATCH_SECONDS = 0.5  # so soon streams end when their key is no longer good, or the server stops
LOOK_SECONDS = 1.0
LOOK_SECONDS_WHEN_TOLD = 5.0
RETRY_SECONDS = 1.0

_THREADS = 4  # that read for streams; other requests have their own

_Answer = TypeVar("_Answer")
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EncodedEvent:
    """An event, and how it is sent.

    Attributes:
        event: The event.
        encoded: The same as all streams send it.
        size: Bytes of its JSON.
    """

    event: JobEvent
    encoded: ServerSentEvent
    size: int

    @classmethod
    def of(cls, event: JobEvent) -> "EncodedEvent":
        """Encode an event."""
        json = event.model_dump_json()
        return cls(event, ServerSentEvent(id=str(event.id), event=event.kind, raw_data=json), len(json))


class Feed:
    """The newest events of a job, for all streams that follow it.

    Attributes:
        job_id: The job.
        followers: The streams.
        version: Of the job, when it was last read to the end; 0 before.
        finished: Whether the job had come to its end then.
        newest: Id of the newest event read; ``None`` before the job has been looked at.
        start: All events read that have greater ids are kept.
        size: Bytes of these, counted as JSON.
        stale: Set when there may be more to read.
    """

    def __init__(self, job_id: str) -> None:
        self.job_id = job_id
        self.followers: set[Follower] = set()
        self.version, self.finished = 0, False
        self.newest: int | None = None
        self.start = 0
        self.stale = asyncio.Event()
        self.stale.set()
        self.size = 0
        self._kept: list[EncodedEvent] = []
        self._changed = asyncio.Event()

    def take(self, position: Position, events: Sequence[EncodedEvent]) -> None:
        """Take what was read: the job's position, and after that the next events, a full batch if there may be more."""
        if self.newest is None:
            self.newest = self.start = position.newest
        if events:
            self._kept += events
            self.size += sum(each.size for each in events)
            self.newest = events[-1].event.id
        if len(events) < BATCH:
            self.version, self.finished = position.version, position.finished
        else:
            self.stale.set()
        self._wake()

    def after(self, seen: int) -> Sequence[EncodedEvent]:
        """The next events after one that is not before the feed's start, a batch at most."""
        first = self._index(seen)
        return self._kept[first : first + BATCH]

    def trim(self, most: int) -> None:
        """Drop what all followers have seen, and the oldest of what is more than so many bytes."""
        dropped = self._index(min(follower.seen for follower in self.followers))
        self.size -= sum(each.size for each in self._kept[:dropped])
        while self.size > most:
            self.size -= self._kept[dropped].size
            dropped += 1
        if dropped:
            self.start = self._kept[dropped - 1].event.id
            del self._kept[:dropped]

    def end(self, is_over: Callable[[Principal], bool]) -> None:
        """End the streams of some, before the job has come to its end."""
        for follower in self.followers:
            follower.over |= is_over(follower.who)
        self._wake()

    async def changed(self) -> None:
        """Return when there is something new."""
        await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _index(self, seen: int) -> int:
        return bisect_right(self._kept, seen, key=lambda kept: kept.event.id)


class Follower:
    """One stream that follows a job.

    Args:
        feeds: What it may read the record by.
        feed: The job's.
        who: Whose stream it is.
        wanted: Which events are wanted.
        seen: Only later events than the one with this id are.

    Attributes:
        over: Set when it is to end before the job does.
    """

    def __init__(self, feeds: "Feeds", feed: Feed, who: Principal, wanted: EventFilter, seen: int) -> None:
        self.who, self.seen, self.over = who, seen, False
        self._feeds, self._feed, self._wanted = feeds, feed, wanted

    async def next(self) -> Sequence[EncodedEvent]:
        """The next wanted events, in order, as soon as there are any; none when the stream is at its end."""
        while not self.over:
            if self._feed.newest is None:
                await self._feed.changed()
            elif self.seen < self._feed.start:
                if found := await self._catch_up(self._feed.newest):
                    return found
            elif events := self._feed.after(self.seen):
                self.seen = events[-1].event.id
                if found := [each for each in events if self._wanted.matches(each.event)]:
                    return found
            elif self._feed.finished:
                break
            else:
                await self._feed.changed()
        return []

    async def _catch_up(self, newest: int) -> Sequence[EncodedEvent]:
        found = await self._feeds.read(self._feed.job_id, self.seen, self._wanted)
        # Where there were no more, all that is wanted up to what the feed had read before is among them.
        self.seen = max([self.seen if len(found) == BATCH else newest, *(each.event.id for each in found[-1:])])
        return found


class Feeds:
    """The feeds of one process. Used from its event loop alone.

    Args:
        store: The record.
        keys: API keys.
        stopping: Set when the server stops.
    """

    def __init__(self, store: JobStore, keys: KeyStore, stopping: threading.Event) -> None:
        self._store, self._keys, self._stopping = store, keys, stopping
        self._feeds: dict[str, Feed] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}  # by job
        self._watcher: asyncio.Task[None] | None = None  # while there are feeds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads = anyio.CapacityLimiter(_THREADS)
        self._is_told = False  # by the database, of what other processes write
        self._next_look = 0.0
        store.notifications.subscribe(self._heard)

    @contextmanager
    def follow(self, job_id: str, who: Principal, wanted: EventFilter, after: int) -> Iterator[Follower]:
        """Follow a job.

        Args:
            job_id: The job.
            who: Whose stream it is; it ends when their key is no longer good.
            wanted: Which events are wanted.
            after: Only later ones than that with this id are.
        """
        feed = self._feeds.get(job_id) or self._open(job_id)
        follower = Follower(self, feed, who, wanted, after)
        feed.followers.add(follower)
        feed.stale.set()
        try:
            yield follower
        finally:
            feed.followers.remove(follower)
            if not feed.followers:
                self._close(feed)

    async def read(self, job_id: str, after: int, wanted: EventFilter) -> Sequence[EncodedEvent]:
        """Read a job's next events from the record, a batch at most; fewer when there are no more."""
        return await self._in_thread(lambda: self._read(job_id, after, wanted))

    def _open(self, job_id: str) -> Feed:
        if not self._feeds:
            self._loop = asyncio.get_running_loop()
            self._is_told, self._next_look = False, time.monotonic() + LOOK_SECONDS
            self._watcher = asyncio.create_task(self._watch_and_listen())
        feed = self._feeds[job_id] = Feed(job_id)
        self._readers[job_id] = asyncio.create_task(self._keep_reading(feed))
        return feed

    def _close(self, feed: Feed) -> None:
        del self._feeds[feed.job_id]
        self._readers.pop(feed.job_id).cancel()
        if not self._feeds and self._watcher is not None:
            self._watcher.cancel()

    def _heard(self, job_id: str, version: int) -> None:
        """Called by whichever thread of this process has written to a job."""
        if job_id in self._feeds and self._loop is not None:
            with suppress(RuntimeError):  # the loop has just ended
                self._loop.call_soon_threadsafe(self._note, job_id, version)

    def _note(self, job_id: str, version: int) -> None:
        feed = self._feeds.get(job_id)
        if feed is not None and version > feed.version:
            feed.stale.set()

    async def _keep_reading(self, feed: Feed) -> None:
        """Read a job's new events whenever there may be some."""
        while True:
            await feed.stale.wait()
            feed.stale.clear()
            try:
                position, events = await self._in_thread(lambda: self._read_on(feed.job_id, feed.newest))
            except SQLAlchemyError:  # the next look finds that there is something left to read
                self._look_soon()
            except Exception:
                _log.exception("the events of job %s cannot be read; its streams end", feed.job_id)
                feed.end(lambda _: True)
            else:
                feed.take(position, events)
                feed.trim(KEPT_BYTES // len(self._feeds))

    def _read_on(self, job_id: str, newest: int | None) -> tuple[Position, Sequence[EncodedEvent]]:
        """The job, and then its next events. In this order, so that none is missed."""
        position = self._store.position(job_id)
        if newest is None or position.newest <= newest:
            return position, []
        return position, self._read(job_id, newest, EventFilter())

    def _read(self, job_id: str, after: int, wanted: EventFilter) -> Sequence[EncodedEvent]:
        return [EncodedEvent.of(event) for event in self._store.events(job_id, after, BATCH, wanted)]

    async def _watch_and_listen(self) -> None:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._watch())
            tasks.create_task(self._listen())

    async def _watch(self) -> None:
        """End streams that may not go on, and look for writes that nobody has told of."""
        is_away = False
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for feed in self._feeds.values():
                feed.trim(KEPT_BYTES // len(self._feeds))
            if self._stopping.is_set():
                self._end(lambda _: True)
            try:
                await self._check_keys()
                if time.monotonic() >= self._next_look:
                    await self._look()
                is_away = False
            except Exception as error:
                if not is_away:
                    _log.warning("event streams wait for the database: %s", error)
                is_away = True
                self._look_soon()

    def _end(self, is_over: Callable[[Principal], bool]) -> None:
        for feed in self._feeds.values():
            feed.end(is_over)

    async def _check_keys(self) -> None:
        asked = {follower.who for feed in self._feeds.values() for follower in feed.followers}
        bad = await self._in_thread(lambda: {who for who in asked if not self._keys.is_good(who)})
        if bad:
            self._end(bad.__contains__)

    async def _look(self) -> None:
        self._next_look = time.monotonic() + (LOOK_SECONDS_WHEN_TOLD if self._is_told else LOOK_SECONDS)
        followed = list(self._feeds)
        for job_id, version in (await self._in_thread(lambda: self._store.versions(followed))).items():
            self._note(job_id, version)

    def _look_soon(self) -> None:
        self._next_look = min(self._next_look, time.monotonic() + LOOK_SECONDS)

    async def _listen(self) -> None:
        """Hear of the writes of other processes, if the database can tell of them."""
        is_said = False
        while can_listen(self._store.engine):
            try:
                await self._listen_once()
            except Exception as error:
                if self._is_told or not is_said:
                    _log.warning("PostgreSQL does not tell what other processes write until it is back: %s", error)
                is_said = True
            self._is_told = False
            self._look_soon()
            await asyncio.sleep(RETRY_SECONDS)

    async def _listen_once(self) -> None:
        probe = uuid.uuid4().hex
        async with listening(self._store.engine) as writes:
            await self._in_thread(lambda: send_probe(self._store.engine, probe))
            async for job_id, version in writes:
                if job_id == probe:
                    self._is_told = True
                    self._next_look = 0.0  # for what was written before
                self._note(job_id, version)

    async def _in_thread(self, work: Callable[[], _Answer]) -> _Answer:
        return await anyio.to_thread.run_sync(work, limiter=self._threads)
