"""Jobs: submit, dry-run, list, show, clone."""

from functools import partial
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Query, Response
from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from boost_core.config import JobSpec
from service.accounts.principal import Principal
from service.api.admission import Completed, admitted, planned
from service.api.audit import NotRecorded, recorded_with
from service.api.auth import Reader, Submitter
from service.api.deps import ContextDep, JobDep, context_of, refuse_others
from service.api.errors import InvalidJob, problem_responses
from service.api.idempotency import IdempotentDep
from service.api.merge import merged
from service.api.requests import StrictRoute
from service.jobs.model import JobFilter, JobPage, JobRecord, Owner
from service.jobs.queries import JobNotFound
from service.jobs.requests import Request
from service.jobs.states import JobState
from service.jobs.store import JobStore
from service.jobs.writes import WrongState
from service.models.identity import Scope, TenantName
from service.models.plans import PlanAnswer
from service.models.queues import QueueName
from service.models.requests import CloneRequest, DryRun
from service.trackers.opening import kinds_of

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=StrictRoute)

_JSON = "application/json"
_BODY_REFUSED = problem_responses(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, HTTPStatus.UNPROCESSABLE_ENTITY)


class JobQuery(BaseModel):
    """Which jobs to list."""

    model_config = ConfigDict(extra="forbid")

    state: list[JobState] = Field([], description="Only jobs in one of these states; all if none is given.")
    queue: QueueName | None = Field(None, description="Only jobs of this queue.")
    name: str | None = Field(None, max_length=100, description="Only jobs whose name contains this.")
    submitted_by: str | None = Field(None, max_length=100, description="Only jobs submitted with the key of this name.")
    tenant: TenantName | None = Field(None, description="Only jobs of this tenant; operators see all tenants' jobs.")
    limit: int = Field(100, ge=1, le=500, description="Maximum number of results.")
    cursor: str | None = Field(None, max_length=32, description="next_cursor of the previous page.")


# Routes are tried in turn, so those that get most requests come first; but dry-run is not a job's id.


@router.get("", response_model=JobPage, responses=problem_responses(HTTPStatus.UNPROCESSABLE_ENTITY))
async def list_jobs(query: Annotated[JobQuery, Query()], who: Reader, http: HttpRequest) -> Response:
    """List jobs, newest first."""
    tenant = query.tenant if who.may(Scope.ADMIN) else who.tenant
    wanted = JobFilter(query.state or None, tenant, query.queue, query.name, query.submitted_by)

    def page(store: JobStore) -> bytes:
        if query.cursor is not None:
            _refuse_unknown_cursor(query.cursor, who, store)
        found = store.list(wanted, query.limit + 1, query.cursor)
        outlook = context_of(http).outlook()
        jobs = [outlook.of(job) for job in found[: query.limit]]
        return JobPage(jobs=jobs, next_cursor=jobs[-1].id if len(found) > query.limit else None).as_json

    return Response(await context_of(http).reads.run(page), media_type=_JSON)


@router.post("/dry-run", responses=_BODY_REFUSED)
async def dry_run(spec: JobSpec, who: Submitter, context: ContextDep) -> DryRun:
    """Check and plan a job without submitting it; nothing is recorded."""

    def tried(job: Completed) -> DryRun:
        return DryRun(
            spec=job.spec,
            plan=planned(job.spec, job.basis.machine(job.spec)),
            chosen=job.chosen,
            profile=job.profile,
            fitted=job.fitted,
        )

    return await admitted(spec, context, who.tenant, tried)


@router.get(
    "/{job_id}",
    response_model=JobRecord,
    responses=problem_responses(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def show(job: JobDep, http: HttpRequest) -> Response:
    """Show one job."""
    job = context_of(http).outlook().of(job)
    return Response(job.as_json, headers={"ETag": job.etag}, media_type=_JSON)


@router.post("", status_code=HTTPStatus.CREATED, response_model=JobRecord, responses=_BODY_REFUSED)
async def submit(spec: JobSpec, who: Submitter, http: HttpRequest, request: IdempotentDep) -> Response:
    """Submit a training job. It is QUEUED, and starts when its turn comes and its workers can be placed."""
    return await _create(spec, who, http, request)


@router.get("/{job_id}/plan", responses=problem_responses(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY))
def show_plan(job: JobDep) -> PlanAnswer:
    """Plan a job with the profile and correction recorded when it was submitted, even if newer ones are stored."""
    found = planned(job.spec, job.basis.machine(job.spec))
    return PlanAnswer(**dict(found), profile=job.profile, fitted=job.fitted)


@router.post(
    "/{job_id}/clone",
    status_code=HTTPStatus.CREATED,
    response_model=JobRecord,
    responses=_BODY_REFUSED | problem_responses(HTTPStatus.NOT_FOUND, HTTPStatus.CONFLICT),
)
async def clone(
    job: JobDep, wanted: CloneRequest, who: Submitter, http: HttpRequest, request: IdempotentDep
) -> Response:
    """Submit a copy of a job, with changes."""
    changes = wanted.changes
    if wanted.from_checkpoint or wanted.from_weights:
        if job.checkpoint is None:
            raise WrongState(job, "it has no checkpoint to start from yet; clone it from scratch")
        origin, other = ("weights_from", "continue_from") if wanted.from_weights else ("continue_from", "weights_from")
        changes = merged(changes, {"checkpoint": {origin: job.checkpoint_url, other: None}})
    try:
        spec = JobSpec.model_validate(merged(job.spec.with_layouts(None).as_written(), changes))
    except ValidationError as error:
        raise InvalidJob.of(error, JobSpec) from error
    return await _create(spec, who, http, request, original=job)


def _refuse_unknown_cursor(cursor: str, who: Principal, store: JobStore) -> None:
    """Refuse a cursor that did not come from a page: each is the id of a job that the reader was shown."""
    try:
        refuse_others(store.get(cursor), who)
    except JobNotFound as error:
        problem = "is not a cursor from a previous page; use next_cursor as returned, or omit it to start over"
        fault = {"type": "value_error", "loc": ("query", "cursor"), "msg": problem, "input": cursor}
        raise RequestValidationError([fault]) from error


async def _create(
    spec: JobSpec,
    who: Principal,
    http: HttpRequest,
    request: Request | None,
    original: JobRecord | None = None,
) -> Response:
    context = context_of(http)
    record = await run_in_threadpool(context.store.known, request) if request else None
    if record is None:

        def create(job: Completed) -> JobRecord:
            store = partial(
                context.store.create,
                job.spec,
                context.settings.checkpoint_root,
                Owner(who.tenant, who.name),
                cloned_from=original.id if original else None,
                request=request,
                traceparent=getattr(http.state, "traceparent", None),  # of the request's span, if it has one
                trackers=kinds_of(job.spec, context.settings),
                chosen=job.chosen,
                profile=job.profile,
                fitted=job.fitted,
                node_gpus=job.nodes.gpus,
                node_memory_bytes=job.nodes.memory_bytes,
            )
            try:
                return store(alongside=recorded_with(http, context.audit, HTTPStatus.CREATED))
            except NotRecorded:
                return store()

        record = await admitted(spec, context, who.tenant, create, original.spec if original else None)
    headers = {"Location": f"{router.prefix}/{record.id}", "ETag": record.etag}
    return Response(context.outlook().of(record).as_json, HTTPStatus.CREATED, headers, _JSON)
