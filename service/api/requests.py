"""Reading request bodies strictly: not too much, and only what JSON allows."""

import json
import math
from collections.abc import Callable, Coroutine
from http import HTTPStatus
from typing import Any, NoReturn

from fastapi import HTTPException, Request, Response
from fastapi.routing import APIRoute

MOST_BODY_BYTES = 2**20


class StrictRequest(Request):
    """A request whose body is limited in size and whose numbers are finite."""

    async def body(self) -> bytes:
        """The body.

        Raises:
            HTTPException: It is larger than ``MOST_BODY_BYTES``.
        """
        if not hasattr(self, "_body"):
            received = bytearray()
            async for chunk in self.stream():
                received += chunk
                if len(received) > MOST_BODY_BYTES:
                    raise HTTPException(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            self._body = bytes(received)
        return self._body

    async def json(self) -> Any:
        """The body as JSON.

        Raises:
            json.JSONDecodeError: It is something else.
        """
        body = await self.body()
        try:
            content = json.loads(body, parse_constant=_refuse_constant, parse_float=_finite)
            json.dumps(content, ensure_ascii=False).encode()  # fails on halves of surrogate pairs, which are no text
        except json.JSONDecodeError:
            raise
        except (ValueError, RecursionError) as error:
            raise json.JSONDecodeError(str(error), "", 0) from error
        return content


class StrictRoute(APIRoute):
    """A route that reads its requests strictly."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """FastAPI's handler, given a strict request."""
        handle = super().get_route_handler()

        async def handle_strictly(request: Request) -> Response:
            return await handle(StrictRequest(request.scope, request.receive))

        return handle_strictly


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON number; give a finite one")


def _finite(digits: str) -> float:
    number = float(digits)
    if math.isinf(number):
        raise ValueError(f"the number {digits[:40]} is too large")
    return number
