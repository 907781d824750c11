"""A job's events as a stream of server-sent events."""

from collections.abc import AsyncIterator, Sequence
from http import HTTPStatus
from typing import Annotated

import anyio
from fastapi import APIRouter, Header, Query
from fastapi.concurrency import run_in_threadpool
from fastapi.sse import EventSourceResponse, ServerSentEvent

from service.api.deps import Context, ContextDep, JobDep
from service.api.errors import problem_responses
from service.jobs.model import JobEvent

router = APIRouter(prefix="/v1/jobs", tags=["jobs"])

_POLL_SECONDS = 0.25
_LARGEST_ID = 2**63 - 1  # what a database can compare


@router.get(
    "/{job_id}/events",
    response_class=EventSourceResponse,
    responses=problem_responses(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY),
)
async def events(
    job: JobDep,
    context: ContextDep,
    after: Annotated[int, Query(ge=0, le=_LARGEST_ID, description="Start after the event with this id.")] = 0,
    last_event_id: Annotated[
        int | None, Header(ge=0, le=_LARGEST_ID, description="The same; sent by clients that resume.")
    ] = None,
    follow: Annotated[bool, Query(description="Go on until the job has come to its end.")] = True,
) -> AsyncIterator[ServerSentEvent]:
    """Stream what happened to a job and what happens next: state changes, progress, evaluations, logs."""
    seen = after if last_event_id is None else last_event_id
    while not context.stopping.is_set():
        finished, batch = await run_in_threadpool(_look, context, job.id, seen)
        for event in batch:
            yield ServerSentEvent(id=str(event.id), event=event.kind, data=event)
            seen = event.id
        if batch:
            continue
        if finished or not follow:
            return
        await anyio.sleep(_POLL_SECONDS)


def _look(context: Context, job_id: str, after: int) -> tuple[bool, Sequence[JobEvent]]:
    """Whether the job has come to its end, and its next events. In this order, so that none is missed."""
    finished = context.store.get(job_id).finished
    return finished, context.store.events(job_id, after)
