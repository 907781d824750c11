"""A typed client of the REST API, for programs that wait (``Client``) and for asyncio (``AsyncClient``).

Every operation is described once, in the modules of this package that are named after what they are about; the two
clients differ in how they carry a request and nothing else.
"""

from service.client.asynchronous import AsyncClient
from service.client.blocking import Client
from service.client.errors import ApiError, ServiceUnreachable

__all__ = ["ApiError", "AsyncClient", "Client", "ServiceUnreachable"]
