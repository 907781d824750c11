"""Request bodies, and the answer to a dry run."""

from typing import Any

from pydantic import BaseModel, Field, model_validator

from boost_core.config import JobSpec
from boost_core.config.base import Config
from boost_core.config.reading import Moment
from boost_core.plan.machine import Fitted
from boost_core.plan.report import Plan
from boost_core.plan.resolve import ChosenLayouts
from service.models.identity import Scope, TenantName
from service.models.profiles import StoredProfile


class CloneRequest(Config):
    """A request for a new job made from another one's spec."""

    changes: dict[str, Any] = Field(
        {},
        description="Changes to the spec as a JSON merge patch (RFC 7396): a field replaces the original's, null "
        "removes it so that its default applies.",
    )
    from_checkpoint: bool = Field(
        False,
        description="Continue from the original's newest checkpoint, with all that is in it "
        "(checkpoint.continue_from); training.steps has to be above its step.",
    )
    from_weights: bool = Field(
        False,
        description="Start at step 0 from the weights of the original's newest checkpoint (checkpoint.weights_from). "
        "With neither, the clone starts where its spec says: from scratch unless the original or changes name a "
        "checkpoint.",
    )

    @model_validator(mode="after")
    def _one_origin(self) -> "CloneRequest":
        if self.from_checkpoint and self.from_weights:
            raise ValueError("from_checkpoint continues and from_weights starts at step 0; set one of them")
        return self


class DryRun(BaseModel):
    """The result of a dry run."""

    spec: JobSpec = Field(description="The job as it would be recorded, with all defaults filled in.")
    plan: Plan = Field(description="Its plan.")
    chosen: ChosenLayouts | None = Field(
        None, description="The layouts of a job with layouts=auto, and why; null for others."
    )
    profile: StoredProfile | None = Field(
        None, description="Stored profile used for the predicted times; null if there is none."
    )
    fitted: Fitted | None = Field(
        None, description="Measured times of jobs relative to the predictions, used to correct these; null without any."
    )


class KeyRequest(Config):
    """A request for a new key."""

    name: str = Field(min_length=1, max_length=100, description="Its name in job records and the audit log.")
    tenant: TenantName = Field(description="The tenant it acts for; created if it does not exist.")
    scopes: list[Scope] = Field(min_length=1, max_length=len(Scope), description="Scopes of the key.")
    expires_at: Moment | None = Field(None, description="Expiry; null: never.")


class QueueSettings(Config):
    """An operator's settings of a queue. They replace all previous ones: a missing field gets its default."""

    description: str = Field("", max_length=500, description="What it is for.")
    gpus: float | None = Field(None, ge=0, description="Maximum number of GPUs that its jobs may hold; null: no limit.")
    cpus: float | None = Field(None, ge=0, description="Maximum number of CPUs that its jobs may hold; null: no limit.")


class TenantSettings(Config):
    """A tenant's quota. It replaces the previous one: a missing field gets its default."""

    gpus: float | None = Field(None, ge=0, description="Maximum number of GPUs that its jobs may hold; null: no limit.")
    cpus: float | None = Field(None, ge=0, description="Maximum number of CPUs that its jobs may hold; null: no limit.")
