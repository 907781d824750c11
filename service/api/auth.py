"""Who may call a route: each has one of ``Reader``, ``Submitter`` and ``Admin`` as a parameter or dependency.

    @router.get("/v1/things")
    def things(principal: Reader) -> ThingList: ...

By then the gate (``service.api.middleware.auth``) has identified the sender.
"""

from typing import Annotated, Any

from fastapi import Depends, Request

from service.accounts.principal import Principal
from service.api.exceptions import Forbidden, Unauthenticated
from service.models.identity import Scope

COOKIE = "boost_key"
HOW_TO_AUTHENTICATE = "send an API key as Authorization: Bearer boost_…; the service's operator can create one"

# How a request may carry a key, for OpenAPI. FastAPI's own classes for this would read the headers once more.
_SCHEMES: dict[str, dict[str, str]] = {
    "bearer": {"type": "http", "description": "An API key.", "scheme": "bearer"},
    "cookie": {
        "type": "apiKey", "description": "An API key, set by POST /session for browsers.", "in": "cookie",
        "name": COOKIE,
    },
}  # fmt: skip


def needs_key(path: str) -> bool:
    """Whether every request to a path, or to a route, needs a key."""
    return path == "/metrics" or path == "/v1" or path.startswith("/v1/")


def document_security(openapi: dict[str, Any]) -> None:
    """State in an OpenAPI document which routes need a key, and how to send it."""
    openapi["components"]["securitySchemes"] = _SCHEMES
    for path, operations in openapi["paths"].items():
        if needs_key(path):
            for operation in operations.values():
                operation["security"] = [{scheme: []} for scheme in _SCHEMES]


class Requires:
    """A dependency that admits principals with a scope, and returns the principal.

    Args:
        scope: The scope.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    async def __call__(self, request: Request) -> Principal:
        """Return the sender of the request.

        Raises:
            Unauthenticated: The sender is unknown.
            Forbidden: The sender may not do this.
        """
        principal: Principal | None = getattr(request.state, "principal", None)  # set by the gate
        if principal is None:
            raise Unauthenticated(f"this request needs an API key; {HOW_TO_AUTHENTICATE}")
        if not principal.may(self.scope):
            own = ", ".join(principal.scopes)
            raise Forbidden(f"this needs a key with the scope {self.scope}; {principal.name!r} has {own}")
        return principal


Reader = Annotated[Principal, Depends(Requires(Scope.READ))]
Submitter = Annotated[Principal, Depends(Requires(Scope.SUBMIT))]
Admin = Annotated[Principal, Depends(Requires(Scope.ADMIN))]
