"""Streams of events: the newest of each followed job, when more are read, and which streams may continue.

The newest events of a followed job are in its ``Feed``, read and encoded once for all streams that follow it. A stream
that starts further back, or whose client is slow, reads the record itself until it has caught up. Ids of a job's events
increase in the order of commits, so no event is inserted later.

A feed reads more whenever its job has been written to. This process is notified of its own writes directly and of other
processes' by PostgreSQL; polling the versions of all followed jobs now and then finds what both have missed.
"""

import asyncio
import logging
import threading
import time
import uuid
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from itertools import filterfalse
from operator import attrgetter

import anyio
import anyio.to_thread
from fastapi.sse import ServerSentEvent
from sqlalchemy.exc import SQLAlchemyError

from service.accounts.keys import KeyStore, Principal
from service.jobs.model import JobEvent
from service.jobs.queries import EventFilter, Position
from service.jobs.store import JobStore, listening, send_probe

BATCH = 100  # events read, or passed to a stream, at once
_ID = attrgetter("event.id")  # of an encoded event


@dataclass(frozen=True)
class EncodedEvent:
    """An event and its encoded form.

    Attributes:
        event: The event.
        encoded: The event as all streams send it.
        size: Size of its JSON in bytes.
    """

    event: JobEvent
    encoded: ServerSentEvent
    size: int


def read_events(store: JobStore, job_id: str, after: int, selection: EventFilter) -> Sequence[EncodedEvent]:
    """Read a job's next events from the record: a batch, or fewer if there are no more."""
    events = []
    for event in store.events(job_id, after, BATCH, selection):
        json = event.model_dump_json()
        encoded = ServerSentEvent(id=str(event.id), event=event.kind, raw_data=json)
        events.append(EncodedEvent(event, encoded, len(json)))
    return events


@dataclass(eq=False)
class Feed:
    """The newest events of a job, for all streams that follow it.

    Attributes:
        job_id: The job.
        followers: The streams.
        version: The job's version when it was last read to the end; 0 before.
        finished: Whether the job had ended then.
        newest: Id of the newest event read; ``None`` before the first read.
        start: All events read with greater ids are kept.
        size: Size of the kept events in bytes of JSON.
        stale: Set when there may be more to read.
        changed: Set, and replaced, when there is something new.
    """

    job_id: str
    followers: "set[Follower]" = field(default_factory=set)
    version: int = 0
    finished: bool = False
    newest: int | None = None
    start: int = 0
    size: int = 0
    stale: asyncio.Event = field(default_factory=asyncio.Event)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _events: list[EncodedEvent] = field(default_factory=list)

    def take(self, position: Position, events: Sequence[EncodedEvent]) -> None:
        """Take what was read: the job's position, then its next events; a full batch means there may be more."""
        if self.newest is None:
            self.newest = self.start = position.newest
        if events:
            self._events += events
            self.size += sum(each.size for each in events)
            self.newest = events[-1].event.id
        if len(events) < BATCH:
            self.version, self.finished = position.version, position.finished
        else:
            self.stale.set()
        self.changed.set()
        self.changed = asyncio.Event()

    def after(self, seen: int) -> Sequence[EncodedEvent]:
        """Return the next events after a given one, which is not before the feed's start; a batch at most."""
        first = bisect_right(self._events, seen, key=_ID)
        return self._events[first : first + BATCH]

    def trim(self, most: int) -> None:
        """Drop the events that all followers have seen, and the oldest others beyond ``most`` bytes."""
        dropped = bisect_right(self._events, min(follower.seen for follower in self.followers), key=_ID)
        self.size -= sum(each.size for each in self._events[:dropped])
        while self.size > most:
            self.size -= self._events[dropped].size
            dropped += 1
        if dropped:
            self.start = self._events[dropped - 1].event.id
            del self._events[:dropped]

    def end(self, is_over: Callable[[Principal], bool]) -> None:
        """End the streams of some principals before the job has ended."""
        for follower in self.followers:
            follower.over |= is_over(follower.who)
        self.changed.set()
        self.changed = asyncio.Event()


@dataclass(eq=False)
class Follower:
    """One stream that follows a job.

    Attributes:
        feed: The job's feed.
        feeds: The feeds of the process, for reading the record.
        who: Whose stream it is.
        selection: Which events to follow.
        seen: Id of the event after which it starts; then of the newest that it has returned.
        over: Set when the stream is to end before the job does.
    """

    feed: Feed
    feeds: "Feeds"
    who: Principal
    selection: EventFilter
    seen: int
    over: bool = False

    async def next(self) -> Sequence[EncodedEvent]:
        """Wait for the next selected events and return them in order; none at the end of the stream."""
        while not self.over:
            if self.feed.newest is not None and self.seen < self.feed.start:
                newest = self.feed.newest
                batch = await self.feeds.read(self.feed.job_id, self.seen, self.selection, self.who.tenant)
                # If there were no more, these include all selected events up to what the feed had read before.
                self.seen = max([self.seen if len(batch) == BATCH else newest, *(each.event.id for each in batch[-1:])])
                if batch:
                    return batch
            elif events := self.feed.after(self.seen):
                self.seen = events[-1].event.id
                if matching := [each for each in events if self.selection.matches(each.event)]:
                    return matching
            elif self.feed.finished:
                break
            else:
                await self.feed.changed.wait()
        return []


KEPT_BYTES = 16 * 2**20  # of JSON, in all feeds together
WATCH_SECONDS = 0.5  # until streams end if their key was revoked or has expired, or their server stops
LOOK_SECONDS = 1.0
LOOK_SECONDS_WHEN_NOTIFIED = 5.0
RETRY_SECONDS = 1.0

_THREADS, _THREADS_PER_TENANT = 4, 2  # that read new events, and as many old ones; other requests have their own

_log = logging.getLogger(__name__)


class Feeds:
    """The feeds of one process. Used from its event loop only.

    Args:
        store: The record.
        keys: API keys.
        stopping: Set when the server stops.
    """

    def __init__(self, store: JobStore, keys: KeyStore, stopping: threading.Event) -> None:
        self._store, self._keys, self._stopping = store, keys, stopping
        self._feeds: dict[str, Feed] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}  # by job
        self._watchers: list[asyncio.Task[None]] = []  # while there are feeds
        self._loop: asyncio.AbstractEventLoop | None = None
        self._threads, self._old = anyio.CapacityLimiter(_THREADS), anyio.CapacityLimiter(_THREADS)
        self._tenants = defaultdict[str, anyio.CapacityLimiter](partial(anyio.CapacityLimiter, _THREADS_PER_TENANT))
        self._is_notified = False  # by the database, of other processes' writes
        self._next_look = 0.0
        store.notifications.subscribers.append(self._note)

    @contextmanager
    def follow(self, job_id: str, who: Principal, selection: EventFilter, after: int) -> Iterator[Follower]:
        """Follow a job.

        Args:
            job_id: The job.
            who: Whose stream it is; it ends when their key is revoked or expires.
            selection: Which events to follow.
            after: Id of the event after which to start.
        """
        if (feed := self._feeds.get(job_id)) is None:
            if not self._feeds:
                self._loop = asyncio.get_running_loop()
                self._is_notified, self._next_look = False, time.monotonic() + LOOK_SECONDS
                self._watchers = [asyncio.create_task(each) for each in (self._tend(), self._watch(), self._listen())]
            feed = self._feeds[job_id] = Feed(job_id)
            self._readers[job_id] = asyncio.create_task(self._keep_reading(feed))
        follower = Follower(feed, self, who, selection, after)
        feed.followers.add(follower)
        feed.stale.set()
        try:
            yield follower
        finally:
            feed.followers.remove(follower)
            if not feed.followers:
                del self._feeds[job_id]
                self._readers.pop(job_id).cancel()
                if not self._feeds:
                    for watcher in self._watchers:
                        watcher.cancel()

    async def read(self, job_id: str, after: int, selection: EventFilter, tenant: str) -> Sequence[EncodedEvent]:
        """Read the record in another thread, for a tenant; see ``read_events``. What is old may take long to find."""
        async with self._tenants[tenant]:
            return await anyio.to_thread.run_sync(read_events, self._store, job_id, after, selection, limiter=self._old)

    def _note(self, job_id: str, version: int) -> None:
        """Note a write to a job; also called by the thread of this process that has written to it."""
        feed = self._feeds.get(job_id)
        if feed is not None and version > feed.version and self._loop is not None:
            with suppress(RuntimeError):  # the loop has just ended
                self._loop.call_soon_threadsafe(feed.stale.set)

    async def _keep_reading(self, feed: Feed) -> None:
        """Read a job's new events whenever there may be some."""

        def read_on() -> tuple[Position, Sequence[EncodedEvent]]:
            position = self._store.position(feed.job_id)  # before its events, so that none is missed
            if feed.newest is None or position.newest <= feed.newest:
                return position, []
            return position, read_events(self._store, feed.job_id, feed.newest, EventFilter())

        while True:
            await feed.stale.wait()
            feed.stale.clear()
            try:
                position, events = await anyio.to_thread.run_sync(read_on, limiter=self._threads)
            except SQLAlchemyError:  # the next poll finds that there is more to read
                self._next_look = min(self._next_look, time.monotonic() + LOOK_SECONDS)
            except Exception:
                _log.exception("the events of job %s cannot be read; its streams end", feed.job_id)
                feed.end(lambda _: True)
            else:
                feed.take(position, events)
                feed.trim(KEPT_BYTES // len(self._feeds))

    async def _tend(self) -> None:
        """Do what must not wait for the database: end all streams when the server stops, and bound the memory."""
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            for feed in self._feeds.values():
                feed.trim(KEPT_BYTES // len(self._feeds))
                if self._stopping.is_set():
                    feed.end(lambda _: True)

    async def _watch(self) -> None:
        """End streams whose keys were revoked or have expired, and poll for writes that came without a notification."""
        is_away = False
        while True:
            await asyncio.sleep(WATCH_SECONDS)
            try:
                senders = {follower.who for feed in self._feeds.values() for follower in feed.followers}
                bad_ones = filterfalse(self._keys.is_good, senders)
                if bad := await anyio.to_thread.run_sync(set, bad_ones, limiter=self._threads):
                    for feed in self._feeds.values():
                        feed.end(bad.__contains__)
                if time.monotonic() >= self._next_look:
                    pause = LOOK_SECONDS_WHEN_NOTIFIED if self._is_notified else LOOK_SECONDS
                    self._next_look = time.monotonic() + pause
                    look = partial(self._store.versions, list(self._feeds))
                    for job_id, version in (await anyio.to_thread.run_sync(look, limiter=self._threads)).items():
                        self._note(job_id, version)
                is_away = False
            except Exception as error:
                if not is_away:
                    _log.warning("event streams wait for the database: %s", error)
                is_away = True
                self._next_look = min(self._next_look, time.monotonic() + LOOK_SECONDS)

    async def _listen(self) -> None:
        """Listen for other processes' writes, if the database can notify of them."""
        is_logged = False
        while self._store.engine.dialect.name == "postgresql":
            try:
                probe = uuid.uuid4().hex
                async with listening(self._store.engine) as writes:
                    await anyio.to_thread.run_sync(send_probe, self._store.engine, probe, limiter=self._threads)
                    async for job_id, version in writes:
                        if job_id == probe:
                            self._is_notified = True
                            self._next_look = 0.0  # to find earlier writes
                        self._note(job_id, version)
            except Exception as error:
                if self._is_notified or not is_logged:
                    _log.warning("no notifications of other processes' writes until PostgreSQL is back: %s", error)
                is_logged = True
            self._is_notified = False
            self._next_look = min(self._next_look, time.monotonic() + LOOK_SECONDS)
            await asyncio.sleep(RETRY_SECONDS)
