"""Reads of the record that are too short for a thread: handing one over and back takes several times as long."""

from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread
from sqlalchemy.exc import OperationalError

from service.jobs.database import WAIT_SECONDS, DatabaseSlow
from service.jobs.job_cache import TooManyUnknown
from service.jobs.store import JobStore

T = TypeVar("T")


class ShortReads:
    """Reads a SQLite file in the event loop, and any other database in a thread. Used from the event loop only.

    A read that would wait for a lock, or turns out long, is interrupted and done again in a thread. The loop does wait
    for the disk, as it does wherever it opens a file.

    Args:
        store: The record.
        seconds: How long a read may take in a thread, waiting for one included.
    """

    def __init__(self, store: JobStore, seconds: float = 2 * WAIT_SECONDS) -> None:
        self._store, self._in_loop, self._seconds = store, store.for_short_reads(), seconds

    async def run(self, read: Callable[[JobStore], T]) -> T:
        """Return what a function reads, which may be called twice.

        Args:
            read: The function; it gets the record to read from, and writes nothing. It may go on after this has raised.

        Raises:
            DatabaseSlow: It took too long.
        """
        if self._in_loop is not None:
            try:
                return read(self._in_loop)
            except (OperationalError, TooManyUnknown):
                pass
        try:
            with anyio.fail_after(self._seconds):
                return await anyio.to_thread.run_sync(read, self._store, abandon_on_cancel=True)
        except TimeoutError as error:
            raise DatabaseSlow(self._seconds) from error

    def close(self) -> None:
        """Close its connection."""
        if self._in_loop is not None:
            self._in_loop.close()
