"""A job's checkpoints: list, show, pin, delete; read from their folder with the trainer's library."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http import HTTPStatus
from typing import Annotated, TypeVar

from fastapi import APIRouter, Path

from boost_core.checkpoint.folder import CheckpointFolder, CheckpointPinned, StoredCheckpoint
from boost_core.config.storage import giving_up_soon
from service.api import errors
from service.api.auth import Submitter
from service.api.deps import Context, ContextDep, JobDep
from service.api.errors import CONFLICT, GUARDED, NOT_FOUND
from service.jobs.model import JobRecord
from service.models.jobs import Checkpoint, CheckpointDetail, CheckpointFile, CheckpointList
from service.security.redaction import redact
from service.security.secrets import SecretUnusable

T = TypeVar("T")


async def at_store(job: JobRecord, context: Context, look: Callable[[CheckpointFolder], T]) -> T:
    """Call a function with the folder of a job's checkpoints. Only the job's own tenant waits for its store.

    The function calls the folder's methods within ``_reaching``, so that a defect of its own is not taken for the
    store's.

    Raises:
        StoreUnavailable: The job's secret is unavailable, or its store does not respond.
    """

    def look_there() -> T:
        with _reaching(job):
            options = context.settings.access(job.tenant, job.spec.credentials).storage_options()
            deadline = time.monotonic() + context.settings.store_seconds
            folder = CheckpointFolder(job.checkpoint_url, giving_up_soon(options), deadline)
        return look(folder)

    what = f"the store of the checkpoints of job {job.id}, {job.checkpoint_url},"
    return await context.stores.run(job.tenant, what, look_there)


@contextmanager
def _reaching(job: JobRecord) -> Iterator[None]:
    """Raise whatever the store of a job's checkpoints raises as ``StoreUnavailable``."""
    try:
        yield
    except CheckpointPinned:
        raise
    except Exception as error:  # the clients of object stores raise types of their own
        why = str(error) if isinstance(error, SecretUnusable) else f"{type(error).__name__}: {error}"
        problem = f"the checkpoints of job {job.id} cannot be reached at {job.checkpoint_url}: {why}"
        raise errors.StoreUnavailable(redact(problem)) from error


def _stored(job: JobRecord, folder: CheckpointFolder, step: int) -> StoredCheckpoint:
    with _reaching(job), suppress(FileNotFoundError):
        return folder.checkpoint(step)
    problem = f"job {job.id} has no checkpoint of step {step}; list its checkpoints to see which it has"
    raise errors.CheckpointNotFound(problem)


def _detail(job: JobRecord, folder: CheckpointFolder, step: int) -> CheckpointDetail:
    _, manifest, damage = _stored(job, folder, step)
    if manifest is None or damage:
        raise errors.CheckpointDamaged(f"the checkpoint of step {step} of job {job.id} is damaged: {redact(damage)}")
    with _reaching(job):
        pinned = step in folder.pinned()
    files = {name: CheckpointFile(bytes=file.bytes, crc32=file.crc32) for name, file in manifest.files.items()}
    url = folder.step_url(step)
    return CheckpointDetail.of(manifest, url=url, pinned=pinned, files=files, versions=manifest.versions)


router = APIRouter(prefix="/v1/jobs/{job_id}/checkpoints", tags=["checkpoints"], responses=GUARDED)

Step = Annotated[int, Path(ge=0, le=10**15, description="Step at which it was written.")]


@router.get("", responses=NOT_FOUND)
async def list_checkpoints(job: JobDep, context: ContextDep) -> CheckpointList:
    """List a job's committed checkpoints, newest first; damaged ones are listed separately."""

    def look(folder: CheckpointFolder) -> CheckpointList:
        with _reaching(job):
            pinned, committed = folder.pinned(), list(folder.checkpoints())
        shown = (each._replace(damage=redact(each.damage)) for each in committed)
        return CheckpointList.of(folder, shown, pinned)

    return await at_store(job, context, look)


@router.get("/{step}", responses=NOT_FOUND | CONFLICT)
async def show(job: JobDep, step: Step, context: ContextDep) -> CheckpointDetail:
    """Show one checkpoint and its files, unless it is damaged."""
    return await at_store(job, context, lambda folder: _detail(job, folder, step))


@router.put("/{step}/pin", responses=NOT_FOUND | CONFLICT)
async def pin(job: JobDep, step: Step, context: ContextDep, _who: Submitter) -> Checkpoint:
    """Keep a checkpoint until it is unpinned, regardless of the job's retention."""

    def look(folder: CheckpointFolder) -> Checkpoint:
        _detail(job, folder, step)  # a damaged one is not pinned
        with _reaching(job):
            folder.pin(step)
        return Checkpoint.model_validate(_detail(job, folder, step).model_dump())

    return await at_store(job, context, look)


@router.delete("/{step}/pin", responses=NOT_FOUND | CONFLICT)
async def unpin(job: JobDep, step: Step, context: ContextDep, _who: Submitter) -> Checkpoint:
    """Unpin a checkpoint, leaving it to the job's retention. A damaged one is unpinned, then reported as damaged."""

    def look(folder: CheckpointFolder) -> Checkpoint:
        _stored(job, folder, step)
        with _reaching(job):
            folder.unpin(step)
        return Checkpoint.model_validate(_detail(job, folder, step).model_dump())

    return await at_store(job, context, look)


@router.delete("/{step}", status_code=HTTPStatus.NO_CONTENT, responses=NOT_FOUND | CONFLICT)
async def delete(job: JobDep, step: Step, context: ContextDep, _who: Submitter) -> None:
    """Delete a checkpoint, unless it is pinned, the newest of an active job, or what other jobs are to start from."""

    def look(folder: CheckpointFolder) -> None:
        _stored(job, folder, step)
        with _reaching(job):
            newest = folder.newest_intact()
        if step == newest and not job.finished:
            problem = f"job {job.id} is {job.state} and would resume from step {step}"
            raise errors.CheckpointInUse(f"{problem}; cancel it first")
        urls = [folder.step_url(step), *([folder.url] if step == newest else [])]
        needed = {url.removeprefix("file://") for url in urls}
        for other in context.store.active():
            origin = other.spec.checkpoint.origin if other.tenant == job.tenant and other.checkpoint is None else None
            if origin and origin[1].removeprefix("file://").rstrip("/") in needed:
                problem = f"job {other.id} is {other.state}, has no checkpoint yet and starts from that of step {step}"
                raise errors.CheckpointInUse(f"{problem}; cancel it first")
        fields = "checkpoint.continue_from", "checkpoint.weights_from"
        if sweep := context.sweeps.that_needs(needed, *fields, tenant=job.tenant):
            problem = f"trials of the sweep {sweep.name!r} start from that of step {step}"
            raise errors.CheckpointInUse(f"{problem}; stop it first")
        with _reaching(job):
            folder.remove(step)
            left = newest if step != newest else folder.newest_intact()
        context.store.checkpoint_removed(job.id, step, left)

    await at_store(job, context, look)
