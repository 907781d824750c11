"""Requests described independently of how they are sent, how both clients send them, and operations as methods of both.

An operation is a function that describes its request, or a ``request`` that has only a path. As a method of ``Client``
it returns the answer; as a method of ``AsyncClient`` it is awaited. A ``Stream`` likewise becomes an iterator or an
asynchronous iterator.
"""

import asyncio
import functools
import inspect
import random
import re
import secrets
import ssl
import time
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from pathlib import Path
from types import MethodType, NoneType
from typing import Any, Concatenate, Generic, ParamSpec, TypeVar, get_args, overload
from urllib.parse import quote

import httpx
from httpx_sse import ServerSentEvent, aconnect_sse, connect_sse
from pydantic import BaseModel, TypeAdapter, ValidationError

from boost_core import __version__
from service.jobs.model import JobEvent, JobRecord
from service.models.problems import FieldError, Problem
from service.proxies import proxy_of


class ApiError(RuntimeError):
    """The service refused a request.

    Attributes:
        status: The HTTP status.
        code: The kind of problem, for example ``job-not-found``; stable across versions.
        detail: What went wrong and what to do.
        errors: The fields at fault, if any.
        retry_after: Seconds after which to ask again, if the service says so.
    """

    def __init__(
        self, status: int, detail: str, errors: list[FieldError], code: str = "", retry_after: float | None = None
    ) -> None:
        super().__init__(detail)
        self.status, self.code = status, code or f"http-{status}"
        self.detail, self.errors, self.retry_after = detail, errors, retry_after

    @classmethod
    def of(cls, response: httpx.Response) -> "ApiError":
        """Build the error from an error response that has been read."""
        retry_after = None
        if (sent := response.headers.get("Retry-After")) is not None:
            # A number of seconds or a date; anything else is ignored.
            try:
                retry_after = max(0.0, float(sent))
            except ValueError:
                with suppress(ValueError):
                    at = parsedate_to_datetime(sent).astimezone(UTC)
                    retry_after = max(0.0, (at - datetime.now(UTC)).total_seconds())
        try:
            problem = Problem.model_validate_json(response.content)
        except ValidationError:
            detail = f"{response.url} answered {response.status_code} {response.reason_phrase}".rstrip()
            return cls(response.status_code, detail, [], retry_after=retry_after)
        code = problem.type.removeprefix("urn:boost:problem:")
        return cls(problem.status, problem.detail, problem.errors, code, retry_after)


class ServiceUnreachable(ConnectionError):
    """The service does not answer.

    Attributes:
        was_sent: Whether the request may have reached the service.
        is_final: Whether a retry is useless, because the service's certificate is not trusted.
    """

    def __init__(self, base_url: str, cause: Exception) -> None:
        self.was_sent = not isinstance(cause, httpx.ConnectError | httpx.ConnectTimeout | httpx.PoolTimeout)
        self.is_final = False
        error: BaseException | None = cause
        while error is not None:
            self.is_final |= isinstance(error, ssl.SSLCertVerificationError)
            error = error.__cause__ or error.__context__
        remedy = "is `boost serve` running there? Give another address with --url or BOOST_URL"
        if self.is_final:
            remedy = "give the CA file that its certificate is signed with: verify= or `boost login --ca-file`"
        proxy = proxy_of(base_url)
        way = f" through the proxy {proxy.url.host}:{proxy.url.port}" if proxy else ""
        super().__init__(f"no service answers at {base_url}{way} ({str(cause) or type(cause).__name__}); {remedy}")


IDEMPOTENCY_KEY = re.compile(r"[!-~]{1,255}")

_Answer = TypeVar("_Answer")
_Now = TypeVar("_Now")
_Later = TypeVar("_Later")
_Arguments = ParamSpec("_Arguments")


@dataclass(frozen=True)
class Call(Generic[_Answer]):
    """One request and the type of its answer.

    Attributes:
        method: The HTTP method.
        path: Path on the service.
        answer: Type of the answer's body; ``NoneType`` if it has none.
        params: Query parameters; ``None`` values are left out.
        body: Body, sent as JSON.
        headers: Further headers.
        repeatable: Whether sending it twice has the same effect as sending it once.
    """

    method: str
    path: str
    answer: type[_Answer]
    params: Mapping[str, Any] = field(default_factory=dict)
    body: Any = None
    headers: Mapping[str, str] = field(default_factory=dict)
    repeatable: bool = False

    @property
    def request(self) -> dict[str, Any]:
        """The arguments for httpx's ``request``."""
        query = {name: value for name, value in self.params.items() if value is not None}
        body = {} if self.body is None else {"json": self.body}
        return {"method": self.method, "url": self.path, "params": query, "headers": dict(self.headers)} | body

    def read(self, response: httpx.Response) -> _Answer:
        """Parse the service's answer.

        Raises:
            ApiError: The service refused, or is not a BOOST service.
        """
        if not response.is_success:  # a redirect, which is not followed, has done nothing
            raise ApiError.of(response)
        try:
            return TypeAdapter(self.answer).validate_json(response.content or b"null")
        except ValidationError as error:
            raise ApiError(HTTPStatus.BAD_GATEWAY, f"{response.url} is not a BOOST service: {error}", []) from error


@dataclass
class Stream:
    """A stream of a job's events, or of some of them, across all its connections: each event is taken once.

    Attributes:
        job_id: The job.
        part: What is streamed: ``events`` or ``logs``.
        after: The last event already seen or taken.
        follow: Whether to continue until the job ends.
        params: Further query parameters.
    """

    job_id: str
    part: str
    after: int
    follow: bool
    params: Mapping[str, Any]

    @property
    def request(self) -> dict[str, Any]:
        """The arguments for httpx-sse's ``connect_sse`` for the next connection."""
        call = get(path_of("jobs", self.job_id, self.part), NoneType, **self.params, follow=self.follow)
        return call.request | {"headers": {"Last-Event-ID": str(self.after)}}

    def take(self, sent: ServerSentEvent) -> JobEvent | None:
        """Return the event that was received; ``None`` if the message only keeps the connection alive."""
        if not sent.data:
            return None
        event = JobEvent.model_validate_json(sent.data)
        self.after = event.id
        return event


def get(path: str, answer: type[_Answer], **params: Any) -> Call[_Answer]:
    """Describe a request that only reads."""
    return Call("GET", path, answer, params=params, repeatable=True)


def create(path: str, answer: type[_Answer], body: Any, key: str | None) -> Call[_Answer]:
    """Describe a request that creates something, only once however often it is sent: all tries carry the same key.

    Args:
        path: Path of the collection.
        answer: Type of the answer.
        body: Body of the request.
        key: Idempotency key; a new one if ``None``.

    Raises:
        ValueError: The key is invalid.
    """
    if key is not None and not IDEMPOTENCY_KEY.fullmatch(key):
        raise ValueError(f"{key!r} cannot be an Idempotency-Key; give 1 to 255 visible ASCII characters")
    headers = {"Idempotency-Key": key or secrets.token_urlsafe(24)}
    return Call("POST", path, answer, body=body, headers=headers, repeatable=True)


def plain(body: BaseModel | Mapping[str, Any]) -> Any:
    """Return a body as JSON-compatible data; a mapping is left for the service to validate."""
    return body.model_dump(mode="json") if isinstance(body, BaseModel) else body


def path_of(*parts: object) -> str:
    """Return a path under ``/v1``, with each part quoted."""
    return "/v1/" + "/".join(quote(str(part), safe="") for part in parts)


# When a request is retried, and after how long.

_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.2, 8.0
_MOST_ASKED_SECONDS = 10.0  # that the service may ask to wait
# Of the service itself, and of a proxy before it while it restarts.
_FOR_NOW = frozenset({429, 502, 503, 504})


class RetryPolicy:
    """Pauses between the tries of one request: each about twice as long as the last, with jitter.

    Args:
        base_url: URL of the service.
        seconds: How long to keep trying in all, from now; what a busy service asks to wait, if not long, comes on top.
        repeatable: Whether the request may reach the service twice.
    """

    def __init__(self, base_url: str, seconds: float, repeatable: bool = True) -> None:
        self._base_url, self._repeatable = base_url, repeatable
        self._deadline, self._longest = time.monotonic() + seconds, _FIRST_PAUSE_SECONDS

    def pause_after(self, failure: Exception) -> float:
        """Return how many seconds to wait before the next try.

        Args:
            failure: An ``ApiError``; anything else means that the service does not answer.

        Raises:
            ApiError: The failure, if it should not be retried or no time is left.
            ServiceUnreachable: Likewise.
        """
        if not isinstance(failure, ApiError | ServiceUnreachable):
            cause, failure = failure, ServiceUnreachable(self._base_url, failure)
            failure.__cause__ = cause
        # Up to half of it is random, so that clients turned away together do not return together.
        pause = self._longest * random.uniform(0.5, 1.0)
        if isinstance(failure, ApiError) and failure.retry_after is not None:
            pause += failure.retry_after
            self._deadline += min(failure.retry_after, _MOST_ASKED_SECONDS)
        if isinstance(failure, ApiError):
            is_service = not isinstance(failure.__cause__, ValidationError)  # see ``Call.read``
            may_repeat = self._repeatable and failure.status in _FOR_NOW and is_service
        else:
            may_repeat = not failure.is_final and (self._repeatable or not failure.was_sent)
        if not may_repeat or time.monotonic() + pause > self._deadline:
            raise failure
        self._longest = min(2 * self._longest, _LONGEST_PAUSE_SECONDS)
        return pause


# How the clients send requests.

RETRY_SECONDS = 30.0
TIMEOUT_SECONDS = 60.0  # an open stream sends something at least every 15 s; looking up data may take long


class _Client:
    """What both clients are made from.

    Args:
        base_url: URL of the service, for example ``http://127.0.0.1:8900``.
        api_key: API key; ``None`` for a service without authentication.
        verify: Whether to verify the service's certificate, or a CA bundle to verify it with.
        retry_seconds: How long to retry a request; 0: never.
        timeout: Seconds to wait for the service to send something.

    Attributes:
        retry_seconds: As given; what begins later takes what it is then.

    Raises:
        ValueError: An argument is invalid.
    """

    _http: Any
    _connect: type[Any]

    def __init__(
        self, base_url: str, *, api_key: str | None = None, verify: bool | str | Path = True,
        retry_seconds: float = RETRY_SECONDS, timeout: float = TIMEOUT_SECONDS,
    ) -> None:  # fmt: skip
        if not base_url.startswith(("http://", "https://")):
            raise ValueError(f"{base_url!r} is not the URL of a service; give one such as http://127.0.0.1:8900")
        try:
            httpx.URL(base_url)
        except httpx.InvalidURL as error:
            raise ValueError(f"{base_url!r} is not the URL of a service: {error}") from error
        headers = {"User-Agent": f"boost-client/{__version__}"}
        if api_key is not None:
            if not re.fullmatch("[!-~]+", api_key):
                raise ValueError("the API key contains characters that no key has; give it as it was shown")
            headers["Authorization"] = f"Bearer {api_key}"
        trusted: bool | ssl.SSLContext
        if not base_url.startswith("https://"):
            trusted = False  # otherwise httpx would load all system certificates, which takes longer than most requests
        elif isinstance(verify, bool):
            trusted = httpx.create_ssl_context(verify)
        else:
            try:
                trusted = ssl.create_default_context(cafile=verify)
            except OSError as error:  # includes ssl.SSLError
                raise ValueError(f"{verify} cannot be used as a CA bundle: {error}") from error
        self._base_url, self.retry_seconds = base_url, retry_seconds
        # httpx would read proxies from the environment in its own way.
        proxy = {"proxy": proxy_of(base_url), "trust_env": False}
        self._http = self._connect(base_url=base_url, timeout=timeout, headers=headers, verify=trusted, **proxy)


class StreamEndedEarly(ConnectionError):
    """The service ended a stream before the job had ended, as it does when it stops."""


BROKEN_OFF = (httpx.TransportError, ServiceUnreachable, StreamEndedEarly, ApiError)


class Blocking(_Client):
    """A client whose methods block."""

    _http: httpx.Client
    _connect = httpx.Client

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def perform(self, call: Call[_Answer]) -> _Answer:
        """Send a call; the named methods are easier to use."""
        patience = RetryPolicy(self._base_url, self.retry_seconds, call.repeatable)
        while True:
            try:
                return call.read(self._http.request(**call.request))
            except (httpx.TransportError, ApiError) as failure:
                time.sleep(patience.pause_after(failure))

    def listen(self, stream: Stream) -> Iterator[JobEvent]:
        """Receive a stream; reconnect when the connection is lost."""
        seconds, patience = self.retry_seconds, None
        job = get(path_of("jobs", stream.job_id), JobRecord)
        job_finished = self.perform(job).finished
        while True:
            try:
                with connect_sse(self._http, **stream.request) as source:
                    if not source.response.is_success:
                        source.response.read()
                        raise ApiError.of(source.response)
                    for sent in source.iter_sse():
                        patience = None
                        if event := stream.take(sent):
                            yield event
                # A connection opened before the job ended may have been closed by a service that was stopping.
                if job_finished or not stream.follow:
                    return
                job_finished = self.perform(job).finished
                if not job_finished:
                    raise StreamEndedEarly("the stream ended early")
            except BROKEN_OFF as failure:
                patience = patience or RetryPolicy(self._base_url, seconds)
                time.sleep(patience.pause_after(failure))


class Async(_Client):
    """A client whose methods are awaited."""

    _http: httpx.AsyncClient
    _connect = httpx.AsyncClient

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def perform(self, call: Call[_Answer]) -> _Answer:
        """Send a call; the named methods are easier to use."""
        patience = RetryPolicy(self._base_url, self.retry_seconds, call.repeatable)
        while True:
            try:
                return call.read(await self._http.request(**call.request))
            except (httpx.TransportError, ApiError) as failure:
                await asyncio.sleep(patience.pause_after(failure))

    async def listen(self, stream: Stream) -> AsyncGenerator[JobEvent, None]:
        """Receive a stream; reconnect when the connection is lost."""
        seconds, patience = self.retry_seconds, None
        job = get(path_of("jobs", stream.job_id), JobRecord)
        job_finished = (await self.perform(job)).finished
        while True:
            try:
                async with aconnect_sse(self._http, **stream.request) as source:
                    if not source.response.is_success:
                        await source.response.aread()
                        raise ApiError.of(source.response)
                    async for sent in source.aiter_sse():
                        patience = None
                        if event := stream.take(sent):
                            yield event
                # A connection opened before the job ended may have been closed by a service that was stopping.
                if job_finished or not stream.follow:
                    return
                job_finished = (await self.perform(job)).finished
                if not job_finished:
                    raise StreamEndedEarly("the stream ended early")
            except BROKEN_OFF as failure:
                patience = patience or RetryPolicy(self._base_url, seconds)
                await asyncio.sleep(patience.pause_after(failure))


# Operations as methods of both clients.


class Method(Generic[_Arguments, _Now, _Later]):
    """A method of both clients, from a function that describes its call or stream.

    It has that function's parameters, and returns what its call answers.
    """

    def __init__(self, describe: Callable[Concatenate[Any, _Arguments], Call[Any] | Stream]) -> None:
        self.__doc__ = describe.__doc__
        self._describe, self._signature, self._name = describe, inspect.signature(describe), ""

    def __set_name__(self, owner: type, name: str) -> None:
        self._name = name

    @overload
    def __get__(self, client: None, owner: type) -> Callable[..., Any]: ...
    @overload
    def __get__(self, client: Blocking, owner: type) -> Callable[_Arguments, _Now]: ...
    @overload
    def __get__(self, client: Async, owner: type) -> Callable[_Arguments, _Later]: ...
    def __get__(self, client: Any, owner: type) -> Any:
        @functools.wraps(self._describe, assigned=("__module__", "__doc__"), updated=())
        def call(client: Any, *args: Any, **kwargs: Any) -> Any:
            try:
                self._signature.bind_partial(client, *args, **kwargs)  # a wrong name is reported before what is missing
                self._signature.bind(client, *args, **kwargs)
            except TypeError as error:  # the description's own would name the function that describes
                raise TypeError(f"{call.__qualname__}() {error}") from None
            described = self._describe(client, *args, **kwargs)
            return client.listen(described) if isinstance(described, Stream) else client.perform(described)

        call.__name__, call.__qualname__ = self._name, f"{owner.__name__}.{self._name}"
        first, *others = self._signature.parameters.values()
        answer: Any = AsyncGenerator[JobEvent, None] if issubclass(owner, Async) else Iterator[JobEvent]
        if self._signature.return_annotation is not Stream:
            (answer,) = get_args(self._signature.return_annotation)  # of Call
        parameters = [first.replace(name="self", annotation=first.empty), *others]
        vars(call)["__signature__"] = self._signature.replace(parameters=parameters, return_annotation=answer)
        return call if client is None else MethodType(call, client)


def operation(
    describe: Callable[Concatenate[Any, _Arguments], Call[_Answer]],
) -> Method[_Arguments, _Answer, Coroutine[Any, Any, _Answer]]:
    """Turn a function that describes a call into a method of both clients."""
    return Method(describe)


def stream(
    describe: Callable[Concatenate[Any, _Arguments], Stream],
) -> Method[_Arguments, Iterator[JobEvent], AsyncGenerator[JobEvent, None]]:
    """Turn a function that describes a stream into a method of both clients."""
    return Method(describe)


def request(
    method: str,
    place: Callable[Concatenate[Any, _Arguments], tuple[object, ...]],
    part: str,
    answer: type[_Answer],
    doc: str,
    *,
    repeatable: bool = True,
) -> Method[_Arguments, _Answer, Coroutine[Any, Any, _Answer]]:
    """Return a method of both clients for a request that has no parameters but those of its path.

    Args:
        method: The HTTP method.
        place: Returns the parts of the path of what the request is about; it has the method's parameters.
        part: What of that, such as ``plan`` of a job; empty: itself.
        answer: Type of the answer.
        doc: The method's docstring.
        repeatable: See ``Call``.
    """

    @functools.wraps(place)
    def describe(client: Any, /, *args: _Arguments.args, **kwargs: _Arguments.kwargs) -> Call[_Answer]:
        path = path_of(*place(client, *args, **kwargs), *filter(None, [part]))
        return Call(method, path, answer, repeatable=repeatable)

    describe.__doc__ = doc
    returns: Any = Call[answer]  # type: ignore[valid-type]  # as other descriptions are annotated
    vars(describe)["__signature__"] = inspect.signature(place).replace(return_annotation=returns)
    return operation(describe)
