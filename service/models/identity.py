"""Who a request comes from, and what its sender may do."""

from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, Field, StringConstraints

DEFAULT_TENANT = "default"  # owns everything while authentication is off

TenantName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,31}$")]


class Scope(StrEnum):
    """The scope of a key; each includes the ones before it."""

    READ = "read"  # see the tenant's own jobs, queues and nodes
    SUBMIT = "submit"  # also create and change the tenant's own jobs
    ADMIN = "admin"  # operate the service: all tenants' jobs, keys, quotas, queues, the audit log

    def includes(self, other: "Scope") -> bool:
        """Whether this scope includes the permissions of another one."""
        order = list(Scope)
        return order.index(self) >= order.index(other)


class Identity(BaseModel):
    """The identity that the service sees in a request."""

    tenant: str = Field(description="Tenant of the key.")
    name: str = Field(description="Name of the key; anonymous while authentication is off.")
    scopes: list[Scope] = Field(description="Scopes of the key.")
