"""Who a request comes from, and what they may do."""

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, Field, StringConstraints

DEFAULT_TENANT = "default"  # owns everything while authentication is off

TenantName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]


class Scope(StrEnum):
    """What a key is good for; each includes the one before."""

    READ = "read"  # look at the own tenant's jobs, at queues and nodes
    SUBMIT = "submit"  # also create and change the own tenant's jobs
    ADMIN = "admin"  # operate the service: all tenants' jobs, keys, quotas, queues, the audit log

    def includes(self, other: "Scope") -> bool:
        """Whether whoever has this scope may do what the other one is for."""
        order = list(Scope)
        return order.index(self) >= order.index(other)


class Identity(BaseModel):
    """Who the service takes the sender of a request for."""

    tenant: str = Field(description="The tenant it belongs to.")
    name: str = Field(description="Name of the key; anonymous while authentication is off.")
    scopes: list[Scope] = Field(description="Scopes of the key.")
