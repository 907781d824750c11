"""Rate limits. Counted in this process only: each replica allows as much."""

import ipaddress
import math
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager

from service.accounts.principal import Principal
from service.api.exceptions import RateLimited
from service.settings import Settings

WINDOW_SECONDS = 10  # a burst may use up the allowance of this many seconds

_MOST_COUNTED = 5_000  # addresses, which bounds the memory
_STREAM_RETRY_SECONDS = 5


class _Window:
    """A sliding window: limits the requests of each sender in the last seconds."""

    def __init__(self, most: int, seconds: float, what: str) -> None:
        self._most, self._seconds, self._what = most, seconds, what
        self._counted: dict[str, deque[float]] = {}  # when each sender's newest requests came, ``most`` of them

    def count(self, who: str) -> None:
        """Count a request.

        Raises:
            RateLimited: The sender sent too many; this one is not counted.
        """
        now = time.monotonic()
        if who not in self._counted and len(self._counted) >= _MOST_COUNTED:
            self._forget_old(now - self._seconds)
        times = self._counted.setdefault(who, deque(maxlen=self._most))
        until_free = times[0] + self._seconds - now if len(times) == self._most else 0.0
        if until_free > 0:
            raise RateLimited(self._what, math.ceil(until_free))
        times.append(now)  # which drops the oldest

    def _forget_old(self, before: float) -> None:
        self._counted = {who: times for who, times in self._counted.items() if times[-1] > before}
        if len(self._counted) >= _MOST_COUNTED:
            self._counted.clear()


class RateLimits:
    """The limits of one process. Used from its event loop only.

    Args:
        settings: The operator's settings.
    """

    def __init__(self, settings: Settings) -> None:
        rate, failures = settings.rate_per_second, settings.failed_logins_per_minute
        often = rate * WINDOW_SECONDS, WINDOW_SECONDS
        self._keys = _Window(*often, f"this key has sent more than {rate} requests a second")
        self._addresses = _Window(*often, f"this address has sent more than {rate} requests a second without a key")
        self._failures = _Window(failures, 60, f"this address has sent more than {failures} wrong keys in a minute")
        self._most_streams = settings.streams_per_key
        self._streams: Counter[str] = Counter()

    def count(self, principal: Principal) -> None:
        """Count a request that came with a key.

        Raises:
            RateLimited: There were too many.
        """
        self._keys.count(str(principal.key_id))

    def count_address(self, address: str | None) -> None:
        """Count a request that came without a key.

        Raises:
            RateLimited: There were too many.
        """
        self._addresses.count(network_of(address))

    def count_failure(self, address: str | None) -> None:
        """Count a request that came with a wrong key.

        Raises:
            RateLimited: The address sent too many. Requests from there with a valid key are still admitted.
        """
        self._failures.count(network_of(address))

    @contextmanager
    def stream(self, principal: Principal) -> Iterator[None]:
        """Count an event stream while it is open. Without authentication, their number is not limited.

        Raises:
            RateLimited: The key has too many streams open.
        """
        key_id = principal.key_id
        if key_id is None:
            yield
            return
        if self._streams[key_id] >= self._most_streams:
            message = f"this key has {self._most_streams} event streams open, which is the maximum; close some"
            raise RateLimited(message, _STREAM_RETRY_SECONDS)
        self._streams[key_id] += 1
        try:
            yield
        finally:
            self._streams[key_id] -= 1
            if not self._streams[key_id]:
                del self._streams[key_id]


def network_of(address: str | None) -> str:
    """A sender's address, or its /64 network with IPv6, all of which one sender may use."""
    try:
        found = ipaddress.ip_address(address or "")
    except ValueError:
        return "unknown"
    return str(found) if found.version == 4 else str(ipaddress.ip_network((found, 64), strict=False))
