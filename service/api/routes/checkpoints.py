"""A job's checkpoints: list, show, pin, delete."""

from http import HTTPStatus
from typing import Annotated

from fastapi import APIRouter, Path

from service.api.auth import Submitter
from service.api.checkpoints import JobCheckpoints, at_store
from service.api.deps import ContextDep, JobDep
from service.api.errors import problem_responses
from service.models.checkpoints import Checkpoint, CheckpointDetail, CheckpointList

router = APIRouter(prefix="/v1/jobs/{job_id}/checkpoints", tags=["checkpoints"])

_LAST_STEP = 10**15

Step = Annotated[int, Path(ge=0, le=_LAST_STEP, description="Step at which it was written.")]

_LOOKED_AT = problem_responses(HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY, HTTPStatus.SERVICE_UNAVAILABLE)
_ONE = _LOOKED_AT | problem_responses(HTTPStatus.CONFLICT)


@router.get("", responses=_LOOKED_AT)
async def list_checkpoints(job: JobDep, context: ContextDep) -> CheckpointList:
    """List a job's committed checkpoints, newest first; damaged ones are listed separately."""
    return await at_store(job, context, JobCheckpoints.all)


@router.get("/{step}", responses=_ONE)
async def show(job: JobDep, step: Step, context: ContextDep) -> CheckpointDetail:
    """Show one checkpoint and its files, unless it is damaged."""
    return await at_store(job, context, lambda checkpoints: checkpoints.one(step))


@router.put("/{step}/pin", responses=_ONE)
async def pin(job: JobDep, step: Step, context: ContextDep, _who: Submitter) -> Checkpoint:
    """Keep a checkpoint until it is unpinned, regardless of the job's retention."""
    return await at_store(job, context, lambda checkpoints: checkpoints.pin(step, True))


@router.delete("/{step}/pin", responses=_ONE)
async def unpin(job: JobDep, step: Step, context: ContextDep, _who: Submitter) -> Checkpoint:
    """Unpin a checkpoint, leaving it to the job's retention. A damaged one is unpinned, then reported as damaged."""
    return await at_store(job, context, lambda checkpoints: checkpoints.pin(step, False))


@router.delete(
    "/{step}",
    status_code=HTTPStatus.NO_CONTENT,
    responses=_ONE,
)
async def delete(job: JobDep, step: Step, context: ContextDep, _who: Submitter) -> None:
    """Delete a checkpoint, unless it is pinned or the newest of an active job."""
    await at_store(job, context, lambda checkpoints: checkpoints.delete(step))
