"""A browser's session: its API key in a cookie that scripts cannot read."""

from http import HTTPStatus

from fastapi import APIRouter, Request, Response
from fastapi.concurrency import run_in_threadpool
from pydantic import BaseModel, ConfigDict, Field

from service.api.auth import COOKIE
from service.api.deps import ContextDep
from service.api.errors import problem_responses
from service.api.exceptions import Unauthenticated
from service.api.middleware.auth import refuse_foreign_page
from service.api.requests import StrictRoute
from service.security.network import is_seen_over_tls

router = APIRouter(
    prefix="/session",
    tags=["identity"],
    route_class=StrictRoute,
    responses=problem_responses(HTTPStatus.FORBIDDEN, HTTPStatus.TOO_MANY_REQUESTS),
)


class SessionRequest(BaseModel):
    """A request to open a session."""

    model_config = ConfigDict(extra="forbid")

    key: str = Field(max_length=200, description="An API key.")


@router.post(
    "",
    status_code=HTTPStatus.NO_CONTENT,
    responses=problem_responses(
        HTTPStatus.UNAUTHORIZED,
        HTTPStatus.REQUEST_ENTITY_TOO_LARGE,
        HTTPStatus.UNPROCESSABLE_ENTITY,
        HTTPStatus.SERVICE_UNAVAILABLE,
    ),
)
async def open_session(wanted: SessionRequest, request: Request, response: Response, context: ContextDep) -> None:
    """Sign the browser in: it sends the key with every request until it is closed."""
    refuse_foreign_page(request)
    principal = await run_in_threadpool(context.keys.verify, wanted.key)
    if principal is None:
        context.limits.count_failure(request.client.host if request.client else None)
        raise Unauthenticated("invalid API key: wrong, expired or revoked; ask the service's operator")
    request.state.principal = principal
    secure = is_seen_over_tls(context.settings)
    response.set_cookie(COOKIE, wanted.key, httponly=True, samesite="strict", secure=secure)


@router.delete("", status_code=HTTPStatus.NO_CONTENT)
async def close_session(request: Request, response: Response, context: ContextDep) -> None:
    """Sign the browser out."""
    refuse_foreign_page(request)
    secure = is_seen_over_tls(context.settings)
    response.delete_cookie(COOKIE, httponly=True, samesite="strict", secure=secure)
