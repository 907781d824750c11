"""Threads for accessing stores and files, which may never respond: a few per tenant, and none that others need.

A thread that waits for a store cannot be ended. So it occupies its tenant's slot until the store responds, even long
after the request was answered: the number of hung threads is bounded, and only their tenant is affected.
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
    """Runs functions that access stores and files. Used from the server's event loop only.

    Args:
        seconds: How long a request waits, for a thread and for its result.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._all = asyncio.Semaphore(THREADS)
        self._of_tenant: dict[str, asyncio.Semaphore] = defaultdict(partial(asyncio.Semaphore, THREADS_PER_TENANT))
        self._waiting: set[asyncio.Timeout] = set()

    async def run(self, tenant: str, what: str, look: Callable[[], T]) -> T:
        """Run a function that accesses stores or files, and return its result.

        Args:
            tenant: The tenant that they belong to.
            what: What is accessed, for messages.
            look: The function. It may continue after this has raised, so it must tolerate finishing late.

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
                problem = f"{what} was not accessed {waited}: earlier requests wait for stores that do not respond"
            else:
                problem = f"{what} did not respond {waited}"
            raise StoreUnavailable(redact(f"{problem}; check that the store can be reached, and try again")) from error
        finally:
            self._waiting.discard(deadline)

    def stop(self) -> None:
        """Answer waiting requests soon, because the server stops. Hung threads end with the process."""
        soon = asyncio.get_running_loop().time() + _STOPPING_SECONDS
        for deadline in self._waiting:
            if not deadline.expired():
                deadline.reschedule(min(soon, deadline.when() or soon))

    async def _place(self, tenant: str) -> Callable[[], None]:
        """Take a slot of the tenant's and one of all; return the function that releases them."""
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
    """Run a function in a daemon thread of its own and return its result; its slot is released at the end."""
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
        with suppress(RuntimeError):  # the server has stopped in the meantime
            loop.call_soon_threadsafe(settle, result, error)

    try:
        threading.Thread(target=work, name="store", daemon=True).start()
    except RuntimeError:  # no more threads can be started
        release()
        raise
    return await outcome
