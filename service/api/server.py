"""The server that the API runs in."""

import socket

import uvicorn
from fastapi import FastAPI

from service.api.deps import Context


class ApiServer(uvicorn.Server):
    """uvicorn that ends open event streams when it stops; it would wait for them for ever.

    Args:
        app: What ``service.api.app.create_app`` gives.
        host: Address to listen on.
        port: Port to listen on.
    """

    def __init__(self, app: FastAPI, host: str, port: int) -> None:
        super().__init__(uvicorn.Config(app, host=host, port=port))
        self._context: Context = app.state.context

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Stop: no new connections, streams end, other requests are answered."""
        self._context.stopping.set()
        await super().shutdown(sockets)
