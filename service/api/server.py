"""The server that the API runs in."""

import asyncio
import socket
from contextlib import suppress
from typing import Any

import uvicorn
from fastapi import FastAPI
from uvicorn.protocols.http.h11_impl import H11Protocol

from service.api.deps import Context
from service.api.middleware.access_log import keep_values_out
from service.api.middleware.connections import (
    Listener,
    Loop,
    Notes,
    Protocol,
    Watch,
    is_out_of_descriptors,
    most_connections,
)
from service.settings import Settings

GRACE_SECONDS = 20  # for pending requests to be answered, and responses read, when the server stops
_LOOK_SECONDS = 1.0
MOST_HEADER_BYTES = 32 * 2**10  # of a request's line and its headers together


class ApiServer(uvicorn.Server):
    """uvicorn with bounded connections, which ends open event streams when it stops.

    Args:
        app: The app, from ``service.api.app.create_app``.
        settings: The operator's settings: where to listen, with which certificate, and which proxies to trust.
    """

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                loop=f"{Loop.__module__}:{Loop.__name__}",
                http=Protocol,  # on h11, the implementation that limits headers
                ws="none",
                h11_max_incomplete_event_size=MOST_HEADER_BYTES,
                ssl_certfile=settings.tls_cert,
                ssl_keyfile=settings.tls_key,
                proxy_headers=bool(settings.trusted_proxies),
                forwarded_allow_ips=list(settings.trusted_proxies),
                server_header=False,
                timeout_graceful_shutdown=GRACE_SECONDS,
                log_config=None,  # its lines look like all others from this process
            )
        )
        keep_values_out()
        self._settings = settings
        self._context: Context = app.state.context
        self._notes = Notes()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start listening.

        Args:
            sockets: Sockets to listen on, which the server closes; ``None``: listen where the settings say.
        """
        settings, most = self._settings, most_connections(self._settings.connections)
        listeners: list[socket.socket] = [
            Listener(each, most, settings.trusted_proxies, settings.tls_cert is not None, self._notes)
            for each in sockets or [listen(settings.host, settings.port)]
        ]
        asyncio.get_running_loop().set_exception_handler(self._note)
        await super().startup(listeners)
        self._watching = asyncio.create_task(self._watch())

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop: accept no new connections, end streams, and answer other requests within the grace period."""
        self._context.stopping.set()
        self._context.stores.stop()
        await super().shutdown(sockets)
        self._context.reads.close()
        self._watching.cancel()
        with suppress(asyncio.CancelledError):
            await self._watching

    async def _watch(self) -> None:
        watch, now = Watch(self._notes), asyncio.get_running_loop().time
        while True:
            watch.look([each for each in self.server_state.connections if isinstance(each, H11Protocol)], now())
            self._notes.write(now())
            await asyncio.sleep(_LOOK_SECONDS)

    def _note(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        """Log errors of the loop; it retries every second to accept connections without a free descriptor."""
        if is_out_of_descriptors(context.get("exception")):
            self._notes.add("attempts to accept one failed, because this process has no file descriptor left")
        else:
            loop.default_exception_handler(context)


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on an address.

    Raises:
        OSError: The address cannot be used.
    """
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
