"""The blocking client, the one for asyncio, and how both read a stream across connections."""

import asyncio
import time
from collections.abc import AsyncGenerator, Iterator
from contextlib import AbstractAsyncContextManager, AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import httpx
from httpx_sse import ServerSentEvent, aconnect_sse, connect_sse

from service.client.api import Api
from service.client.calls import (
    RETRY_SECONDS,
    TIMEOUT_SECONDS,
    ApiError,
    Awaiting,
    Blocking,
    Call,
    RetryPolicy,
    ServiceUnreachable,
    Stream,
    get,
    options_of_httpx,
    path_of,
)
from service.jobs.model import JobEvent, JobRecord


class StreamEndedEarly(ConnectionError):
    """The service ended a stream before the job had ended, as it does when it stops."""


class EventStreamReader:
    """One stream across all its connections: each event is taken once.

    Args:
        stream: The stream to read.
        base_url: URL of the service.
        seconds: How long to keep trying while nothing arrives.

    Attributes:
        look: The request for the job, which tells whether more events may follow.
    """

    def __init__(self, stream: Stream, base_url: str, seconds: float) -> None:
        self._stream = stream
        self._base_url = base_url
        self._seconds = seconds
        self._after = stream.after
        self._patience: RetryPolicy | None = None
        self.look = get(path_of("jobs", stream.job_id), JobRecord)

    @property
    def request(self) -> dict[str, Any]:
        """The arguments for httpx-sse's ``connect_sse`` for the next connection."""
        params = {name: value for name, value in self._stream.params.items() if value is not None}
        return {
            "method": "GET",
            "url": path_of("jobs", self._stream.job_id, self._stream.part),
            "params": params | {"follow": self._stream.follow},
            "headers": {"Last-Event-ID": str(self._after)},
        }

    def take(self, sent: ServerSentEvent) -> JobEvent | None:
        """Return the event that was received; ``None`` if the message only keeps the connection alive."""
        self._patience = None
        if not sent.data:
            return None
        event = JobEvent.model_validate_json(sent.data)
        self._after = event.id
        return event

    def pause_after(self, failure: Exception) -> float:
        """Return how many seconds to wait before the next connection.

        Raises:
            ApiError: The service refuses the stream, or has done so for too long.
            ServiceUnreachable: The service has been unreachable for too long.
        """
        self._patience = self._patience or RetryPolicy(self._seconds)
        if not isinstance(failure, ApiError | ServiceUnreachable):
            failure = ServiceUnreachable(self._base_url, failure)
        return self._patience.pause_after(failure)


BROKEN_OFF = (httpx.TransportError, ServiceUnreachable, StreamEndedEarly, ApiError)

_Answer = TypeVar("_Answer")


class Client(Api, Blocking, AbstractContextManager["Client"]):
    """A client of a BOOST service.

    Every method raises ``ApiError`` when the service refuses, and ``ServiceUnreachable`` when it does not answer.
    A request that may safely reach the service twice is retried when the connection fails or the service answers
    429 or 503. Requests that create something are among these: all tries carry the same Idempotency-Key.

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
        self._base_url, self._retry_seconds = base_url, retry_seconds
        self._http = httpx.Client(**options_of_httpx(base_url, api_key, verify, timeout))

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def perform(self, call: Call[_Answer]) -> _Answer:
        """Send a call; the named methods are easier to use."""
        patience = RetryPolicy(self._retry_seconds, call.repeatable)
        while True:
            try:
                try:
                    response = self._http.request(**call.request)
                except httpx.TransportError as error:
                    raise ServiceUnreachable(self._base_url, error) from error
                return call.read(response)
            except (ApiError, ServiceUnreachable) as failure:
                pause = patience.pause_after(failure)
            time.sleep(pause)

    def listen(self, stream: Stream) -> Iterator[JobEvent]:
        """Receive a stream; reconnect when the connection is lost."""
        reading = EventStreamReader(stream, self._base_url, self._retry_seconds)
        job_finished = self.perform(reading.look).finished
        while True:
            try:
                with connect_sse(self._http, **reading.request) as source:
                    if source.response.is_error:
                        source.response.read()
                        raise ApiError.of(source.response)
                    for sent in source.iter_sse():
                        if event := reading.take(sent):
                            yield event
                # A connection opened before the job ended may have been closed by a service that was stopping.
                if job_finished or not stream.follow:
                    return
                job_finished = self.perform(reading.look).finished
                if job_finished:
                    continue
                raise StreamEndedEarly("the stream ended early")
            except BROKEN_OFF as failure:
                pause = reading.pause_after(failure)
            time.sleep(pause)


class AsyncClient(Api, Awaiting, AbstractAsyncContextManager["AsyncClient"]):
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
        self._base_url, self._retry_seconds = base_url, retry_seconds
        self._http = httpx.AsyncClient(**options_of_httpx(base_url, api_key, verify, timeout))

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def perform(self, call: Call[_Answer]) -> _Answer:
        """Send a call; the named methods are easier to use."""
        patience = RetryPolicy(self._retry_seconds, call.repeatable)
        while True:
            try:
                try:
                    response = await self._http.request(**call.request)
                except httpx.TransportError as error:
                    raise ServiceUnreachable(self._base_url, error) from error
                return call.read(response)
            except (ApiError, ServiceUnreachable) as failure:
                pause = patience.pause_after(failure)
            await asyncio.sleep(pause)

    async def listen(self, stream: Stream) -> AsyncGenerator[JobEvent, None]:
        """Receive a stream; reconnect when the connection is lost."""
        reading = EventStreamReader(stream, self._base_url, self._retry_seconds)
        job_finished = (await self.perform(reading.look)).finished
        while True:
            try:
                async with aconnect_sse(self._http, **reading.request) as source:
                    if source.response.is_error:
                        await source.response.aread()
                        raise ApiError.of(source.response)
                    async for sent in source.aiter_sse():
                        if event := reading.take(sent):
                            yield event
                # A connection opened before the job ended may have been closed by a service that was stopping.
                if job_finished or not stream.follow:
                    return
                job_finished = (await self.perform(reading.look)).finished
                if job_finished:
                    continue
                raise StreamEndedEarly("the stream ended early")
            except BROKEN_OFF as failure:
                pause = reading.pause_after(failure)
            await asyncio.sleep(pause)
