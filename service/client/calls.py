"""Requests described independently of how they are sent, and API operations as methods of both clients.

An operation is a function that describes its request. As a method of ``Client`` it returns the answer; as a method of
``AsyncClient`` it is awaited. A ``Stream`` likewise becomes an iterator or an asynchronous iterator.
"""

import functools
import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Coroutine, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from types import MethodType
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, overload
from urllib.parse import quote

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from service.client.errors import ApiError
from service.jobs.model import JobEvent

_KEY = re.compile(r"[!-~]{1,255}")

_Answer = TypeVar("_Answer")
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
        if response.is_error:
            raise ApiError.of(response)
        try:
            return TypeAdapter(self.answer).validate_json(response.content or b"null")
        except ValidationError as error:
            raise ApiError(HTTPStatus.BAD_GATEWAY, f"{response.url} is not a BOOST service: {error}", []) from error


@dataclass(frozen=True)
class Stream:
    """A stream of a job's events, or of some of them.

    Attributes:
        job_id: The job.
        part: What is streamed: ``events`` or ``logs``.
        after: The last event already seen.
        follow: Whether to continue until the job ends.
        params: Further query parameters.
    """

    job_id: str
    part: str
    after: int
    follow: bool
    params: Mapping[str, Any] = field(default_factory=dict)


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
    if key is not None and not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} cannot be an Idempotency-Key; give 1 to 255 visible ASCII characters")
    headers = {"Idempotency-Key": key or secrets.token_urlsafe(24)}
    return Call("POST", path, answer, body=body, headers=headers, repeatable=True)


def plain(body: BaseModel | Mapping[str, Any]) -> Any:
    """Return a body as JSON-compatible data; a mapping is left for the service to validate."""
    return body.model_dump(mode="json") if isinstance(body, BaseModel) else body


def path_of(*parts: object) -> str:
    """Return a path under ``/v1``, with each part quoted."""
    return "/v1/" + "/".join(quote(str(part), safe="") for part in parts)


class Blocking(ABC):
    """A client whose methods block."""

    @abstractmethod
    def perform(self, call: Call[_Answer]) -> _Answer:
        """Send a call and return its answer."""

    @abstractmethod
    def listen(self, stream: Stream) -> Iterator[JobEvent]:
        """Receive a stream."""


class Awaiting(ABC):
    """A client whose methods are awaited."""

    @abstractmethod
    async def perform(self, call: Call[_Answer]) -> _Answer:
        """Send a call and return its answer."""

    @abstractmethod
    def listen(self, stream: Stream) -> AsyncGenerator[JobEvent, None]:
        """Receive a stream."""


class operation(Generic[_Arguments, _Answer]):  # noqa: N801  # a decorator
    """Turns a function that describes a call into a method of both clients."""

    def __init__(self, describe: Callable[Concatenate[Any, _Arguments], Call[_Answer]]) -> None:
        self.__doc__ = describe.__doc__
        self._describe = describe

    @overload
    def __get__(self, client: None, owner: type) -> Self: ...
    @overload
    def __get__(self, client: Blocking, owner: type) -> Callable[_Arguments, _Answer]: ...
    @overload
    def __get__(self, client: Awaiting, owner: type) -> Callable[_Arguments, Coroutine[Any, Any, _Answer]]: ...
    def __get__(self, client: Any, owner: type) -> Any:
        return self if client is None else _method(self._describe, client, client.perform)


class stream(Generic[_Arguments]):  # noqa: N801  # a decorator
    """Turns a function that describes a stream into a method of both clients."""

    def __init__(self, describe: Callable[Concatenate[Any, _Arguments], Stream]) -> None:
        self.__doc__ = describe.__doc__
        self._describe = describe

    @overload
    def __get__(self, client: None, owner: type) -> Self: ...
    @overload
    def __get__(self, client: Blocking, owner: type) -> Callable[_Arguments, Iterator[JobEvent]]: ...
    @overload
    def __get__(self, client: Awaiting, owner: type) -> Callable[_Arguments, AsyncGenerator[JobEvent, None]]: ...
    def __get__(self, client: Any, owner: type) -> Any:
        return self if client is None else _method(self._describe, client, client.listen)


def _method(describe: Callable[..., Any], client: object, carry: Callable[[Any], Any]) -> MethodType:
    @functools.wraps(describe)
    def call(self: object, *args: Any, **kwargs: Any) -> Any:
        return carry(describe(self, *args, **kwargs))

    return MethodType(call, client)
