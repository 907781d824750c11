"""Tenants and their quotas, as the API shows them to operators."""

from pydantic import BaseModel, Field


class Tenant(BaseModel):
    """A tenant: its quota and usage."""

    name: str = Field(description="Its name.")
    gpus: float | None = Field(description="Maximum number of GPUs that its jobs may hold at a time; null: no limit.")
    cpus: float | None = Field(description="Maximum number of CPUs that its jobs may hold at a time; null: no limit.")
    used_gpus: float = Field(description="GPUs that its jobs hold now.")
    used_cpus: float = Field(description="CPUs that its jobs hold now.")
    jobs: dict[str, int] = Field(description="Number of its jobs by state.")


class TenantList(BaseModel):
    """All tenants."""

    tenants: list[Tenant] = Field(description="Ordered by name.")
