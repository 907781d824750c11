"""Changes to a job: patch, pause, resume, retry, cancel, drill, profile."""

from collections.abc import Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Header, Response
from pydantic import BaseModel, ValidationError

from boost_core.config import JobSpec
from boost_core.messages.commands import Drill, Profile
from service.api.admission import with_layouts
from service.api.auth import Submitter
from service.api.deps import ContextDep, JobDep
from service.api.errors import InvalidJob, problem_responses
from service.api.idempotency import IdempotentDep
from service.api.requests import StrictRoute
from service.jobs.model import JobRecord
from service.jobs.patch import JobPatch, changed_spec

router = APIRouter(prefix="/v1/jobs/{job_id}", tags=["jobs"], route_class=StrictRoute)

_REFUSED = problem_responses(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT, HTTPStatus.UNPROCESSABLE_ENTITY)
_BODY_REFUSED = _REFUSED | problem_responses(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)

IfMatch = Annotated[
    str | None,
    Header(max_length=256, description="Apply the change only if the ETag still matches; * or none: always."),
]


@router.patch("", responses=_BODY_REFUSED | problem_responses(HTTPStatus.PRECONDITION_FAILED))
def patch(
    job: JobDep, changes: JobPatch, who: Submitter, context: ContextDep, response: Response, if_match: IfMatch = None
) -> JobRecord:
    """Change a job's name, priority or limits; a running gang is resized to fit."""
    expected, chosen = None if if_match == "*" else if_match, None
    with _illegal_fields(JobSpec):
        if changes.gpus and not job.finished:
            spec = changed_spec(changes, job.spec)
            spec, chosen = with_layouts(spec, context, who.tenant, job.basis)
            expected = expected or job.etag  # what was chosen is for this spec
        record = context.store.patch(job.id, changes, expected, chosen)
    response.headers["ETag"] = record.etag
    return context.outlook().of(record)


@router.post("/pause", status_code=HTTPStatus.ACCEPTED, responses=_REFUSED)
def pause(job: JobDep, _who: Submitter, context: ContextDep) -> JobRecord:
    """Pause a job. Its gang finishes the current step, saves and stops; follow its events to see it PAUSED."""
    return context.outlook().of(context.store.request_pause(job.id))


@router.post("/resume", status_code=HTTPStatus.ACCEPTED, responses=_REFUSED)
def resume(job: JobDep, _who: Submitter, context: ContextDep) -> JobRecord:
    """Resume a paused job: it is QUEUED and continues where it stopped. One that is still pausing keeps training."""
    return context.outlook().of(context.store.resume(job.id))


@router.post("/retry", status_code=HTTPStatus.ACCEPTED, responses=_REFUSED)
def retry(job: JobDep, _who: Submitter, context: ContextDep) -> JobRecord:
    """Requeue a job that has FAILED or was CANCELLED. It continues from its newest checkpoint."""
    return context.outlook().of(context.store.retry(job.id))


@router.post("/drills", status_code=HTTPStatus.ACCEPTED, responses=_BODY_REFUSED)
def request_drill(job: JobDep, drill: Drill, _who: Submitter, context: ContextDep, request: IdempotentDep) -> JobRecord:
    """Inject a fault into a RUNNING job, to see it recover."""
    with _illegal_fields(Drill):
        return context.outlook().of(context.store.ask(job.id, drill, request))


@router.post("/profiles", status_code=HTTPStatus.ACCEPTED, responses=_BODY_REFUSED)
def request_profile(
    job: JobDep, profile: Profile, _who: Submitter, context: ContextDep, request: IdempotentDep
) -> JobRecord:
    """Trace some steps of a RUNNING job. Each rank's trace is stored next to the checkpoints; an event says where."""
    with _illegal_fields(Profile):
        return context.outlook().of(context.store.ask(job.id, profile, request))


@router.post("/cancel", status_code=HTTPStatus.ACCEPTED, responses=_REFUSED)
def cancel(job: JobDep, _who: Submitter, context: ContextDep) -> JobRecord:
    """Cancel a job. Its workers stop within seconds; follow its events to see it CANCELLED."""
    return context.outlook().of(context.store.request_cancel(job.id))


@router.delete("", status_code=HTTPStatus.ACCEPTED, responses=_REFUSED)
def delete(job: JobDep, _who: Submitter, context: ContextDep) -> JobRecord:
    """Cancel a job; its record stays."""
    return context.outlook().of(context.store.request_cancel(job.id))


@contextmanager
def _illegal_fields(model: type[BaseModel]) -> Iterator[None]:
    """Refuse changes that turn out illegal only together with the record like all other invalid requests."""
    try:
        yield
    except ValidationError as error:
        raise InvalidJob.of(error, model) from error
