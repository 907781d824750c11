"""When a request is retried, and after how long."""

import random
import time
from http import HTTPStatus

from service.client.errors import ApiError, ServiceUnreachable

_FIRST_PAUSE_SECONDS = 0.2
_LONGEST_PAUSE_SECONDS = 8.0
_FOR_NOW = frozenset({HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE})


class RetryPolicy:
    """Pauses between the tries of one request: each about twice as long as the last, with jitter.

    Args:
        seconds: How long to keep trying in all, from now.
        repeatable: Whether the request may reach the service twice.
    """

    def __init__(self, seconds: float, repeatable: bool = True) -> None:
        self._deadline = time.monotonic() + seconds
        self._repeatable = repeatable
        self._longest = _FIRST_PAUSE_SECONDS

    def pause_after(self, failure: ApiError | ServiceUnreachable) -> float:
        """Return how many seconds to wait before the next try.

        Raises:
            ApiError: The failure, if it should not be retried or no time is left.
            ServiceUnreachable: Likewise.
        """
        # Up to half of it is random, so that clients turned away together do not return together.
        pause = self._longest * random.uniform(0.5, 1.0)
        if isinstance(failure, ApiError) and failure.retry_after is not None:
            pause += failure.retry_after
        if not self._may_repeat(failure) or time.monotonic() + pause > self._deadline:
            raise failure
        self._longest = min(2 * self._longest, _LONGEST_PAUSE_SECONDS)
        return pause

    def _may_repeat(self, failure: ApiError | ServiceUnreachable) -> bool:
        if isinstance(failure, ApiError):
            return self._repeatable and failure.status in _FOR_NOW
        return not failure.is_final and (self._repeatable or not failure.was_sent)
