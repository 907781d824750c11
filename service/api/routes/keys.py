"""API keys: create, list, revoke."""

from http import HTTPStatus

from fastapi import APIRouter

from service.api.auth import Admin
from service.api.deps import ContextDep
from service.api.errors import problem_responses
from service.api.idempotency import IdempotentDep
from service.api.requests import StrictRoute
from service.models.keys import KeyList, NewKey
from service.models.requests import KeyRequest

router = APIRouter(prefix="/v1/keys", tags=["keys"], route_class=StrictRoute)


@router.post(
    "",
    status_code=HTTPStatus.CREATED,
    responses=problem_responses(
        HTTPStatus.CONFLICT, HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY
    ),
)
def create(wanted: KeyRequest, _who: Admin, context: ContextDep, request: IdempotentDep) -> NewKey:
    """Create a key. Only this response shows it; repeating the request returns the same key with a new secret."""
    return context.keys.create(wanted.name, wanted.tenant, wanted.scopes, wanted.expires_at, request)


@router.get("")
def list_keys(_who: Admin, context: ContextDep) -> KeyList:
    """List all keys, newest first."""
    return KeyList(keys=list(context.keys.list()))


@router.delete(
    "/{key_id}",
    status_code=HTTPStatus.NO_CONTENT,
    responses=problem_responses(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
def revoke(key_id: str, _who: Admin, context: ContextDep) -> None:
    """Revoke a key. This cannot be undone, and takes effect everywhere within seconds."""
    context.keys.revoke(key_id)
