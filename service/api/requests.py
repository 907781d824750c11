"""Strict reading of request bodies: limited in size, and valid JSON only. Idempotency keys. Answers as JSON or CSV."""

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Callable, Coroutine
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, NoReturn

from fastapi import Depends, Header, HTTPException, Response
from fastapi import Request as HttpRequest
from fastapi.routing import APIRoute

from boost_core.config.base import is_too_deep
from service.accounts.keys import Principal
from service.jobs.model import Request
from service.models.jobs import AnswerFormat, Tabular

MOST_BODY_BYTES = 2**20
MOST_KEYLESS_BYTES = 4 * 2**10  # of a body that came without a key
MOST_TARGET_BYTES = 16 * 2**10  # of the path and the query
MOST_HEADER_BYTES = 16 * 2**10  # of the names and values of all headers
_MOST_DIGITS = 1000  # Python reads 4300 at most
# To report each value of a megabyte as wrong would keep the event loop busy for seconds. A sweep of jobs with 10,000
# paths to train on and 10,000 to validate on has 38,000 values at most, and with 200 steered sections 11,000 fields.
_MOST_VALUES, _MOST_FIELDS = 40_000, 12_000
_STRING = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*"?', re.DOTALL)  # to the end if it is not closed: never searched twice

CSV: dict[int | str, dict[str, Any]] = {HTTPStatus.OK: {"content": {"text/csv": {}}}}  # for OpenAPI


def in_format(answer: Tabular, media_type: AnswerFormat) -> Response:
    """Return an answer as JSON or CSV."""
    if media_type == "csv":
        return Response(answer.as_csv(), media_type="text/csv")
    return Response(answer.model_dump_json(), media_type="application/json")


class StrictRequest(HttpRequest):
    """A request whose body is limited in size and whose numbers are finite."""

    async def body(self) -> bytes:
        """The body.

        Raises:
            HTTPException: It is larger than ``MOST_BODY_BYTES``, or ``MOST_KEYLESS_BYTES`` without a key.
        """
        if not hasattr(self, "_body"):
            announced = self.headers.get("content-length", "")
            most = MOST_BODY_BYTES if getattr(self.state, "principal", None) else MOST_KEYLESS_BYTES
            if announced.isdecimal() and int(announced) > most:
                raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)  # before it arrives
            received = bytearray()
            async for chunk in self.stream():
                received += chunk
                if len(received) > most:
                    raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            self._body = bytes(received)
        return self._body

    async def json(self) -> Any:
        """The body as JSON.

        Raises:
            json.JSONDecodeError: It is not JSON, or ambiguous; the message explains it to users.
        """
        body = await self.body()
        try:
            text = body.decode("utf-8-sig")
            if _is_too_much(text) and _is_too_much(_STRING.sub("", text)):
                raise ValueError(f"has more than {_MOST_VALUES} values or {_MOST_FIELDS} fields; send fewer")
            content = _loads(text)
            if is_too_deep(content):
                raise RecursionError
            json.dumps(content, ensure_ascii=False).encode()  # fails on halves of surrogate pairs
            return content
        except json.JSONDecodeError as error:
            raise json.JSONDecodeError(f"is not JSON: {error.msg} at character {error.pos}", "", 0) from error
        except UnicodeDecodeError as error:
            raise json.JSONDecodeError(f"is not UTF-8 from byte {error.start} on; send it in UTF-8", "", 0) from error
        except UnicodeEncodeError as error:
            problem = "contains lone surrogates, which are not text; send whole characters"
            raise json.JSONDecodeError(problem, "", 0) from error
        except RecursionError as error:
            raise json.JSONDecodeError("is nested too deeply; no field is nested that deeply", "", 0) from error
        except ValueError as error:
            raise json.JSONDecodeError(str(error), "", 0) from error


def _is_too_much(text: str) -> bool:
    """Whether JSON has too many commas and brackets, of which there is one for each value, or colons, as for fields."""
    return sum(map(text.count, ",[{")) > _MOST_VALUES or text.count(":") > _MOST_FIELDS


class StrictRoute(APIRoute):
    """A route that reads its requests strictly."""

    def get_route_handler(self) -> Callable[[HttpRequest], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, given a strict request."""
        handle = super().get_route_handler()

        async def handle_strictly(request: HttpRequest) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly


def _no_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    content = dict(pairs)
    if len(content) < len(pairs):
        ((twice, _),) = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"duplicate field {twice[:100]!r}; remove one")
    return content


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a valid JSON number; use a finite value")


def _bounded(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"the number {digits[:40]}… is too long; no field takes one of {len(digits)} digits")
    return int(digits)


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits[:40]} is too large")
    return number


_loads = partial(
    json.loads, object_pairs_hook=_no_doubles, parse_constant=_no_constant, parse_float=_finite, parse_int=_bounded
)

_SAFE_RETRY = "Makes it safe to retry the request: the same key with the same body takes effect once."
_Key = Annotated[str | None, Header(alias="Idempotency-Key", pattern=r"^[\x21-\x7e]{1,255}$", description=_SAFE_RETRY)]


async def _idempotent(http: HttpRequest, key: _Key = None) -> Request | None:
    """The request's identity, if it carries an Idempotency-Key."""
    if key is None:
        return None
    who: Principal = http.state.principal  # admitted by the route
    content = hashlib.sha256(f"{http.method} {http.url.path}\n".encode() + await http.body())
    return Request(who.tenant, key, content.hexdigest())


IdempotentDep = Annotated[Request | None, Depends(_idempotent)]
