"""Limits the number of open event streams per key, and releases what a stream holds when it ends."""

from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Annotated

from fastapi import Depends

from service.api.auth import Reader
from service.api.deps import ContextDep


async def _hold_stream(who: Reader, context: ContextDep) -> AsyncIterator[ExitStack]:
    with context.limits.stream(who), ExitStack() as held:
        yield held


# For routes that return a stream: it is counted, and contexts entered here are held, until the stream ends for whatever
# reason. A generator is not closed in time if its client leaves while an event is being sent.
HeldByStream = Annotated[ExitStack, Depends(_hold_stream)]
