"""The progress of a job's trackers, as the API shows it."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, Field


class TrackerState(BaseModel):
    """The progress of one of a job's trackers."""

    kind: Literal["tensorboard", "mlflow", "wandb"]
    place: str = Field(description="Where the job is tracked: a folder of event files, or the URL of a run.")
    behind: int = Field(description="Events not sent to it yet; capped at 10,000.")
    failures: int = Field(description="Number of failed deliveries so far.")
    failing_since: datetime | None = Field(description="When it began to fail; null if it works.")
    problem: str | None = Field(description="Why the last delivery failed; null if it did not.")


class TrackerList(BaseModel):
    """A job's trackers."""

    trackers: list[TrackerState]
