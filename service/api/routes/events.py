"""A job's events and log lines as streams of server-sent events."""

from collections.abc import AsyncIterator
from contextlib import ExitStack
from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Depends, Header, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import EventSourceResponse, ServerSentEvent

from boost_core.config.reading import Moment
from service.accounts.keys import Principal
from service.api.auth import Reader
from service.api.deps import Context, ContextDep, JobDep
from service.api.errors import problem_responses
from service.api.following import BATCH
from service.jobs.model import EventKind, JobRecord
from service.jobs.queries import EventFilter


async def _hold_stream(who: Reader, context: ContextDep) -> AsyncIterator[ExitStack]:
    """Limit the number of open event streams per key, and release what a stream holds when it ends."""
    with context.limits.stream(who), ExitStack() as contexts:
        yield contexts


# For routes that return a stream: it is counted, and contexts entered here are held, until the stream ends for whatever
# reason. A generator is not closed in time if its client leaves while an event is being sent.
HeldByStream = Annotated[ExitStack, Depends(_hold_stream)]


router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_LARGEST_ID = 2**63 - 1  # what a database can compare
_MOST_RANKS = 2**31 - 1

After = Annotated[int, Query(ge=0, le=_LARGEST_ID, description="Start after the event with this id.")]
LastEventId = Annotated[
    int | None, Header(ge=0, le=_LARGEST_ID, description="The same; sent by clients that reconnect.")
]
Follow = Annotated[bool, Query(description="Keep the stream open until the job has ended.")]


@router.get(
    "/{job_id}/events",
    response_class=EventSourceResponse,
    responses=problem_responses(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def events(
    job: JobDep,
    who: Reader,
    context: ContextDep,
    contexts: HeldByStream,
    kind: Annotated[list[EventKind], Query(description="Only events of one of these kinds.")] = [],  # noqa: B006  # FastAPI copies it
    since: Annotated[Moment | None, Query(description="Only events at or after this time.")] = None,
    after: After = 0,
    last_event_id: LastEventId = None,
    follow: Follow = True,
) -> AsyncIterator[ServerSentEvent]:
    """Stream a job's past and future events: state changes, progress, evaluations, logs."""
    selection = EventFilter(frozenset(kind) or None, since)
    async for event in _stream(
        context, contexts, who, job, selection, after if last_event_id is None else last_event_id, follow
    ):
        yield event


@router.get(
    "/{job_id}/logs",
    response_class=EventSourceResponse,
    responses=problem_responses(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def logs(
    job: JobDep,
    who: Reader,
    context: ContextDep,
    contexts: HeldByStream,
    rank: Annotated[int | None, Query(ge=0, le=_MOST_RANKS, description="Only lines of this rank.")] = None,
    level: Annotated[
        list[str], Query(max_length=8, description="Only lines of one of these levels, such as ERROR.")
    ] = [],  # noqa: B006  # FastAPI copies it
    since: Annotated[Moment | None, Query(description="Only lines at or after this time.")] = None,
    after: After = 0,
    last_event_id: LastEventId = None,
    follow: Follow = True,
) -> AsyncIterator[ServerSentEvent]:
    """Stream the log lines of a job's ranks. They are kept after the gang has ended."""
    selection = EventFilter(frozenset({"log"}), since, rank, frozenset(level) or None)
    async for event in _stream(
        context, contexts, who, job, selection, after if last_event_id is None else last_event_id, follow
    ):
        yield event


async def _stream(
    context: Context,
    contexts: ExitStack,
    who: Principal,
    job: JobRecord,
    selection: EventFilter,
    after: int,
    follow: bool,
) -> AsyncIterator[ServerSentEvent]:
    if follow and not job.finished:
        follower = contexts.enter_context(context.feeds.follow(job.id, who, selection, after))
        while batch := await follower.next():
            for event in batch:
                yield event.encoded
        return
    while not context.stopping.is_set() and await run_in_threadpool(context.keys.is_good, who):
        batch = await context.feeds.read(job.id, after, selection)
        for event in batch:
            yield event.encoded
        if len(batch) < BATCH:
            return
        after = batch[-1].event.id
