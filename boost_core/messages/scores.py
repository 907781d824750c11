"""A checkpoint's scores on tasks, as the trainer's side hands them to whoever stores them."""

from typing import Annotated

from pydantic import Field

from boost_core.config.base import Config

_Word = Annotated[str, Field(min_length=1, max_length=200)]
_Number = Annotated[float, Field(allow_inf_nan=False)]


class Score(Config):
    """One metric of one task."""

    task: _Word = Field(description="The task's name.")
    metric: _Word = Field(description="Metric and, after a comma, the filter applied to the answers, if any.")
    value: _Number | None = Field(description="Null if it is not finite.")
    stderr: _Number | None = Field(None, description="Standard error of the value; null if the task has none.")
    higher_is_better: bool | None = Field(None, description="Null if the task does not say.")
    samples: int = Field(ge=0, le=10**12, description="Number of documents evaluated.")
    version: str | None = Field(None, max_length=100, description="Version of the task, as given in its file.")
    task_hash: str = Field(
        pattern="^[0-9a-f]{16}$", description="Hash of all documents, prompts and answers; equal for equal questions."
    )


class Scores(Config):
    """The results of evaluating a checkpoint on some tasks."""

    step: int = Field(ge=0, le=10**15, description="Step of the checkpoint.")
    evaluated_by: _Word = Field(description="Package and version, such as lm-eval 0.4.13.")
    scores: tuple[Score, ...] = Field(min_length=1, description="One score per task and metric.")
