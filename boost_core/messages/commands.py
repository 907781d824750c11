"""What a training gang can be asked to do besides training. Commands are told apart by ``kind``."""

from typing import Annotated, Literal

from pydantic import Field

from boost_core.config.base import Config


class Drill(Config):
    """One fault, injected once."""

    kind: Literal["kill_rank", "hang_rank", "drop_node", "delay_rank", "fill_store"] = Field(
        description="kill_rank: the rank's process is killed. hang_rank: it is stopped and never resumes. drop_node: "
        "all of the job's processes on the rank's node are killed at once, and the job stays off that node for a "
        "while. delay_rank: the rank is late in each of several steps, as if behind a slow link. fill_store: "
        "checkpoints cannot be written for a while, as if the store were full.",
    )
    rank: int = Field(0, ge=0, description="The rank to inject it into; for drop_node, any rank on the node.")
    at_step: int | None = Field(None, ge=0, description="Inject after this step (null: immediately).")
    steps: int = Field(10, ge=1, le=100_000, description="For delay_rank: the number of steps.")
    seconds: float = Field(
        10.0,
        gt=0,
        le=3600,
        description="For delay_rank: the delay per step; for drop_node and fill_store: the duration.",
    )


class Profile(Config):
    """A one-time trace of some whole steps of some ranks."""

    kind: Literal["profile"] = "profile"
    steps: int = Field(3, ge=1, le=20, description="Number of steps to trace, starting with the next.")
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (0,), min_length=1, max_length=64, description="Ranks to trace; each writes its own trace."
    )


WorkerCommand = Drill | Profile
