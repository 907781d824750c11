"""The newest events of a followed job, read and encoded once for all streams that follow it.

A stream that starts further back, or whose client is slow, reads the record itself until it has caught up. Ids of a
job's events increase in the order of commits, so no event is inserted later.
"""

import asyncio
from bisect import bisect_right
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from fastapi.sse import ServerSentEvent

from service.accounts.principal import Principal
from service.jobs.model import JobEvent
from service.jobs.queries import EventFilter, Position
from service.jobs.store import JobStore

BATCH = 100  # events read, or passed to a stream, at once


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

    @classmethod
    def of(cls, event: JobEvent) -> "EncodedEvent":
        """Encode an event."""
        json = event.model_dump_json()
        return cls(event, ServerSentEvent(id=str(event.id), event=event.kind, raw_data=json), len(json))


Read = Callable[[str, int, EventFilter], Awaitable[Sequence[EncodedEvent]]]


def read_events(store: JobStore, job_id: str, after: int, wanted: EventFilter) -> Sequence[EncodedEvent]:
    """Read a job's next events from the record: a batch, or fewer if there are no more."""
    return [EncodedEvent.of(event) for event in store.events(job_id, after, BATCH, wanted)]


def read_on(store: JobStore, job_id: str, newest: int | None) -> tuple[Position, Sequence[EncodedEvent]]:
    """Read a feed's next input: the job's position and then its next events, in this order so that none is missed."""
    position = store.position(job_id)
    if newest is None or position.newest <= newest:
        return position, []
    return position, read_events(store, job_id, newest, EventFilter())


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
        """Take what was read: the job's position, then its next events; a full batch means there may be more."""
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
        """Return the next events after a given one, which is not before the feed's start; a batch at most."""
        first = self._index(seen)
        return self._kept[first : first + BATCH]

    def trim(self, most: int) -> None:
        """Drop the events that all followers have seen, and the oldest others beyond ``most`` bytes."""
        dropped = self._index(min(follower.seen for follower in self.followers))
        self.size -= sum(each.size for each in self._kept[:dropped])
        while self.size > most:
            self.size -= self._kept[dropped].size
            dropped += 1
        if dropped:
            self.start = self._kept[dropped - 1].event.id
            del self._kept[:dropped]

    def end(self, is_over: Callable[[Principal], bool]) -> None:
        """End the streams of some principals before the job has ended."""
        for follower in self.followers:
            follower.over |= is_over(follower.who)
        self._wake()

    async def changed(self) -> None:
        """Wait until there is something new."""
        await self._changed.wait()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _index(self, seen: int) -> int:
        return bisect_right(self._kept, seen, key=lambda kept: kept.event.id)


class Follower:
    """One stream that follows a job.

    Args:
        feed: The job's feed.
        read: Reads the record; see ``read_events``.
        who: Whose stream it is.
        wanted: Which events are wanted.
        seen: Id of the event after which it starts.

    Attributes:
        over: Set when the stream is to end before the job does.
    """

    def __init__(self, feed: Feed, read: Read, who: Principal, wanted: EventFilter, seen: int) -> None:
        self.who, self.seen, self.over = who, seen, False
        self._feed, self._read, self._wanted = feed, read, wanted

    async def next(self) -> Sequence[EncodedEvent]:
        """Wait for the next wanted events and return them in order; none at the end of the stream."""
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
        found = await self._read(self._feed.job_id, self.seen, self._wanted)
        # If there were no more, these include all wanted events up to what the feed had read before.
        self.seen = max([self.seen if len(found) == BATCH else newest, *(each.event.id for each in found[-1:])])
        return found
