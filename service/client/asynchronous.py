"""The client for asyncio."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import httpx
from httpx_sse import aconnect_sse

from service.client.api import Api
from service.client.calls import Awaiting, Call, Stream
from service.client.errors import ApiError, ServiceUnreachable
from service.client.event_stream import BROKEN_OFF, EventStreamReader, StreamEndedEarly
from service.client.options import RETRY_SECONDS, TIMEOUT_SECONDS, Options
from service.client.retries import RetryPolicy
from service.jobs.model import JobEvent

_Answer = TypeVar("_Answer")


class AsyncClient(Api, Awaiting):
    """``Client`` for asyncio: the same methods, awaited; ``events`` and ``logs`` are asynchronous iterators.

    Args:
        base_url: URL of the service, for example ``http://127.0.0.1:8900``.
        api_key: API key; ``None`` for a service without authentication.
        verify: Whether to verify the service's certificate, or a CA bundle to verify it with.
        retry_seconds: How long to retry a request; 0: never.
        timeout: Seconds to wait for the service to send something.

    Raises:
        ValueError: An argument is invalid.
    """

    def __init__(
        self,
        base_url: str,
        *,
        api_key: str | None = None,
        verify: bool | str | Path = True,
        retry_seconds: float = RETRY_SECONDS,
        timeout: float = TIMEOUT_SECONDS,
    ) -> None:
        self._options = Options(base_url, api_key, verify, retry_seconds, timeout)
        self._http = httpx.AsyncClient(**self._options.of_httpx)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def perform(self, call: Call[_Answer]) -> _Answer:
        """Send a call; the named methods are easier to use."""
        patience = RetryPolicy(self._options.retry_seconds, call.repeatable)
        while True:
            try:
                return call.read(await self._send(call))
            except (ApiError, ServiceUnreachable) as failure:
                pause = patience.pause_after(failure)
            await asyncio.sleep(pause)

    async def listen(self, stream: Stream) -> AsyncGenerator[JobEvent, None]:
        """Receive a stream; reconnect when the connection is lost."""
        reading = EventStreamReader(stream, self._options.base_url, self._options.retry_seconds)
        reading.looked(await self.perform(reading.look))
        while True:
            try:
                async with aclosing(self._connection(reading)) as events:
                    async for event in events:
                        yield event
                if reading.is_complete:
                    return
                reading.looked(await self.perform(reading.look))
                if reading.is_complete:
                    continue
                raise StreamEndedEarly
            except BROKEN_OFF as failure:
                pause = reading.pause_after(failure)
            await asyncio.sleep(pause)

    async def _connection(self, reading: EventStreamReader) -> AsyncGenerator[JobEvent, None]:
        async with aconnect_sse(self._http, **reading.request) as source:
            if source.response.is_error:
                await source.response.aread()
                raise ApiError.of(source.response)
            async for sent in source.aiter_sse():
                if event := reading.take(sent):
                    yield event

    async def _send(self, call: Call[_Answer]) -> httpx.Response:
        try:
            return await self._http.request(**call.request)
        except httpx.TransportError as error:
            raise ServiceUnreachable(self._options.base_url, error) from error
