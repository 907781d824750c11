"""Jobs: submit, list, look at, cancel."""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field

from boost_core.config import JobSpec
from boost_core.config.sources import UnfitData, check_data
from service.api.deps import ContextDep, JobDep
from service.api.errors import InvalidJob, problem_responses
from service.api.requests import StrictRoute
from service.jobs.model import JobPage, JobRecord
from service.jobs.states import JobState
from service.problems import FieldError

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=StrictRoute)


class JobQuery(BaseModel):
    """Which jobs to list."""

    model_config = ConfigDict(extra="forbid")

    state: list[JobState] = Field([], description="Only jobs in one of these states; all if none is given.")
    limit: int = Field(100, ge=1, le=500, description="At most so many.")
    cursor: str | None = Field(None, max_length=32, description="next_cursor of the page before.")


@router.post(
    "",
    status_code=HTTPStatus.CREATED,
    responses=problem_responses(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY),
)
def submit(spec: JobSpec, context: ContextDep, response: Response) -> JobRecord:
    """Submit a training job. It is QUEUED, and runs when its turn comes and its workers can be placed."""
    _refuse_absent_data(spec)
    record = context.store.create(spec, context.settings.checkpoint_root)
    response.headers["Location"] = f"{router.prefix}/{record.id}"
    return record


@router.get("", responses=problem_responses(HTTPStatus.UNPROCESSABLE_ENTITY))
def list_jobs(query: Annotated[JobQuery, Query()], context: ContextDep) -> JobPage:
    """List jobs, the newest first."""
    found = context.store.list(query.state or None, query.limit + 1, query.cursor)
    jobs = list(found[: query.limit])
    return JobPage(jobs=jobs, next_cursor=jobs[-1].id if len(found) > query.limit else None)


@router.get("/{job_id}", responses=problem_responses(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY))
async def show(job: JobDep) -> JobRecord:
    """Look at one job."""
    return job


@router.delete(
    "/{job_id}",
    status_code=HTTPStatus.ACCEPTED,
    responses=problem_responses(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY),
)
def cancel(job_id: str, context: ContextDep) -> JobRecord:
    """Cancel a job. Its workers end within seconds; follow its events to see it CANCELLED."""
    return context.store.request_cancel(job_id)


def _refuse_absent_data(spec: JobSpec) -> None:
    try:
        check_data(spec.data, spec.model.vocab_size, spec.training.sequence_length)
    except UnfitData as error:
        raise InvalidJob([FieldError(field=error.field, message=str(error))]) from error
    except Exception as error:  # the clients of object stores raise types of their own
        problem = f"cannot be looked up: {error}; check the URL and that the service has credentials for it"
        raise InvalidJob([FieldError(field="data", message=problem)]) from error
