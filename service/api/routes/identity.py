"""Who the service takes the sender of a request for."""

from fastapi import APIRouter

from service.api.auth import Reader
from service.models.identity import Identity

router = APIRouter(prefix="/v1", tags=["identity"])


@router.get("/whoami")
async def whoami(who: Reader) -> Identity:
    """Who you are to the service, and what you may do."""
    return Identity(tenant=who.tenant, name=who.name, scopes=list(who.scopes))
