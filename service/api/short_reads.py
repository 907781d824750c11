"""Reads of the record that are too short for a thread: handing one over and back takes several times as long."""

from collections.abc import Callable
from typing import TypeVar

from fastapi.concurrency import run_in_threadpool
from sqlalchemy.exc import OperationalError

from service.jobs.job_cache import TooManyUnknown
from service.jobs.store import JobStore

T = TypeVar("T")


class ShortReads:
    """Reads a SQLite file in the event loop, and any other database in a thread. Used from the event loop only.

    A read that would wait for a lock, or turns out long, is interrupted and done again in a thread. The loop does wait
    for the disk, as it does wherever it opens a file.

    Args:
        store: The record.
    """

    def __init__(self, store: JobStore) -> None:
        self._store, self._in_loop = store, store.for_short_reads()

    async def run(self, read: Callable[[JobStore], T]) -> T:
        """Return what a function reads, which may be called twice.

        Args:
            read: The function; it gets the record to read from, and writes nothing.
        """
        if self._in_loop is not None:
            try:
                return read(self._in_loop)
            except (OperationalError, TooManyUnknown):
                pass
        return await run_in_threadpool(read, self._store)

    def close(self) -> None:
        """Close its connection."""
        if self._in_loop is not None:
            self._in_loop.close()
