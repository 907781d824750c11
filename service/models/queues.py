"""Queues, as the API shows them."""

from typing import Annotated

from pydantic import BaseModel, Field, StringConstraints

DEFAULT_QUEUE = "default"

QueueName = Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9-]{0,62}$")]


class Queue(BaseModel):
    """A queue: its limits, and what its jobs hold of them."""

    name: str = Field(description="Jobs name it in their spec.")
    description: str = Field(description="What it is for.")
    gpus: float | None = Field(description="The most GPUs that its jobs may hold at a time; null: no limit.")
    cpus: float | None = Field(description="The most CPUs that its jobs may hold at a time; null: no limit.")
    used_gpus: float = Field(description="GPUs that its jobs hold now.")
    used_cpus: float = Field(description="CPUs that its jobs hold now.")
    jobs: dict[str, int] = Field(description="How many of its jobs are in each state.")


class QueueList(BaseModel):
    """All queues."""

    queues: list[Queue] = Field(description="By name.")
