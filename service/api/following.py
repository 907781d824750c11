"""Waiting for jobs to change: one look at the record for all open streams of this process, however many there are."""

import asyncio
import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence

import anyio.to_thread

LOOK_SECONDS = 0.2
LONGEST_WAIT_SECONDS = 0.5  # so that streams notice soon when the server stops


class Follower:
    """Tells streams when the jobs that they follow have changed. Used from one event loop.

    Args:
        versions: Gives the versions of some jobs; they grow with every write.
    """

    def __init__(self, versions: Callable[[Sequence[str]], dict[str, int]]) -> None:
        self._versions = versions
        self._followed: Counter[str] = Counter()
        self._known: dict[str, int] = {}
        self._changed: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self._looking: asyncio.Task[None] | None = None

    async def changed(self, job_id: str, version: int) -> None:
        """Return when a job has another version than this, or after a moment."""
        self._followed[job_id] += 1
        try:
            if self._looking is None or self._looking.done():
                self._looking = asyncio.create_task(self._look_on())
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LONGEST_WAIT_SECONDS):
                    while self._known.get(job_id, version) == version:
                        await self._changed[job_id].wait()
        finally:
            self._unfollow(job_id)

    def _unfollow(self, job_id: str) -> None:
        self._followed[job_id] -= 1
        if not self._followed[job_id]:
            del self._followed[job_id]
            self._known.pop(job_id, None)
            self._changed.pop(job_id, None)

    async def _look_on(self) -> None:
        """Look again and again, as long as anybody waits."""
        while self._followed:
            found = await anyio.to_thread.run_sync(self._versions, list(self._followed))
            for job_id, version in found.items():
                if job_id in self._followed and self._known.get(job_id) != version:
                    self._known[job_id] = version
                    self._changed.pop(job_id, asyncio.Event()).set()
            await asyncio.sleep(LOOK_SECONDS)
