"""The blocking client."""

import time
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self, TypeVar

import httpx
from httpx_sse import connect_sse

from service.client.api import Api
from service.client.calls import Blocking, Call, Stream
from service.client.errors import ApiError, ServiceUnreachable
from service.client.event_stream import BROKEN_OFF, EventStreamReader, StreamEndedEarly
from service.client.options import RETRY_SECONDS, TIMEOUT_SECONDS, Options
from service.client.retries import RetryPolicy
from service.jobs.model import JobEvent

_Answer = TypeVar("_Answer")


class Client(Api, Blocking):
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
        self._options = Options(base_url, api_key, verify, retry_seconds, timeout)
        self._http = httpx.Client(**self._options.of_httpx)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def perform(self, call: Call[_Answer]) -> _Answer:
        """Send a call; the named methods are easier to use."""
        patience = RetryPolicy(self._options.retry_seconds, call.repeatable)
        while True:
            try:
                return call.read(self._send(call))
            except (ApiError, ServiceUnreachable) as failure:
                pause = patience.pause_after(failure)
            time.sleep(pause)

    def listen(self, stream: Stream) -> Iterator[JobEvent]:
        """Receive a stream; reconnect when the connection is lost."""
        reading = EventStreamReader(stream, self._options.base_url, self._options.retry_seconds)
        reading.looked(self.perform(reading.look))
        while True:
            try:
                yield from self._connection(reading)
                if reading.is_complete:
                    return
                reading.looked(self.perform(reading.look))
                if reading.is_complete:
                    continue
                raise StreamEndedEarly
            except BROKEN_OFF as failure:
                pause = reading.pause_after(failure)
            time.sleep(pause)

    def _connection(self, reading: EventStreamReader) -> Iterator[JobEvent]:
        with connect_sse(self._http, **reading.request) as source:
            if source.response.is_error:
                source.response.read()
                raise ApiError.of(source.response)
            for sent in source.iter_sse():
                if event := reading.take(sent):
                    yield event

    def _send(self, call: Call[_Answer]) -> httpx.Response:
        try:
            return self._http.request(**call.request)
        except httpx.TransportError as error:
            raise ServiceUnreachable(self._options.base_url, error) from error
