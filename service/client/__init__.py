"""A typed client of the REST API, blocking (``Client``) and for asyncio (``AsyncClient``).

Every operation is described once, in ``api.Api``; the two clients differ only in how they send a request.
"""

from service.client.api import AsyncClient, Client
from service.client.calls import ApiError, ServiceUnreachable

__all__ = ["ApiError", "AsyncClient", "Client", "ServiceUnreachable"]
