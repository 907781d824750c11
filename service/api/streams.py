"""Limits how many event streams a key has open."""

from collections.abc import AsyncIterator

from fastapi import Depends

from service.api.auth import Reader
from service.api.deps import ContextDep


async def _hold_stream(who: Reader, context: ContextDep) -> AsyncIterator[None]:
    with context.limits.stream(who):
        yield


# A dependency of routes that answer with a stream: it is counted until the stream ends, however that comes.
HoldStream = Depends(_hold_stream)
