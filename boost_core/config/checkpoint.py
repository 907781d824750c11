"""Where checkpoints are stored."""

from typing import Annotated, Any

from pydantic import AfterValidator, Field, field_validator

from boost_core.config.base import Config, Count, Location
from boost_core.config.parsing.urls import refuse_unserved

StorageUrl = Annotated[Location, AfterValidator(refuse_unserved)]


class CheckpointConfig(Config):
    """Where and how often to save."""

    url: StorageUrl | None = Field(
        None, description="Folder for the checkpoints: a path, file:// or s3://. The service adds the job id."
    )
    every_steps: Count = Field(100, description="Save every this many steps, and at the end.")
    keep_last: Count | None = Field(
        None, description="Keep this many of the newest checkpoints and remove older ones; default: keep all."
    )
    keep_every: Count | None = Field(
        None, description="Of the checkpoints that keep_last would remove, keep those at multiples of this many steps."
    )
    final_save_timeout_seconds: float = Field(
        86_400,
        ge=1,
        le=30 * 86_400,
        description="How long a job that has finished its last step waits for its store to accept the last "
        "checkpoint before it fails.",
    )
    resume_from: StorageUrl | None = Field(
        None, description="Folder of another job's checkpoints to start from if this job has none of its own."
    )

    @field_validator("keep_every")
    @classmethod
    def _keep_every_belongs_to_keep_last(cls, value: int | None, info: Any) -> int | None:
        if value is not None and info.data.get("keep_last") is None:
            raise ValueError("without keep_last all checkpoints are kept; set keep_last, too, or leave keep_every out")
        return value
