"""Limits how many event streams a key has open, and lets go of what a stream holds when it ends."""

from collections.abc import AsyncIterator
from contextlib import ExitStack
from typing import Annotated

from fastapi import Depends

from service.api.auth import Reader
from service.api.deps import ContextDep


async def _hold_stream(who: Reader, context: ContextDep) -> AsyncIterator[ExitStack]:
    with context.limits.stream(who), ExitStack() as held:
        yield held


# For routes that answer with a stream: it is counted, and what is entered here is held, until the stream ends, however
# that comes. A generator is not told in time when its client leaves while an event is being sent.
HeldByStream = Annotated[ExitStack, Depends(_hold_stream)]
