"""How many plans are searched for at a time: each search keeps a core busy."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from service.api.exceptions import RateLimited

_TOGETHER = 2
_RETRY_SECONDS = 5


class Searches:
    """Lets each tenant have one search under way, and all tenants two."""

    def __init__(self) -> None:
        self._tenants: set[str] = set()
        self._lock = threading.Lock()

    @contextmanager
    def one_of(self, tenant: str) -> Iterator[None]:
        """While a tenant searches.

        Raises:
            RateLimited: It does so already, or too many others do.
        """
        with self._lock:
            if tenant in self._tenants:
                raise RateLimited("another plan of this tenant is searched for", _RETRY_SECONDS)
            if len(self._tenants) >= _TOGETHER:
                raise RateLimited("plans of other tenants are searched for", _RETRY_SECONDS)
            self._tenants.add(tenant)
        try:
            yield
        finally:
            with self._lock:
                self._tenants.discard(tenant)
