"""The gate: finds out who sends a request, before any of its body is read, and turns away what must not come in.

It stands between the error handlers and the routes, so that what it raises is answered as a problem. Everything under
``/v1`` needs a key there already; which scope, the route says (``service.api.auth``).
"""

import re
from http import HTTPStatus

from fastapi import HTTPException, Request
from fastapi.concurrency import run_in_threadpool
from starlette.types import ASGIApp, Receive, Scope, Send

from service.accounts.keys import KeyStore
from service.accounts.principal import ANONYMOUS, Principal
from service.api.auth import COOKIE, HOW_TO_AUTHENTICATE, needs_key
from service.api.exceptions import Forbidden, Unauthenticated
from service.api.middleware.access_log import holds_key
from service.api.middleware.limits import RateLimits
from service.api.requests import MOST_HEADER_BYTES, MOST_TARGET_BYTES
from service.security.network import is_loopback
from service.settings import Settings

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})

_PROBES = frozenset({"/healthz", "/readyz"})  # an orchestrator must hear from these, whoever floods the rest
_PORT = re.compile(r":\d*$")
_SAME_ORIGIN = frozenset({"same-origin", "none"})  # values of Sec-Fetch-Site; none: its user asked the browser


class Gate:
    """An ASGI middleware that lets requests in.

    Args:
        app: What is behind it.
        keys: The keys that are known.
        limits: How much each may ask.
        settings: The operator's settings.
    """

    def __init__(self, app: ASGIApp, keys: KeyStore, limits: RateLimits, settings: Settings) -> None:
        self._app, self._keys, self._limits, self._settings = app, keys, limits, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let a request in.

        Raises:
            Unauthenticated: It needs a key, and has no valid one.
            Forbidden: It comes from a page of another origin, or for another host.
            HTTPException: Its path and query, or its headers, are too long.
            RateLimited: Its sender has sent too many.
        """
        if scope["type"] == "http":
            request = Request(scope)
            refuse_oversized(request)
            if self._settings.auth:
                request.state.principal = await self._admit(request)
            else:
                request.state.principal = self._admit_local(request)
        await self._app(scope, receive, send)

    def _admit_local(self, request: Request) -> Principal:
        """With authentication off, only programs and pages of this machine are let in, as one user with all rights."""
        host = request.headers.get("host", "")
        if not is_loopback(_PORT.sub("", host)):
            # A page of a name that has been made to mean this machine would get here like one of its own.
            raise Forbidden(
                f"without authentication the service answers as localhost or 127.0.0.1 alone, not as {host[:100]!r}"
            )
        refuse_foreign_page(request, self._settings.cors_origins)
        return ANONYMOUS

    async def _admit(self, request: Request) -> Principal | None:
        if holds_key(request.scope["query_string"].decode("latin-1")):
            raise Unauthenticated(
                "there is an API key in the query, where logs and histories keep it: revoke it, and send another as "
                "Authorization: Bearer boost_…"
            )
        path, address = request.scope["path"], request.client.host if request.client else None
        if path in _PROBES:
            return None
        if not needs_key(path):
            self._limits.count_address(address)
            return None
        presented, by_cookie = _presented(request)
        request.state.came_with_key = presented is not None
        if presented is None:
            self._limits.count_address(address)
            raise Unauthenticated(f"this needs an API key; {HOW_TO_AUTHENTICATE}")
        principal = self._keys.recall(presented) or await run_in_threadpool(self._keys.verify, presented)
        if principal is None:
            self._limits.count_failure(address)
            raise Unauthenticated(f"invalid API key: wrong, expired or revoked; {HOW_TO_AUTHENTICATE}")
        request.state.principal = principal  # known from here on, even if this request is turned away
        self._limits.count(principal)
        if by_cookie:
            self._refuse_unless_own_page(request)
        return principal

    def _refuse_unless_own_page(self, request: Request) -> None:
        """A browser sends the cookie along with whatever any page makes it send; only the service's own may write."""
        if request.method not in SAFE_METHODS and not _from_own_page(request):
            raise Forbidden(
                "with a cookie, only the service's own page may change things; programs send Authorization: Bearer"
            )


def refuse_foreign_page(request: Request, allowed: tuple[str, ...] = ()) -> None:
    """Refuse what a browser says that another origin's page makes it send, if it would change something.

    Args:
        request: The request.
        allowed: Origins that may.

    Raises:
        Forbidden: Such a page sends it.
    """
    says_whence = "origin" in request.headers or "sec-fetch-site" in request.headers
    if request.method in SAFE_METHODS or not says_whence or _from_own_page(request):
        return
    if request.headers.get("origin") not in allowed:
        raise Forbidden("from a browser, only the service's own page may change things")


def refuse_oversized(request: Request) -> None:
    """Refuse a path and query, or headers, that nobody needs; the server bounds both together.

    Raises:
        HTTPException: They are longer than ``MOST_TARGET_BYTES``, or ``MOST_HEADER_BYTES``.
    """
    if len(request.scope.get("raw_path") or b"") + len(request.scope["query_string"]) > MOST_TARGET_BYTES:
        raise HTTPException(HTTPStatus.REQUEST_URI_TOO_LONG)
    if sum(len(name) + len(value) for name, value in request.headers.raw) > MOST_HEADER_BYTES:
        raise HTTPException(HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE)


def _presented(request: Request) -> tuple[str | None, bool]:
    """The key that a request comes with, and whether in its cookie."""
    header = request.headers.get("authorization")
    if header is None:
        return request.cookies.get(COOKIE), True
    scheme, _, key = header.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else "", False


def _from_own_page(request: Request) -> bool:
    # Browsers that do not tell the first tell the second with all that changes something.
    own = f"{request.url.scheme}://{request.headers.get('host', '')}"
    return request.headers.get("sec-fetch-site") in _SAME_ORIGIN or request.headers.get("origin") == own
