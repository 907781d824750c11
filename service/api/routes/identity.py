"""The identity of a request's sender."""

from fastapi import APIRouter

from service.api.auth import Reader
from service.models.identity import Identity

router = APIRouter(prefix="/v1", tags=["identity"])


@router.get("/whoami")
async def whoami(who: Reader) -> Identity:
    """Show the key's tenant, name and scopes."""
    return Identity(tenant=who.tenant, name=who.name, scopes=list(who.scopes))
