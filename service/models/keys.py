"""API keys, as the API shows them. The key itself is shown once, when it is made."""

from datetime import datetime

from pydantic import BaseModel, Field

from service.models.identity import Scope


class _KeyFacts(BaseModel):
    id: str = Field(description="Names the key without giving it away; the second part of the key.")
    name: str = Field(description="What it is called in records and in the audit log.")
    tenant: str = Field(description="The tenant that it acts for.")
    scopes: list[Scope] = Field(description="What it is good for.")
    created_at: datetime = Field(description="When it was made.")
    expires_at: datetime | None = Field(description="From when on it is refused; null: never.")


class Key(_KeyFacts):
    """A key, without its secret, which the service does not have."""

    revoked_at: datetime | None = Field(None, description="Since when it is refused; null: it is not revoked.")
    last_used_at: datetime | None = Field(None, description="When it was last used, to about a minute; null: never.")


class NewKey(_KeyFacts):
    """A key that has just been made."""

    key: str = Field(description="The key itself, boost_<id>_<secret>. It cannot be shown again.")


class KeyList(BaseModel):
    """All keys."""

    keys: list[Key] = Field(description="The newest first.")
