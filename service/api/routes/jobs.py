"""Jobs: submit, list, look at, change, pause, resume, drill, cancel."""

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query, Response
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from boost_core.config import Drill, JobSpec
from boost_core.config.sources import UnfitData, check_data
from service.api.deps import ContextDep, JobDep
from service.api.errors import InvalidJob, problem_responses
from service.api.requests import StrictRoute
from service.jobs.model import JobFilter, JobPage, JobRecord
from service.jobs.patch import JobPatch
from service.jobs.states import JobState
from service.problems import FieldError, job_errors

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=StrictRoute)

_REFUSED = problem_responses(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY)
_BODY_REFUSED = _REFUSED | problem_responses(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)


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
    found = context.store.list(JobFilter(query.state or None), query.limit + 1, query.cursor)
    jobs = list(found[: query.limit])
    return JobPage(jobs=jobs, next_cursor=jobs[-1].id if len(found) > query.limit else None)


@router.get("/{job_id}", responses=problem_responses(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY))
async def show(job: JobDep) -> JobRecord:
    """Look at one job."""
    return job


@router.patch("/{job_id}", responses=_BODY_REFUSED)
def patch(job_id: str, changes: JobPatch, context: ContextDep) -> JobRecord:
    """Change a job's name, its priority or the limits of its replicas, to which its gang is then fitted."""
    with _illegal_fields(JobSpec):
        return context.store.patch(job_id, changes)


@router.post("/{job_id}/pause", status_code=HTTPStatus.ACCEPTED, responses=_REFUSED)
def pause(job_id: str, context: ContextDep) -> JobRecord:
    """Pause a job. Its gang finishes its step, saves and ends; follow the job's events to see it PAUSED."""
    return context.store.request_pause(job_id)


@router.post("/{job_id}/resume", status_code=HTTPStatus.ACCEPTED, responses=_REFUSED)
def resume(job_id: str, context: ContextDep) -> JobRecord:
    """Resume a paused job: it is QUEUED, and goes on where it was. One that was not paused yet just goes on."""
    return context.store.resume(job_id)


@router.post("/{job_id}/drills", status_code=HTTPStatus.ACCEPTED, responses=_BODY_REFUSED)
def request_drill(job_id: str, drill: Drill, context: ContextDep) -> JobRecord:
    """Bring a fault about in a job that is RUNNING, to see that it gets over it."""
    with _illegal_fields(Drill):
        return context.store.request_drill(job_id, drill)


@router.delete("/{job_id}", status_code=HTTPStatus.ACCEPTED, responses=_REFUSED)
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


@contextmanager
def _illegal_fields(model: type[BaseModel]) -> Iterator[None]:
    """Have what only the record can tell to be illegal refused like the rest."""
    try:
        yield
    except ValidationError as error:
        raise InvalidJob(job_errors(error.errors(), model)) from error
