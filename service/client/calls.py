"""A request described apart from how it is carried, and operations of the API as methods of both clients.

An operation is a function that describes its request. As a method of ``Client`` it answers; as a method of
``AsyncClient`` it is awaited. ``Stream`` likewise becomes an iterator or an asynchronous one.
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
    """One request and what its answer is read as.

    Attributes:
        method: The HTTP method.
        path: Path on the service.
        answer: What the body of the answer is; ``None`` where it has none.
        params: Query; what is ``None`` is left out.
        body: Sent as JSON.
        headers: Sent along.
        repeatable: Whether sending it twice comes to the same as sending it once.
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
        """The arguments of httpx's ``request``."""
        query = {name: value for name, value in self.params.items() if value is not None}
        body = {} if self.body is None else {"json": self.body}
        return {"method": self.method, "url": self.path, "params": query, "headers": dict(self.headers)} | body

    def read(self, response: httpx.Response) -> _Answer:
        """What the service has answered.

        Raises:
            ApiError: It has refused, or it is not a BOOST service.
        """
        if response.is_error:
            raise ApiError.of(response)
        try:
            return TypeAdapter(self.answer).validate_json(response.content or b"null")
        except ValidationError as error:
            raise ApiError(HTTPStatus.BAD_GATEWAY, f"{response.url} is not a BOOST service: {error}", []) from error


@dataclass(frozen=True)
class Stream:
    """A job's events, or some of them, one after the other.

    Attributes:
        job_id: The job.
        part: What is streamed of it.
        after: The last event already seen.
        follow: Whether to go on until the job has come to its end.
        params: More of the query.
    """

    job_id: str
    part: str
    after: int
    follow: bool
    params: Mapping[str, Any] = field(default_factory=dict)


def get(path: str, answer: type[_Answer], **params: Any) -> Call[_Answer]:
    """A request that only looks."""
    return Call("GET", path, answer, params=params, repeatable=True)


def create(path: str, answer: type[_Answer], body: Any, key: str | None) -> Call[_Answer]:
    """A request that makes something, once in however many tries: each carries the same key.

    Args:
        path: Where it is made.
        answer: What the answer is.
        body: What it is made of.
        key: The key; a new one if none is given.

    Raises:
        ValueError: The key cannot be one.
    """
    if key is not None and not _KEY.fullmatch(key):
        raise ValueError(f"{key!r} cannot be an Idempotency-Key; give 1 to 255 visible ASCII characters")
    headers = {"Idempotency-Key": key or secrets.token_urlsafe(24)}
    return Call("POST", path, answer, body=body, headers=headers, repeatable=True)


def plain(body: BaseModel | Mapping[str, Any]) -> Any:
    """A body as JSON has it; a mapping is left for the service to check."""
    return body.model_dump(mode="json") if isinstance(body, BaseModel) else body


def path_of(*parts: object) -> str:
    """A path under ``/v1``; what is in a part stays in that part."""
    return "/v1/" + "/".join(quote(str(part), safe="") for part in parts)


class Blocking(ABC):
    """A client whose methods answer."""

    @abstractmethod
    def perform(self, call: Call[_Answer]) -> _Answer:
        """Carry out a call."""

    @abstractmethod
    def listen(self, stream: Stream) -> Iterator[JobEvent]:
        """Receive a stream."""


class Awaiting(ABC):
    """A client whose methods are awaited."""

    @abstractmethod
    async def perform(self, call: Call[_Answer]) -> _Answer:
        """Carry out a call."""

    @abstractmethod
    def listen(self, stream: Stream) -> AsyncGenerator[JobEvent, None]:
        """Receive a stream."""


class operation(Generic[_Arguments, _Answer]):  # noqa: N801  # a decorator
    """Makes a method of both clients of a function that describes a call."""

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
    """Makes a method of both clients of a function that describes a stream."""

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
