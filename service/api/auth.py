"""Who a request comes from, and who may call a route.

The gate identifies the sender of a request before its body is read, and refuses requests that may not enter. It stands
between the error handlers and the routes, so that its exceptions are answered as problems, and requires a key for
everything under ``/v1``. The routes then require scopes: each has one of ``Reader``, ``Submitter`` and ``Admin`` as a
parameter or dependency.

    @router.get("/v1/things")
    def things(principal: Reader) -> ThingList: ...
"""

import logging
import re
from dataclasses import dataclass
from http import HTTPStatus
from typing import Annotated
from urllib.parse import unquote

from anyio import to_thread
from fastapi import Depends, HTTPException, Request
from starlette.types import ASGIApp, Receive, Send
from starlette.types import Scope as AsgiScope

from service.accounts.keys import ANONYMOUS, KeyStore, Principal
from service.api.errors import AmbiguousHeader, Forbidden, Unauthenticated
from service.api.limits import RateLimits, network_of
from service.api.requests import MOST_HEADER_BYTES, MOST_TARGET_BYTES
from service.models.access import Scope
from service.security.network import is_loopback
from service.security.redaction import REDACTED
from service.settings import Settings

COOKIE = "boost_key"
HOW_TO_AUTHENTICATE = "send an API key as Authorization: Bearer boost_…; the service's operator can create one"

# How a request may carry a key, for OpenAPI. FastAPI's own classes for this would read the headers once more.
_BEARER = {"type": "http", "description": "An API key.", "scheme": "bearer"}
_COOKIE = {"type": "apiKey", "description": "An API key, set by POST /session for browsers."}
SECURITY_SCHEMES = {"bearer": _BEARER, "cookie": _COOKIE | {"in": "cookie", "name": COOKIE}}


def needs_key(path: str) -> bool:
    """Whether every request to a path, or to a route, needs a key."""
    return path == "/metrics" or path == "/v1" or path.startswith("/v1/")


@dataclass(frozen=True)
class Requires:
    """A dependency that admits principals with a scope, and returns the principal.

    Attributes:
        scope: The scope.
    """

    scope: Scope

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


# Keeps values that people put into URLs by mistake out of the access log.

_KEY = re.compile(r"boost_[0-9a-z]+_[\w-]+")
_NAME = re.compile(r"[a-z_]{1,32}")  # of a parameter


def without_values(record: logging.LogRecord) -> bool:
    """Remove values from a line of uvicorn's access log: it shows a path and the parameter names of its query."""
    match record.args:
        case (client, method, str(target), *rest):
            path, mark, query = target.partition("?")
            names = (part.partition("=")[0] for part in query.split("&"))
            shown = "&".join(f"{name if _NAME.fullmatch(name) else REDACTED}={REDACTED}" for name in names)
            target = _KEY.sub(REDACTED, path) + (f"?{shown}" if mark else "")
            record.args = (client, method, target, *rest)
    return True


SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

_PROBES = frozenset({"/healthz", "/readyz"})  # must answer an orchestrator even while the rest is flooded
# Headers that a request has once, as far as the API reads them.
_SINGLE = ("Authorization", "Content-Type", "Idempotency-Key", "If-Match", "Last-Event-ID", "Origin")
_SAME_ORIGIN = frozenset({"same-origin", "none"})  # values of Sec-Fetch-Site; none: the user's own navigation


@dataclass(frozen=True)
class Gate:
    """An ASGI middleware that admits requests.

    Attributes:
        app: The app behind it.
        keys: The API keys.
        limits: Rate limits.
        settings: The operator's settings.
    """

    app: ASGIApp
    keys: KeyStore
    limits: RateLimits
    settings: Settings

    async def __call__(self, scope: AsgiScope, receive: Receive, send: Send) -> None:
        """Admit a request.

        Raises:
            Unauthenticated: It needs a key and carries no valid one.
            Forbidden: It comes from a page of another origin, or names another host.
            AmbiguousHeader: It gives a header several values where the API would read one.
            HTTPException: Its path and query, or its headers, are too long.
            RateLimited: Its sender has sent too many.
        """
        request = Request(scope)
        # The server limits the sum of both.
        if len(request.scope.get("raw_path") or b"") + len(request.scope["query_string"]) > MOST_TARGET_BYTES:
            raise HTTPException(HTTPStatus.REQUEST_URI_TOO_LONG)
        if sum(len(name) + len(value) for name, value in request.headers.raw) > MOST_HEADER_BYTES:
            raise HTTPException(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)

        # Of a header with several values where one would be read, a proxy might read another one.
        names = [name for name, _ in request.headers.raw]
        if len(set(names)) < len(names):
            for name in _SINGLE:
                if len(set(request.headers.getlist(name))) > 1:
                    raise AmbiguousHeader(f"the request has several {name} headers, and they differ; send one")

        if not self.settings.auth:
            # Only this machine's programs and pages, as one user with all rights. DNS rebinding: a page under a name
            # that resolves to this machine would pass as one of its own.
            host = request.headers.get("host", "")
            if not is_loopback(re.sub(r":\d*$", "", host)):
                problem = "without authentication, only requests to localhost or 127.0.0.1 are answered"
                raise Forbidden(f"{problem}, not to {host[:100]!r}")
            refuse_foreign_page(request, self.settings.cors_origins)
            request.state.principal = ANONYMOUS
            await self.app(scope, receive, send)
            return

        path, address = request.scope["path"], request.client.host if request.client else None
        if _KEY.search(unquote(request.scope["query_string"].decode("latin-1"))):
            self.limits.failures.count(network_of(address))
            problem = "there is an API key in the query, which logs and histories keep"
            raise Unauthenticated(f"{problem}: revoke it, and send another one as Authorization: Bearer boost_…")
        if not needs_key(path):
            if path not in _PROBES:
                self.limits.addresses.count(network_of(address))
            request.state.principal = None
            await self.app(scope, receive, send)
            return

        header = request.headers.get("authorization")
        if header is None:
            presented = request.cookies.get(COOKIE)
        else:
            scheme, _, key = header.partition(" ")
            presented = key.strip() if scheme.lower() == "bearer" else ""
        request.state.came_with_key = presented is not None
        if presented is None:
            self.limits.addresses.count(network_of(address))
            raise Unauthenticated(f"this request needs an API key; {HOW_TO_AUTHENTICATE}")
        verify, threads = self.keys.verify, self.limits.key_threads
        principal = verify(presented, cached_only=True) or await to_thread.run_sync(verify, presented, limiter=threads)
        if principal is None:
            self.limits.failures.count(network_of(address))
            raise Unauthenticated(f"invalid API key: wrong, expired or revoked; {HOW_TO_AUTHENTICATE}")
        request.state.principal = principal  # known from here on, even if this request is refused
        self.limits.keys.count(str(principal.key_id))
        # Browsers send the cookie with requests from any page; only the service's own page may change things.
        if header is None and request.method not in SAFE_METHODS and not _from_own_page(request):
            problem = "with a cookie, only the service's own page may change things"
            raise Forbidden(f"{problem}; programs send Authorization: Bearer")
        await self.app(scope, receive, send)


def refuse_foreign_page(request: Request, allowed: tuple[str, ...] = ()) -> None:
    """Refuse a request that would change something if the browser says that another origin's page sends it.

    Args:
        request: The request.
        allowed: Other origins that may send it.

    Raises:
        Forbidden: A page of another origin sends it.
    """
    says_whence = "origin" in request.headers or "sec-fetch-site" in request.headers
    if request.method in SAFE_METHODS or not says_whence or _from_own_page(request):
        return
    if request.headers.get("origin") not in allowed:
        raise Forbidden("in a browser, only the service's own page may change things")


def _from_own_page(request: Request) -> bool:
    # Browsers without Sec-Fetch-Site send Origin with all requests that change something.
    own = f"{request.url.scheme}://{request.headers.get('host', '')}"
    return request.headers.get("sec-fetch-site") in _SAME_ORIGIN or request.headers.get("origin") == own
