"""Where checkpoints are stored."""

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

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
    store_wait_seconds: float = Field(
        10,
        ge=0,
        le=3600,
        description="How long, at most, steps wait for the store to take one checkpoint when the next copy of the "
        "state is due. After that training goes on, and the newest state is written once the store has taken the "
        "checkpoint or failed to.",
    )
    continue_from: StorageUrl | None = Field(
        None,
        description="Folder of another job's checkpoints, or of one of them, that this job continues from while it "
        "has none of its own: with the weights, the optimizer's state, the step and the place in the data of the "
        "newest one. training.steps has to be above its step.",
    )
    weights_from: StorageUrl | None = Field(
        None,
        description="Folder of another job's checkpoints, or of one of them, whose newest weights this job starts "
        "from while it has none of its own: at step 0, with a new optimizer, schedule and place in the data. "
        "model.rope_theta, model.rope_scaling and model.sliding_window may differ.",
    )

    @property
    def origin(self) -> tuple[Literal["continue_from", "weights_from"], str] | None:
        """Which of the two fields names another job's checkpoints, and their URL; ``None`` if neither does."""
        if self.continue_from is not None:
            return "continue_from", self.continue_from
        return None if self.weights_from is None else ("weights_from", self.weights_from)

    @model_validator(mode="before")
    @classmethod
    def _former_name(cls, value: Any) -> Any:
        """Read ``resume_from``, as ``continue_from`` was called in the records of earlier versions."""
        if isinstance(value, dict) and "resume_from" in value and "continue_from" not in value:
            return {"continue_from" if name == "resume_from" else name: each for name, each in value.items()}
        return value

    @field_validator("weights_from")
    @classmethod
    def _one_origin(cls, value: str | None, info: Any) -> str | None:
        if value is not None and info.data.get("continue_from") is not None:
            raise ValueError("the job is also to continue from continue_from; leave one of them out")
        return value

    @field_validator("keep_every")
    @classmethod
    def _keep_every_belongs_to_keep_last(cls, value: int | None, info: Any) -> int | None:
        if value is not None and info.data.get("keep_last") is None:
            raise ValueError("without keep_last all checkpoints are kept; set keep_last, too, or leave keep_every out")
        return value
