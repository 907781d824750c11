"""How far trackers are with a job, as the API shows it."""

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, Field


class TrackerState(BaseModel):
    """How far a tracker is with a job."""

    kind: Literal["tensorboard", "mlflow", "wandb"]
    place: str = Field(description="Where it keeps the job: a folder of event files, or the address of a run.")
    behind: int = Field(description="Events that it has not been told yet; 10,000 or more are 10,000.")
    failures: int = Field(description="How often telling it has failed so far.")
    failing_since: datetime | None = Field(description="Since when it fails; null if it does not.")
    problem: str | None = Field(description="Why it failed last time; null if it did not.")


class TrackerList(BaseModel):
    """A job's trackers."""

    trackers: list[TrackerState]
