"""Jobs: submit, dry-run, list, show, clone; change; their curves, trackers, evaluations and streams of events and logs.

Routes that get the most requests come first (``service.api.app``), hence several routers.
"""

import math
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime
from functools import partial
from http import HTTPStatus
from typing import Annotated, Any, Literal

from anyio import to_thread
from fastapi import APIRouter, Depends, Header, Query, Response
from fastapi import Request as HttpRequest
from fastapi.concurrency import run_in_threadpool
from fastapi.exceptions import RequestValidationError
from fastapi.sse import EventSourceResponse, ServerSentEvent
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from sqlalchemy.orm import Session

from boost_core.config import JobSpec
from boost_core.config.base import Moment
from boost_core.config.job import MOST_TAGS, Label
from boost_core.messages import Drill, Profile, Scores
from service.accounts.keys import Principal
from service.api import errors
from service.api.admission import Completed, admitted, check_origin, planned, record_job
from service.api.audit import NotRecorded, record_with
from service.api.auth import Reader, Submitter
from service.api.deps import ContextDep, JobDep, context_of, shown_to
from service.api.errors import BODY_REFUSED, CONFLICT, GUARDED, NOT_FOUND, Forbidden, InvalidJob, problem_responses
from service.api.event_streams import BATCH
from service.api.requests import CSV, IdempotentDep, StrictRoute, in_format
from service.jobs import model, queries
from service.jobs.comparison import MOST_COMPARED, compared, differing_fields
from service.jobs.downsampled_curves import METRICS, VALIDATION
from service.jobs.model import CancelRequest, EventKind, JobFilter, JobPage, JobRecord, JobSelection, Owner, Request
from service.jobs.patch import JobPatch, changed_spec, merged
from service.jobs.queries import MEANS, MOST_RANK_TIMES, EventFilter, JobNotFound, history
from service.jobs.store import JobStore
from service.jobs.trackers import TrackerStore
from service.jobs.writes import WrongState
from service.models import jobs as models
from service.models.access import Scope, TenantName
from service.models.problems import FieldError, job_errors
from service.trackers.opening import place_of

router = APIRouter(prefix="/v1/jobs", tags=["jobs"], route_class=StrictRoute, responses=GUARDED)

_CHANGE_REFUSED = problem_responses(404, 409, 422)
# What routes share that create a job, and that change one.
_CREATION: dict[str, Any] = {"status_code": HTTPStatus.CREATED, "response_model": JobRecord}
_CHANGE: dict[str, Any] = {"status_code": HTTPStatus.ACCEPTED, "responses": _CHANGE_REFUSED}

_JSON = "application/json"


class JobQuery(JobSelection):
    """Which jobs to list."""

    limit: int = Field(
        100, ge=1, le=500,
        description="Maximum number of results. With name, tag or search, a page is of 10,000 jobs, so that it may "
        "have few or no results although next_cursor leads to more.",
    )  # fmt: skip
    cursor: str | None = Field(None, max_length=32, description="next_cursor of the previous page.")


# Routes are tried in turn, so those that get most requests come first; but dry-run and cancel are no jobs' ids.


@router.get("", response_model=JobPage, responses=problem_responses(422))
async def list_jobs(query: Annotated[JobQuery, Query()], who: Reader, http: HttpRequest) -> Response:
    """List jobs, newest first."""
    context = await context_of(http)
    filters = query.filter_for(query.tenant if who.may(Scope.ADMIN) else who.tenant)

    def page(store: JobStore) -> bytes:
        if query.cursor is not None:
            try:  # each is the id of a job that the reader was shown
                shown_to(who, store.get(query.cursor))
            except JobNotFound as error:
                problem = "is not a cursor from a previous page; use next_cursor as returned, or omit it to start over"
                fault = {"type": "value_error", "loc": ("query", "cursor"), "msg": problem, "input": query.cursor}
                raise RequestValidationError([fault]) from error
        records, following = store.page(filters, query.limit, query.cursor)
        outlook = context.outlook()
        return JobPage(jobs=[outlook.of(job) for job in records], next_cursor=following).as_json

    return Response(await context.reads.run(page), media_type=_JSON)


@router.post("/dry-run", responses=BODY_REFUSED)
async def dry_run(spec: JobSpec, who: Submitter, context: ContextDep) -> models.DryRun:
    """Check and plan a job without submitting it; nothing is recorded."""
    job = await admitted(spec, context, who.tenant, lambda job: job, pins=False)
    plan = await planned(job.spec, job.basis.machine(job.spec), context, who.tenant)
    return models.DryRun(spec=job.spec, plan=plan, chosen=job.chosen, profile=job.profile, fitted=job.basis.fitted)


@router.post("/cancel", status_code=HTTPStatus.ACCEPTED, responses=BODY_REFUSED)
def cancel_many(body: CancelRequest, who: Submitter, http: HttpRequest, context: ContextDep) -> model.Cancellation:
    """Cancel up to 1,000 jobs, named by their ids or by what they have in common."""
    tenant = body.tenant if who.may(Scope.ADMIN) else who.tenant
    if body.tenant not in (None, tenant):
        raise Forbidden(f"only operators may cancel other tenants' jobs; leave tenant out or give {who.tenant}")
    known = context.store.ids(body.filter_for(tenant), model.MOST_CANCELLED + 1)
    chosen = known[: model.MOST_CANCELLED]
    http.state.changed = cancelled = list[str]()
    for job_id in context.store.cancel_many(chosen):  # should it fail on the way, the audit log has those before
        cancelled.append(f"{router.prefix}/{job_id}")
    ended, unknown = len(chosen) - len(cancelled), sorted(set(body.ids or ()).difference(known))
    remaining = len(known) > model.MOST_CANCELLED
    return model.Cancellation(cancelled=len(cancelled), ended=ended, not_found=unknown, remaining=remaining)


_MOST_PAGES = 10  # of a search, with 10,000 jobs each
_OF_GROUP = "Of the group, or else of all jobs, those"
_SEARCHED = "Likewise, those with this in their name, group, tags or notes."


class ComparedQuery(BaseModel):
    """Which jobs to compare."""

    model_config = ConfigDict(extra="forbid")

    job: list[str] = Field([], max_length=MOST_COMPARED, description="The jobs.")
    group: Label | None = Field(None, description=f"Also the newest {MOST_COMPARED} jobs of this group.")
    tag: list[Label] = Field([], max_length=MOST_TAGS, description=f"{_OF_GROUP} with all of these tags.")
    search: model.SearchText | None = Field(None, description=_SEARCHED)
    tenant: TenantName | None = Field(None, description="Whose group; operators see all tenants' jobs.")

    def jobs(self, who: Principal, store: JobStore) -> list[JobRecord]:
        """The jobs, those named first.

        Raises:
            JobNotFound: One of them does not exist, or is not for this reader.
        """
        jobs = {job_id: store.get(job_id) for job_id in self.job}
        for job in jobs.values():
            shown_to(who, job)
        if self.group or self.tag or self.search:
            tenant = self.tenant if who.may(Scope.ADMIN) else who.tenant
            wanted = JobFilter(tenant=tenant, group=self.group, tags=self.tag, text=self.search or None)
            found: list[JobRecord] = []
            cursor: str | None = None
            for _ in range(_MOST_PAGES):
                page, cursor = store.page(wanted, MOST_COMPARED - len(found), cursor)
                found += page
                if cursor is None or len(found) == MOST_COMPARED:
                    break
            jobs |= {job.id: job for job in found}
        return [*jobs.values()]


class ComparisonQuery(ComparedQuery):
    """Which jobs to compare, and in which order."""

    sort: models.Result | None = Field(None, description="Sort by this, the lowest first; default: as requested.")
    descending: bool = Field(False, description="The highest first.")


@router.get("/compare", responses=NOT_FOUND)  # before the next, for which it would be the id of a job
async def compare(query: Annotated[ComparisonQuery, Query()], who: Reader, context: ContextDep) -> models.Comparison:
    """Show jobs' results side by side, with the fields in which their specs differ."""

    def read() -> models.Comparison:
        jobs = query.jobs(who, context.store)
        with Session(context.store.engine) as session:
            losses, ranks = queries.results_of(session, [job.id for job in jobs])
            courses = {job.id: queries.course_of(session, job.id) for job in jobs if job.progress}
        return compared(jobs, losses, ranks, courses, datetime.now(UTC), query.sort, query.descending)

    return await to_thread.run_sync(read, limiter=context.slow_threads[who.tenant])


@router.get("/{job_id}", response_model=JobRecord, responses=NOT_FOUND)
async def show(job: JobDep, http: HttpRequest) -> Response:
    """Show one job."""
    job = (await context_of(http)).outlook().of(job)
    return Response(job.as_json, headers={"ETag": job.etag}, media_type=_JSON)


@router.post("", responses=BODY_REFUSED, **_CREATION)
async def submit(spec: JobSpec, who: Submitter, http: HttpRequest, request: IdempotentDep) -> Response:
    """Submit a training job. It is QUEUED, and starts when its turn comes and its workers can be placed."""
    return await _create(spec, who, http, request)


@router.get("/{job_id}/plan", responses=NOT_FOUND)
async def show_plan(job: JobDep, context: ContextDep) -> models.PlanAnswer:
    """Plan a job with the profile and correction recorded when it was submitted, even if newer ones are stored."""
    plan = await planned(job.spec, job.basis.machine(job.spec), context, job.tenant)
    return models.PlanAnswer(**dict(plan), profile=job.profile, fitted=job.fitted)


@router.post("/{job_id}/clone", responses=BODY_REFUSED | _CHANGE_REFUSED, **_CREATION)
async def clone(
    job: JobDep, body: models.CloneRequest, who: Submitter, http: HttpRequest, request: IdempotentDep
) -> Response:
    """Submit a copy of a job, with changes."""
    changes = body.changes
    if body.from_checkpoint or body.from_weights:
        if job.checkpoint is None:
            raise WrongState(job, "it has no checkpoint to start from yet; clone it from scratch")
        origin, other = ("weights_from", "continue_from") if body.from_weights else ("continue_from", "weights_from")
        changes = merged(changes, {"checkpoint": {origin: job.checkpoint_url}})
        changes["checkpoint"][other] = None  # takes the original's own away, too
    written, training = job.requested_spec.with_layouts(None).as_written(), changes.get("training")
    if isinstance(training, dict) and len(given := training.keys() & {"steps", "tokens"}) == 1:
        written["training"].pop("tokens" if "steps" in given else "steps", None)  # one stands for the other
    data, named = changes.get("data"), written["data"]["dataset"]
    if named is not None and isinstance(data, dict) and data.get("dataset", named) != named:
        written["data"]["source"] = None  # the shards of that dataset
    trial = "trial-" + written["name"].removeprefix(f"{written['group']}-")
    if trial in written["tags"]:  # of a sweep, whose group and tag are not the clone's
        written |= {"group": None, "tags": [tag for tag in written["tags"] if tag != trial]}
    with _illegal_fields(JobSpec):
        spec = JobSpec.model_validate(merged(written, changes))
    return await _create(spec, who, http, request, original=job)


async def _create(
    spec: JobSpec, who: Principal, http: HttpRequest, request: Request | None, original: JobRecord | None = None
) -> Response:
    context = await context_of(http)
    record = await run_in_threadpool(context.store.known, request) if request else None
    if record is None:

        def create(job: Completed) -> JobRecord:
            owner, source = Owner(who.tenant, who.name), original.id if original else None
            span = getattr(http.state, "traceparent", None)  # of the request, if it has one
            store = partial(record_job, job, context, owner, cloned_from=source, request=request, traceparent=span)
            try:
                return store(alongside=partial(record_with, http, context.audit, HTTPStatus.CREATED))
            except NotRecorded:
                return store()

        record = await admitted(spec, context, who.tenant, create, original.spec if original else None)
    headers = {"Location": f"{router.prefix}/{record.id}", "ETag": record.etag}
    return Response(context.outlook().of(record).as_json, HTTPStatus.CREATED, headers, _JSON)


# Changes to a job: patch, pause, resume, retry, cancel, drill, profile.

_IF_MATCH = "Apply the change only if the ETag still matches; * or none: always."
IfMatch = Annotated[str | None, Header(max_length=256, description=_IF_MATCH)]


@router.patch("/{job_id}", responses=_CHANGE_REFUSED | BODY_REFUSED | problem_responses(412))
async def patch(
    job: JobDep, changes: JobPatch, who: Submitter, context: ContextDep, response: Response, if_match: IfMatch = None
) -> JobRecord:
    """Change a job's name, priority, limits, description or schedule; a running gang takes it between two steps."""

    def change() -> JobRecord:
        expected, chosen = None if if_match == "*" else if_match, None
        if changes.gpus and not job.finished:
            spec = changed_spec(changes, job.requested_spec)
            chosen = context.searches.layouts(spec, who.tenant, job.basis) if spec.leaves_layouts else None
            expected = expected or job.etag  # what was chosen is for this spec
        return context.outlook().of(context.store.patch(job.id, changes, expected, chosen, who.name))

    with _illegal_fields(JobSpec):
        steps = changes.training.steps if changes.training else None
        begins = job.checkpoint is None and job.progress is None and not job.finished
        continues = begins and job.spec.checkpoint.continue_from is not None
        if continues and steps and steps < job.spec.training.steps:  # which may leave none after that checkpoint
            spec = await run_in_threadpool(changed_spec, changes, job.requested_spec)
            await check_origin(spec, context, job.tenant, pins=False)
        record = await run_in_threadpool(change)
    response.headers["ETag"] = record.etag
    return record


@router.post("/{job_id}/pause", **_CHANGE)
def pause(job: JobDep, _who: Submitter, context: ContextDep) -> JobRecord:
    """Pause a job. Its gang finishes the current step, saves and stops; follow its events to see it PAUSED."""
    return context.outlook().of(context.store.request_pause(job.id))


@router.post("/{job_id}/resume", **_CHANGE)
def resume(job: JobDep, _who: Submitter, context: ContextDep) -> JobRecord:
    """Resume a paused job: it is QUEUED and continues where it stopped. One that is still pausing keeps training."""
    return context.outlook().of(context.store.resume(job.id))


@router.post("/{job_id}/retry", **_CHANGE)
def retry(job: JobDep, _who: Submitter, context: ContextDep) -> JobRecord:
    """Requeue a job that has FAILED or was CANCELLED. It continues from its newest checkpoint."""
    in_queue = partial(context.quotas.keep_queue, name=job.queue)  # it may have been deleted, and its limits with it
    return context.outlook().of(context.store.retry(job.id, in_queue))


@router.post("/{job_id}/drills", status_code=HTTPStatus.ACCEPTED, responses=_CHANGE_REFUSED | BODY_REFUSED)
def request_drill(job: JobDep, drill: Drill, _who: Submitter, context: ContextDep, request: IdempotentDep) -> JobRecord:
    """Inject a fault into a RUNNING job, to see it recover."""
    with _illegal_fields(Drill):
        return context.outlook().of(context.store.ask(job.id, drill, request))


@router.post("/{job_id}/profiles", status_code=HTTPStatus.ACCEPTED, responses=_CHANGE_REFUSED | BODY_REFUSED)
def request_profile(
    job: JobDep, profile: Profile, _who: Submitter, context: ContextDep, request: IdempotentDep
) -> JobRecord:
    """Trace some steps of a RUNNING job. Each rank's trace is stored next to the checkpoints; an event says where."""
    with _illegal_fields(Profile):
        return context.outlook().of(context.store.ask(job.id, profile, request))


@router.delete("/{job_id}", name="delete", description="Cancel a job; its record stays.", **_CHANGE)
@router.post("/{job_id}/cancel", **_CHANGE)
def cancel(job: JobDep, _who: Submitter, context: ContextDep) -> JobRecord:
    """Cancel a job. Its workers stop within seconds; follow its events to see it CANCELLED."""
    return context.outlook().of(context.store.request_cancel(job.id))


@contextmanager
def _illegal_fields(of: type[BaseModel]) -> Iterator[None]:
    """Refuse changes that turn out illegal only together with the record like all other invalid requests."""
    try:
        yield
    except ValidationError as error:
        faults = error.errors(include_url=False)
        shown = job_errors(faults[: errors.MOST_FAULTS], of)
        raise InvalidJob(shown, left_out=len(faults) - len(faults[: errors.MOST_FAULTS])) from error


# A job's metrics over its steps.

_LARGEST_INT = 2**31 - 1  # what a database counts with


class HistoryQuery(BaseModel):
    """Range and resolution of the curves."""

    model_config = ConfigDict(extra="forbid")

    points: int = Field(500, ge=1, le=5000, description="Maximum number of points per curve.")
    ranks: bool = Field(True, description=f"Include the ranks' times; in fewer rows if over about {MOST_RANK_TIMES}.")
    from_step: int = Field(1, ge=0, le=_LARGEST_INT, description="The first step.")
    to_step: int | None = Field(None, ge=0, le=_LARGEST_INT, description="The last step; default: the newest.")
    format: models.AnswerFormat = "json"


@router.get("/{job_id}/metrics", response_model=models.MetricsHistory, responses=NOT_FOUND | CSV)
async def metrics(job: JobDep, who: Reader, context: ContextDep, query: Annotated[HistoryQuery, Query()]) -> Response:
    """A job's loss, throughput and other metrics over its steps, downsampled to a number of points."""
    last = min(job.goodput.highest_step, _LARGEST_INT if query.to_step is None else query.to_step)

    def read() -> Response:
        with Session(context.store.engine) as session:
            ranks = query.ranks and query.format == "json"  # which CSV has no place for
            found = history(session, job.id, query.from_step, max(last, query.from_step), query.points, ranks)
        return in_format(found, query.format)

    # A million steps take a minute, for which no other tenant's requests wait.
    return await to_thread.run_sync(read, limiter=context.slow_threads[who.tenant])


# Jobs side by side.

_MOST_POINTS = 100_000  # of all curves of an answer, which then has about 4 MB
_POINTS = f"Maximum number of points of each curve, of all {_MOST_POINTS}; default: 500, or as many as that leaves."
_CURVES = f"One of {', '.join(MEANS)}, {VALIDATION}, or {VALIDATION}/NAME of a validation set."


class CurvesQuery(ComparedQuery):
    """Which jobs, and what of them."""

    metric: str = Field("loss", pattern=METRICS, max_length=200, description=_CURVES)
    axis: models.Axis = Field(models.Axis.STEP, description="What it is drawn over.")
    points: int | None = Field(None, ge=2, le=2000, description=_POINTS)
    low: float = Field(-math.inf, description="Only from here on the axis; default: from the beginning.")
    high: float = Field(math.inf, description="Only up to here; default: to the newest.")
    format: models.AnswerFormat = "json"


@router.get("/compare/curves", response_model=models.Curves, responses=NOT_FOUND | CSV)
async def compare_curves(query: Annotated[CurvesQuery, Query()], who: Reader, context: ContextDep) -> Response:
    """Show a curve of each of several jobs, downsampled to a number of points with the lowest and highest value."""

    def read() -> Response:
        jobs = query.jobs(who, context.store)
        points = query.points or min(500, _MOST_POINTS // max(1, len(jobs)))
        if points * len(jobs) > _MOST_POINTS:
            problem = f"for {len(jobs)} jobs is more than {_MOST_POINTS} points; ask for fewer points, or fewer jobs"
            fault = {"type": "value_error", "loc": ("query", "points"), "msg": problem, "input": query.points}
            raise RequestValidationError([fault])
        curve = partial(context.curves.curve, points=points, low=query.low, high=query.high)
        curves = [curve(job, query.metric, query.axis) for job in jobs]
        return in_format(models.Curves(metric=query.metric, axis=query.axis, curves=curves), query.format)

    # For the first time this takes up to a minute, for which other requests do not wait.
    return await to_thread.run_sync(read, limiter=context.slow_threads[who.tenant])


@router.get("/{job_id}/diff/{other_id}", responses=NOT_FOUND)
def diff(job: JobDep, other_id: str, who: Reader, context: ContextDep) -> models.SpecDiff:
    """Show in which fields of their specs two jobs differ."""
    other = shown_to(who, context.store.get(other_id))
    return models.SpecDiff(jobs=[job.id, other.id], fields=differing_fields([job.spec, other.spec]))


# What else is recorded of a job: the progress of its trackers, and evaluations of its checkpoints on tasks.

_MOST = 50
_MOST_SCORES = 500
_MOST_BYTES = 2**18


@router.get("/{job_id}/trackers", responses=NOT_FOUND)
def trackers(job: JobDep, context: ContextDep) -> models.TrackerList:
    """Show a job's trackers, how many events each is behind, and why."""
    shown = []
    for tracked, behind in TrackerStore(context.store.engine).of_job(job.id):
        url = tracked.kept.get("url", "@")
        place = place_of(tracked.kind, job) if "@" in url else url  # one of the release before may hold a password
        shown.append(models.TrackerState.model_validate(vars(tracked) | {"place": place, "behind": behind}))
    return models.TrackerList(trackers=shown)


@router.post("/{job_id}/evaluations", status_code=HTTPStatus.CREATED, responses=NOT_FOUND | CONFLICT | BODY_REFUSED)
def record_evaluation(
    job: JobDep, scores: Scores, _who: Submitter, context: ContextDep, request: IdempotentDep
) -> JobRecord:
    """Record the scores of one of a job's checkpoints on some tasks; this also adds an event of kind `scores`."""
    if len(scores.scores) > _MOST_SCORES or len(scores.model_dump_json().encode()) > _MOST_BYTES:
        limits = f"an evaluation has at most {_MOST_SCORES} scores and {_MOST_BYTES // 1024} KiB"
        raise InvalidJob([FieldError(field="scores", message=f"{limits}; record the tasks in several evaluations")])
    return context.store.add_scores(job.id, scores, request)


@router.get("/{job_id}/evaluations", responses=NOT_FOUND)
async def list_evaluations(job: JobDep, who: Reader, context: ContextDep) -> models.EvaluationList:
    """List the evaluations of a job's checkpoints on tasks, newest first."""

    def read() -> models.EvaluationList:
        with Session(context.store.engine) as session:
            events = queries.newest_events(session, job.id, "scores", _MOST)
        return models.EvaluationList(evaluations=[models.JobEvaluation(time=each.time, **each.data) for each in events])

    return await to_thread.run_sync(read, limiter=context.scrape_threads[who.tenant])


# A job's events and log lines as streams of server-sent events.


_LARGEST_ID = 2**63 - 1  # what a database can compare

After = Annotated[int, Query(ge=0, le=_LARGEST_ID, description="Start after the event with this id.")]
LastEventId = Annotated[int | None, Header(ge=0, le=_LARGEST_ID, description="The same, of clients that reconnect.")]
Follow = Annotated[bool, Query(description="Keep the stream open until the job has ended.")]
Stream = Callable[[EventFilter], AsyncIterator[ServerSentEvent]]


async def _stream(
    job: JobDep, who: Reader, context: ContextDep, after: After = 0, last_event_id: LastEventId = None,
    follow: Follow = True,
) -> AsyncIterator[Stream]:  # fmt: skip
    """Limit the number of open event streams per key, and release what a stream holds when it ends."""
    with context.limits.stream(who), ExitStack() as contexts:

        async def events(selection: EventFilter) -> AsyncIterator[ServerSentEvent]:
            seen = after if last_event_id is None else last_event_id
            if follow and not job.finished:
                follower = contexts.enter_context(context.feeds.follow(job.id, who, selection, seen))
                while batch := await follower.next():
                    for event in batch:
                        yield event.encoded
                return
            while not context.stopping.is_set() and await run_in_threadpool(context.keys.is_good, who):
                batch = await context.feeds.read(job.id, seen, selection, who.tenant)
                for event in batch:
                    yield event.encoded
                if len(batch) < BATCH:
                    return
                seen = batch[-1].event.id

        yield events


# For routes that return a stream: it is counted, and what it follows is held, until the stream ends for whatever
# reason. A generator is not closed in time if its client leaves while an event is being sent.
StreamDep = Annotated[Stream, Depends(_stream)]


@router.get("/{job_id}/events", response_class=EventSourceResponse, responses=NOT_FOUND)
async def events(
    stream: StreamDep,
    kind: Annotated[list[EventKind], Query(description="Only events of one of these kinds.")] = [],  # noqa: B006  # FastAPI copies it
    since: Annotated[Moment | None, Query(description="Only events at or after this time.")] = None,
) -> AsyncIterator[ServerSentEvent]:
    """Stream a job's past and future events: state changes, progress, evaluations, logs."""
    async for event in stream(EventFilter(frozenset(kind) or None, since)):
        yield event


@router.get("/{job_id}/logs", response_class=EventSourceResponse, responses=NOT_FOUND)
async def logs(
    stream: StreamDep,
    rank: Annotated[int | None, Query(ge=0, le=_LARGEST_INT, description="Only lines of this rank.")] = None,
    level: Annotated[
        list[Literal["DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL"]],
        Query(max_length=8, description="Only lines of one of these levels."),
    ] = [],  # noqa: B006  # FastAPI copies it
    since: Annotated[Moment | None, Query(description="Only lines at or after this time.")] = None,
) -> AsyncIterator[ServerSentEvent]:
    """Stream the log lines of a job's ranks. They are kept after the gang has ended."""
    async for event in stream(EventFilter(frozenset({"log"}), since, rank, frozenset(level) or None)):
        yield event
