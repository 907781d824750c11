"""Bodies of requests, and of the answer to a request that was only tried."""

from typing import Any

from pydantic import BaseModel, Field

from boost_core.config import JobSpec
from boost_core.config.base import Config
from boost_core.plan.report import Plan
from service.models.identity import Scope, TenantName
from service.models.moment import Moment


class CloneRequest(Config):
    """A new job made of another one's spec."""

    changes: dict[str, Any] = Field(
        {},
        description="What is different, as a JSON merge patch (RFC 7396) on the spec: fields given replace those "
        "there, null takes a field out, so that its default holds.",
    )
    from_checkpoint: bool = Field(
        False, description="Begin with the weights of the other job's newest checkpoint instead of from scratch."
    )


class DryRun(BaseModel):
    """What a submission would come to."""

    spec: JobSpec = Field(description="The job as it would be recorded, with every default.")
    plan: Plan = Field(description="What it would take.")


class KeyRequest(Config):
    """A key to be made."""

    name: str = Field(min_length=1, max_length=100, description="What it is called in records and in the audit log.")
    tenant: TenantName = Field(description="The tenant that it acts for; made if there is none of that name.")
    scopes: list[Scope] = Field(min_length=1, max_length=len(Scope), description="What it is good for.")
    expires_at: Moment | None = Field(None, description="From when on it is refused; null: never.")


class QueueSettings(Config):
    """What an operator may say about a queue; the whole of it, so what is left out gets its default."""

    description: str = Field("", max_length=500, description="What it is for.")
    gpus: float | None = Field(None, ge=0, description="The most GPUs that its jobs may hold; null: no limit.")
    cpus: float | None = Field(None, ge=0, description="The most CPUs that its jobs may hold; null: no limit.")


class TenantSettings(Config):
    """A tenant's quota; the whole of it, so what is left out gets its default."""

    gpus: float | None = Field(None, ge=0, description="The most GPUs that its jobs may hold; null: no limit.")
    cpus: float | None = Field(None, ge=0, description="The most CPUs that its jobs may hold; null: no limit.")
