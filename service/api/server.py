"""The server that the API runs in."""

import socket

import uvicorn
from fastapi import FastAPI

from service.api.access_log import keep_values_out
from service.api.deps import Context
from service.settings import Settings

MOST_HEADER_BYTES = 32 * 2**10  # of a request's line and its headers together


class ApiServer(uvicorn.Server):
    """uvicorn that ends open event streams when it stops; it would wait for them for ever.

    Args:
        app: What ``service.api.app.create_app`` gives.
        settings: The operator's settings: where to listen, with which certificate, and which proxies to believe.
    """

    def __init__(self, app: FastAPI, settings: Settings) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=settings.host,
                port=settings.port,
                http="h11",  # the one that limits headers
                h11_max_incomplete_event_size=MOST_HEADER_BYTES,
                ssl_certfile=settings.tls_cert,
                ssl_keyfile=settings.tls_key,
                proxy_headers=bool(settings.trusted_proxies),
                forwarded_allow_ips=list(settings.trusted_proxies),
                server_header=False,
                log_config=None,  # its lines look like all others of this process
            )
        )
        keep_values_out()
        self._context: Context = app.state.context

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop: no new connections, streams end, other requests are answered."""
        self._context.stopping.set()
        await super().shutdown(sockets)
