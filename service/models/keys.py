"""API keys, as the API shows them. The key itself is shown only once, when it is created."""

from datetime import datetime

from pydantic import BaseModel, Field

from service.models.identity import Scope


class _KeyFacts(BaseModel):
    id: str = Field(description="ID of the key: its second part, which is not secret.")
    name: str = Field(description="Its name in job records and the audit log.")
    tenant: str = Field(description="The tenant it acts for.")
    scopes: list[Scope] = Field(description="Scopes of the key.")
    created_at: datetime = Field(description="When it was created.")
    expires_at: datetime | None = Field(description="Expiry; null: never.")


class Key(_KeyFacts):
    """A key, without its secret, which the service does not have."""

    revoked_at: datetime | None = Field(None, description="When it was revoked; null: not revoked.")
    last_used_at: datetime | None = Field(
        None, description="When it was last used, accurate to about a minute; null: never."
    )


class NewKey(_KeyFacts):
    """A key that has just been created."""

    key: str = Field(description="The key, boost_<id>_<secret>. It is shown only once.")


class KeyList(BaseModel):
    """All keys."""

    keys: list[Key] = Field(description="Newest first.")
