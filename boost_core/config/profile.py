"""A look into a job's steps: what torch's profiler sees of them, in the job's store."""

from typing import Annotated, Literal

from pydantic import Field

from boost_core.config.base import Config


class Profile(Config):
    """A trace of some whole steps of some ranks, once."""

    kind: Literal["profile"] = "profile"
    steps: int = Field(3, ge=1, le=20, description="How many steps, from the next one on.")
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (0,), min_length=1, max_length=64, description="Of which ranks; each writes a trace of its own."
    )
