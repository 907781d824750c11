"""HEAD wherever there is GET: the same response without the body."""

import re

from starlette.types import ASGIApp, Message, Receive, Scope, Send

_STREAM = re.compile(r"/v1/jobs/[^/]+/(events|logs)")  # these may never end, so they have no HEAD


def is_stream(path: str) -> bool:
    """Whether GET returns a stream of events.

    Args:
        path: The path of a request, or of a route.
    """
    return _STREAM.fullmatch(path) is not None


class Heads:
    """An ASGI middleware that answers HEAD like GET.

    Args:
        app: The app behind it, which only sees GET.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http" or scope["method"] != "HEAD" or is_stream(scope["path"]):
            await self._app(scope, receive, send)
            return

        async def send_without_body(message: Message) -> None:
            await send({**message, "body": b""} if message["type"] == "http.response.body" else message)

        await self._app({**scope, "method": "GET"}, receive, send_without_body)
