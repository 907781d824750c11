"""What a client may use: rates of requests, open streams, reads of the record, threads for stores.

All of it is counted in this process only: each replica allows as much.
"""

import asyncio
import ipaddress
import math
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import AsyncExitStack, contextmanager, suppress
from contextvars import copy_context
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import anyio
import anyio.to_thread
from anyio import CapacityLimiter
from sqlalchemy.exc import OperationalError

from service.accounts.keys import Principal
from service.api.errors import RateLimited, StoreUnavailable
from service.jobs.database import WAIT_SECONDS, DatabaseSlow
from service.jobs.queries import TooManyUnknown
from service.jobs.store import JobStore
from service.security.redaction import redact
from service.settings import Settings

WINDOW_SECONDS = 10  # a burst may use up the allowance of this many seconds

THREADS_PER_TENANT = 4  # that wait for stores
THREADS = 64
SLOW_THREADS = 2  # of a tenant, for requests that read much of the record
PLANS_WAITING = 16  # of a tenant, beside the one being made
_PLANS = 4  # being made at a time, by all tenants
_RETRY_SECONDS = 5
_KEY_THREADS = 8

_MOST_COUNTED = 5_000  # addresses, which bounds the memory
_STOPPING_SECONDS = 2.0

T = TypeVar("T")


@dataclass
class Window:
    """A sliding window: limits the requests of each sender in the last seconds.

    Attributes:
        most: Maximum number of requests.
        seconds: Length of the window.
        what: What a sender did that sent more, for messages.
    """

    most: int
    seconds: float
    what: str
    _counted: dict[str, deque[float]] = field(default_factory=dict)  # when each sender's newest ``most`` requests came

    def count(self, who: str) -> None:
        """Count a request.

        Raises:
            RateLimited: The sender sent too many; this one is not counted.
        """
        now = time.monotonic()
        if who not in self._counted and len(self._counted) >= _MOST_COUNTED:
            self._counted = {sender: times for sender, times in self._counted.items() if times[-1] > now - self.seconds}
            if len(self._counted) >= _MOST_COUNTED:
                self._counted.clear()
        times = self._counted.setdefault(who, deque(maxlen=self.most))
        until_free = times[0] + self.seconds - now if len(times) == self.most else 0.0
        if until_free > 0:
            raise RateLimited(self.what, math.ceil(until_free))
        times.append(now)  # which drops the oldest


class RateLimits:
    """The limits of one process. Used from its event loop only.

    Args:
        settings: The operator's settings.

    Attributes:
        keys: Requests that came with a key, by its id.
        addresses: Requests that came without a key, by network.
        failures: Requests that came with a wrong key, by network. Those from there with a valid key are still admitted.
        key_threads: Threads in which keys are looked up, so that a request is admitted whatever others wait for.
    """

    def __init__(self, settings: Settings) -> None:
        rate, failures = settings.rate_per_second, settings.failed_logins_per_minute
        often = rate * WINDOW_SECONDS, WINDOW_SECONDS
        self.keys = Window(*often, f"this key has sent more than {rate} requests a second")
        self.addresses = Window(*often, f"this address has sent more than {rate} requests a second without a key")
        self.failures = Window(failures, 60, f"this address has sent more than {failures} wrong keys in a minute")
        self.key_threads = CapacityLimiter(_KEY_THREADS)
        self._most_streams = settings.streams_per_key
        self._streams: Counter[str | None] = Counter()

    @contextmanager
    def stream(self, principal: Principal) -> Iterator[None]:
        """Count an event stream while it is open. Without authentication, their number is not limited.

        Raises:
            RateLimited: The key has too many streams open.
        """
        key_id = principal.key_id
        if key_id is not None and self._streams[key_id] >= self._most_streams:
            message = f"this key has {self._most_streams} event streams open, which is the maximum; close some"
            raise RateLimited(message, _RETRY_SECONDS)
        self._streams[key_id] += 1
        try:
            yield
        finally:
            self._streams -= Counter([key_id])  # which drops it at 0


def network_of(address: str | None) -> str:
    """A sender's address, or its /64 network with IPv6, all of which one sender may use."""
    try:
        sender = ipaddress.ip_address(address or "")
    except ValueError:
        return "unknown"
    return str(sender) if sender.version == 4 else str(ipaddress.ip_network((sender, 64), strict=False))


@dataclass(eq=False)
class PlanThreads:
    """Threads that make plans and check trials, which takes seconds of a core. Used from the server's event loop only.

    A tenant has one at a time, and no other requests wait for these threads.
    """

    _all: CapacityLimiter = field(default_factory=partial(CapacityLimiter, _PLANS))
    _of_tenant: dict[str, CapacityLimiter] = field(default_factory=partial(defaultdict, partial(CapacityLimiter, 1)))

    async def run(self, tenant: str, make: Callable[[], T]) -> T:
        """Return what a function makes when its tenant's turn comes.

        Raises:
            RateLimited: Too many requests of the tenant wait for theirs.
        """
        own = self._of_tenant[tenant]
        if own.statistics().tasks_waiting >= PLANS_WAITING:
            raise RateLimited(f"{PLANS_WAITING} plans or sweeps of this tenant are waiting", _RETRY_SECONDS)
        async with own:
            return await anyio.to_thread.run_sync(make, limiter=self._all)


class ShortReads:
    """Reads a SQLite file in the event loop, and any other database in a thread. Used from the event loop only.

    The reads are too short for a thread: handing one over and back takes several times as long.
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
            with suppress(OperationalError, TooManyUnknown):
                return read(self._in_loop)
        try:
            with anyio.fail_after(self._seconds):
                return await anyio.to_thread.run_sync(read, self._store, abandon_on_cancel=True)
        except TimeoutError as error:
            raise DatabaseSlow(self._seconds) from error

    def close(self) -> None:
        """Close its connection."""
        if self._in_loop is not None:
            self._in_loop.close()


class StoreAccess:
    """Runs functions that access stores and files. Used from the server's event loop only.

    Stores may never respond, so they get threads of their own: a few per tenant, and none that others need. A thread
    that waits for a store cannot be ended. So it occupies its tenant's slot until the store responds, even long after
    the request was answered: the number of hung threads is bounded, and only their tenant is affected.

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
        began, has_slot, own = time.monotonic(), False, self._of_tenant[tenant]
        loop, context, outcome = asyncio.get_running_loop(), copy_context(), Future[T]()
        outcome.set_running_or_notify_cancel()  # from here on nothing cancels it, as nothing ends its thread

        def work() -> None:
            with suppress(RuntimeError):  # the server has stopped in the meantime
                try:
                    outcome.set_result(context.run(look))
                except Exception as error:
                    outcome.set_exception(error)
                for slot in (own, self._all):
                    loop.call_soon_threadsafe(slot.release)

        try:
            async with asyncio.timeout(self._seconds) as deadline:
                self._waiting.add(deadline)
                async with AsyncExitStack() as slots:  # released here only if no thread starts
                    await slots.enter_async_context(own)
                    await slots.enter_async_context(self._all)
                    has_slot = True
                    threading.Thread(target=work, name="store", daemon=True).start()
                    slots.pop_all()  # ``work`` releases them
                return await asyncio.wrap_future(outcome)
        except TimeoutError as error:
            if not deadline.expired():
                raise  # the function's own
            waited = f"within {time.monotonic() - began:.0f} s"
            problem = f"{what} did not respond {waited}"
            if not has_slot:
                problem = f"{what} was not accessed {waited}: earlier requests wait for stores that do not respond"
            raise StoreUnavailable(redact(f"{problem}; check that the store can be reached, and try again")) from error
        finally:
            self._waiting.discard(deadline)

    def stop(self) -> None:
        """Answer waiting requests soon, because the server stops. Hung threads end with the process."""
        soon = asyncio.get_running_loop().time() + _STOPPING_SECONDS
        for deadline in self._waiting:
            if not deadline.expired():
                deadline.reschedule(min(soon, deadline.when() or soon))
