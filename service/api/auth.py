"""Who may call a route: each has one of ``Reader``, ``Submitter`` and ``Admin`` as a parameter or dependency.

    @router.get("/v1/things")
    def things(principal: Reader) -> ThingList: ...

Who sends a request has been found out at the gate (``service.api.auth_middleware``) by then.
"""

from typing import Annotated

from fastapi import Depends, Request
from fastapi.security import APIKeyCookie, HTTPBearer
from fastapi.security.http import HTTPAuthorizationCredentials

from service.accounts.principal import Principal
from service.api.refusals import Forbidden, Unauthenticated
from service.models.identity import Scope

__all__ = ["COOKIE", "HOW_TO_AUTHENTICATE", "Admin", "Principal", "Reader", "Requires", "Submitter", "principal_of"]

COOKIE = "boost_key"
HOW_TO_AUTHENTICATE = "send an API key as Authorization: Bearer boost_…; whoever operates the service makes them"

# They are declared for OpenAPI; the gate has read them.
_BEARER = HTTPBearer(scheme_name="bearer", description="An API key.", auto_error=False)
_COOKIE = APIKeyCookie(
    name=COOKIE, scheme_name="cookie", description="An API key, set by POST /session for browsers.", auto_error=False
)


def principal_of(request: Request) -> Principal | None:
    """Who sends a request; ``None`` if the gate found that out to be nobody."""
    principal: Principal | None = getattr(request.state, "principal", None)
    return principal


class Requires:
    """A dependency that lets in who has a scope, and gives who that is.

    Args:
        scope: The scope.
    """

    def __init__(self, scope: Scope) -> None:
        self.scope = scope

    async def __call__(
        self,
        request: Request,
        _bearer: Annotated[HTTPAuthorizationCredentials | None, Depends(_BEARER)],
        _cookie: Annotated[str | None, Depends(_COOKIE)],
    ) -> Principal:
        """Who sends the request.

        Raises:
            Unauthenticated: Nobody that the service knows.
            Forbidden: Somebody who may not do this.
        """
        principal = principal_of(request)
        if principal is None:
            raise Unauthenticated(f"this needs an API key; {HOW_TO_AUTHENTICATE}")
        if not principal.may(self.scope):
            own = ", ".join(principal.scopes)
            raise Forbidden(f"this needs a key with the scope {self.scope}; {principal.name!r} has {own}")
        return principal


Reader = Annotated[Principal, Depends(Requires(Scope.READ))]
Submitter = Annotated[Principal, Depends(Requires(Scope.SUBMIT))]
Admin = Annotated[Principal, Depends(Requires(Scope.ADMIN))]
