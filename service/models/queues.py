"""Queues, as the API shows them."""

from typing import Annotated

from pydantic import BaseModel, Field, StringConstraints

DEFAULT_QUEUE = "default"

QueueName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]


class Queue(BaseModel):
    """A queue: its limits and their usage."""

    name: str = Field(description="Its name, as used in job files.")
    description: str = Field(description="What it is for.")
    gpus: float | None = Field(description="Maximum number of GPUs that its jobs may hold at a time; null: no limit.")
    cpus: float | None = Field(description="Maximum number of CPUs that its jobs may hold at a time; null: no limit.")
    used_gpus: float = Field(description="GPUs that its jobs hold now.")
    used_cpus: float = Field(description="CPUs that its jobs hold now.")
    jobs: dict[str, int] = Field(description="Number of its jobs by state.")


class QueueList(BaseModel):
    """All queues."""

    queues: list[Queue] = Field(description="Ordered by name.")
