"""Where checkpoints go."""

from typing import Annotated

from pydantic import AfterValidator, Field

from boost_core.config.base import Config
from boost_core.config.urls import refuse_unknown_scheme

StorageUrl = Annotated[str, AfterValidator(refuse_unknown_scheme)]


class CheckpointConfig(Config):
    """Where and how often to save."""

    url: StorageUrl | None = Field(
        None, description="Folder for the checkpoints: a path, file:// or s3://. The service adds the job id."
    )
    every_steps: int = Field(100, ge=1, description="Save this often, and at the end.")
    resume_from: StorageUrl | None = Field(
        None, description="Folder of another job's checkpoints to start from when this job has none of its own."
    )
