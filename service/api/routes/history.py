"""A job's metrics over its steps."""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session

from service.api.deps import ContextDep, JobDep
from service.api.errors import problem_responses
from service.jobs.history import history
from service.models.metrics import MetricsHistory

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_LAST_STEP = 2**31 - 1  # what a database counts with


class HistoryQuery(BaseModel):
    """Range and resolution of the curves."""

    model_config = ConfigDict(extra="forbid")

    points: int = Field(500, ge=1, le=5000, description="Maximum number of points per curve.")
    from_step: int = Field(1, ge=0, le=_LAST_STEP, description="The first step.")
    to_step: int | None = Field(None, ge=0, le=_LAST_STEP, description="The last step; default: the newest.")


@router.get("/{job_id}/metrics", responses=problem_responses(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY))
def metrics(job: JobDep, context: ContextDep, query: Annotated[HistoryQuery, Query()]) -> MetricsHistory:
    """A job's loss, throughput and other metrics over its steps, downsampled to a number of points."""
    newest = job.goodput.highest_step
    last = newest if query.to_step is None else min(query.to_step, newest)
    with Session(context.store.engine) as session:
        return history(session, job.id, query.from_step, max(last, query.from_step), query.points)
