"""Evaluations of a job's checkpoints on tasks, as the API shows them."""

from datetime import datetime

from pydantic import BaseModel, ConfigDict, Field

from boost_core.messages import Scores


class JobEvaluation(Scores):
    """An evaluation of one of a job's checkpoints."""

    model_config = ConfigDict(extra="ignore")

    time: datetime = Field(description="When it was recorded.")


class EvaluationList(BaseModel):
    """A job's evaluations on tasks."""

    evaluations: list[JobEvaluation] = Field(description="The newest 50, newest first.")
