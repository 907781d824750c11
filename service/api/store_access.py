"""Threads for looking at stores and files, which may never answer: few for each tenant, and none that others need.

A thread that waits for a store cannot be ended. So it keeps its tenant's place until the store lets it go, however long
ago the request was answered: what hangs never grows in number, and nobody but its tenant notices.
"""

import asyncio
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from functools import partial
from typing import TypeVar

from service.api.errors import StoreUnavailable
from service.security.redaction import redact

THREADS_PER_TENANT = 4
THREADS = 64

_STOPPING_SECONDS = 2.0

T = TypeVar("T")


class StoreAccess:
    """Runs what looks at stores and files. Used from the server's event loop alone.

    Args:
        seconds: How long a request waits, for a thread and for what it does.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._all = asyncio.Semaphore(THREADS)
        self._of_tenant: dict[str, asyncio.Semaphore] = defaultdict(partial(asyncio.Semaphore, THREADS_PER_TENANT))
        self._waiting: set[asyncio.Timeout] = set()

    async def run(self, tenant: str, what: str, look: Callable[[], T]) -> T:
        """What a function returns that looks at stores or files.

        Args:
            tenant: Whose they are.
            what: What is looked at, for messages.
            look: The function. It may go on after this has raised, so it only does what can be done late.

        Raises:
            StoreUnavailable: It took too long.
        """
        began, release = time.monotonic(), None
        try:
            async with asyncio.timeout(self._seconds) as deadline:
                self._waiting.add(deadline)
                release = await self._place(tenant)
                return await _in_thread(look, release)
        except TimeoutError as error:
            if not deadline.expired():
                raise  # the function's own
            waited = f"within {time.monotonic() - began:.0f} s"
            if release is None:
                problem = f"{what} was not looked at {waited}: earlier requests wait for stores that do not answer"
            else:
                problem = f"{what} did not answer {waited}"
            raise StoreUnavailable(redact(f"{problem}; check that the store can be reached, and try again")) from error
        finally:
            self._waiting.discard(deadline)

    def stop(self) -> None:
        """The server stops: have requests that wait answered soon. Threads that hang end with the process."""
        soon = asyncio.get_running_loop().time() + _STOPPING_SECONDS
        for deadline in self._waiting:
            if not deadline.expired():
                deadline.reschedule(min(soon, deadline.when() or soon))

    async def _place(self, tenant: str) -> Callable[[], None]:
        """Take a place among the tenant's and among all; gives how it is given back."""
        own = self._of_tenant[tenant]
        await own.acquire()
        try:
            await self._all.acquire()
        except asyncio.CancelledError:
            own.release()
            raise

        def release() -> None:
            own.release()
            self._all.release()

        return release


async def _in_thread(look: Callable[[], T], release: Callable[[], None]) -> T:
    """What a function returns, in a thread of its own that keeps no process from ending; its place is released then."""
    loop, context = asyncio.get_running_loop(), copy_context()
    outcome: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        release()
        if outcome.cancelled():
            return
        if error is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(result)  # type: ignore[arg-type]  # None only if that is what T is

    def work() -> None:
        result, error = None, None
        try:
            result = context.run(look)
        except Exception as caught:
            error = caught
        with suppress(RuntimeError):  # the server has stopped meanwhile
            loop.call_soon_threadsafe(settle, result, error)

    try:
        threading.Thread(target=work, name="store", daemon=True).start()
    except RuntimeError:  # there are no more threads to be had
        release()
        raise
    return await outcome
