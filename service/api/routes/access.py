"""Who calls: API keys, the audit log, the identity of a request's sender, and a browser's session."""

from http import HTTPStatus
from typing import Annotated

from anyio import to_thread
from fastapi import APIRouter, Query, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from service.api.auth import COOKIE, Admin, Reader, refuse_foreign_page
from service.api.deps import ContextDep
from service.api.errors import BODY_REFUSED, CONFLICT, GUARDED, INVALID, NOT_FOUND, Unauthenticated, problem_responses
from service.api.limits import network_of
from service.api.requests import IdempotentDep, StrictRoute
from service.models.access import AuditPage, Identity, KeyList, NewKey, TenantName
from service.models.jobs import KeyRequest
from service.security.network import is_seen_over_tls

router = APIRouter(prefix="/v1", route_class=StrictRoute, responses=GUARDED)


@router.post("/keys", tags=["keys"], status_code=HTTPStatus.CREATED, responses=CONFLICT | BODY_REFUSED)
def create(key: KeyRequest, _who: Admin, context: ContextDep, request: IdempotentDep) -> NewKey:
    """Create a key. Only this response shows it; repeating the request returns the same key with a new secret."""
    return context.keys.create(key.name, key.tenant, key.scopes, key.expires_at, request)


@router.get("/keys", tags=["keys"])
def list_keys(_who: Admin, context: ContextDep) -> KeyList:
    """List all keys, newest first."""
    return KeyList(keys=list(context.keys.list()))


@router.delete("/keys/{key_id}", tags=["keys"], status_code=HTTPStatus.NO_CONTENT, responses=NOT_FOUND)
def revoke(key_id: str, _who: Admin, context: ContextDep) -> None:
    """Revoke a key. This cannot be undone, and takes effect everywhere within seconds."""
    context.keys.revoke(key_id)


class AuditQuery(BaseModel):
    """Which entries to list."""

    model_config = ConfigDict(extra="forbid")

    tenant: TenantName | None = Field(None, description="Only of this tenant.")
    # The largest id is what a database can compare.
    after: int = Field(0, ge=0, le=2**63 - 1, description="next_after of the previous page.")
    limit: int = Field(100, ge=1, le=500, description="Maximum number of results.")


@router.get("/audit", tags=["audit"], responses=INVALID)
def list_entries(query: Annotated[AuditQuery, Query()], _who: Admin, context: ContextDep) -> AuditPage:
    """List the audit log, oldest entries first."""
    return context.audit.page(query.tenant, query.after, query.limit)


@router.get("/whoami", tags=["identity"])
async def whoami(who: Reader) -> Identity:
    """Show the key's tenant, name and scopes."""
    return Identity(tenant=who.tenant, name=who.name, scopes=list(who.scopes))


# A browser's session: its API key in a cookie that scripts cannot read.

_REFUSED = problem_responses(403, 429)
session_router = APIRouter(prefix="/session", tags=["identity"], route_class=StrictRoute, responses=_REFUSED)


class SessionRequest(BaseModel):
    """A request to open a session."""

    model_config = ConfigDict(extra="forbid")

    key: str = Field(max_length=200, description="An API key.")


@session_router.post("", status_code=HTTPStatus.NO_CONTENT, responses=problem_responses(401, 413, 422, 503))
async def open_session(session: SessionRequest, request: Request, response: Response, context: ContextDep) -> None:
    """Sign the browser in: it sends the key with every request until it is closed."""
    refuse_foreign_page(request)
    principal = await to_thread.run_sync(context.keys.verify, session.key, limiter=context.limits.key_threads)
    if principal is None:
        context.limits.failures.count(network_of(request.client.host if request.client else None))
        raise Unauthenticated("invalid API key: wrong, expired or revoked; ask the service's operator")
    request.state.principal = principal
    secure = is_seen_over_tls(context.settings)
    response.set_cookie(COOKIE, session.key, httponly=True, samesite="strict", secure=secure)


@session_router.delete("", status_code=HTTPStatus.NO_CONTENT)
async def close_session(request: Request, response: Response, context: ContextDep) -> None:
    """Sign the browser out."""
    refuse_foreign_page(request)
    if (key := request.cookies.get(COOKIE)) is not None:  # for the audit log, which has nothing of nobody
        # As known: whoever signs out waits for no database.
        request.state.principal = context.keys.verify(key, cached_only=True)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict", secure=is_seen_over_tls(context.settings))
