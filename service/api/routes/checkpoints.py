"""A job's checkpoints: list, show, pin, delete; read from their folder with the trainer's library."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from typing import Annotated, TypeVar

from fastapi import APIRouter, Path

from boost_core.checkpoint import folder as stored
from boost_core.checkpoint.folder import CheckpointFolder, StoredCheckpoint
from boost_core.checkpoint.manifest import Manifest
from boost_core.config import Layout
from boost_core.config.storage import giving_up_soon
from service.api.admission import storage_options
from service.api.auth import Submitter
from service.api.deps import Context, ContextDep, JobDep
from service.api.errors import (
    CheckpointDamaged,
    CheckpointInUse,
    CheckpointNotFound,
    CheckpointPinned,
    StoreUnavailable,
    problem_responses,
)
from service.jobs.model import JobRecord
from service.models.jobs import (
    Checkpoint,
    CheckpointDetail,
    CheckpointFile,
    CheckpointList,
    DamagedCheckpoint,
)
from service.security.redaction import redact
from service.security.secrets import SecretUnusable

T = TypeVar("T")


async def at_store(job: JobRecord, context: Context, look: Callable[["JobCheckpoints"], T]) -> T:
    """Call a function with a job's checkpoints. Only the job's own tenant waits for its store.

    Raises:
        StoreUnavailable: The job's secret is unavailable, or its store does not respond.
    """
    what = f"the store of the checkpoints of job {job.id}, {job.checkpoint_url},"
    return await context.stores.run(job.tenant, what, lambda: look(JobCheckpoints(job, context)))


class JobCheckpoints:
    """The checkpoints of one job.

    Args:
        job: The job.
        context: The service's parts, which have its secrets.

    Raises:
        StoreUnavailable: The job's secret is unavailable, or its store does not respond; all methods raise it, too.
    """

    def __init__(self, job: JobRecord, context: Context) -> None:
        self._job = job
        with self._at_store():
            options = storage_options(job.spec, context, job.tenant)
            self._folder = CheckpointFolder(job.checkpoint_url, giving_up_soon(options))

    def all(self) -> CheckpointList:
        """All committed checkpoints, newest first."""
        checkpoints, damaged = [], []
        with self._at_store():
            pinned = self._folder.pinned()
            for each in self._folder.checkpoints():
                step, is_pinned = each.step, each.step in pinned
                if each.manifest is None or each.damage:
                    url, damage = self._folder.step_url(step), redact(each.damage)
                    damaged.append(DamagedCheckpoint(step=step, url=url, pinned=is_pinned, damage=damage))
                else:
                    checkpoints.append(Checkpoint(**_facts(self._folder, each.manifest, is_pinned)))
        return CheckpointList(checkpoints=checkpoints, damaged=damaged)

    def one(self, step: int) -> CheckpointDetail:
        """One checkpoint.

        Raises:
            CheckpointNotFound: There is none of that step.
            CheckpointDamaged: It cannot be read.
        """
        checkpoint = self._stored(step)
        manifest = checkpoint.manifest
        if manifest is None or checkpoint.damage:
            why = redact(checkpoint.damage)
            raise CheckpointDamaged(f"the checkpoint of step {step} of job {self._job.id} is damaged: {why}")
        with self._at_store():
            pinned = step in self._folder.pinned()
        files = {name: CheckpointFile(bytes=file.bytes, crc32=file.crc32) for name, file in manifest.files.items()}
        return CheckpointDetail(**_facts(self._folder, manifest, pinned), files=files, versions=manifest.versions)

    def pin(self, step: int, pinned: bool) -> Checkpoint:
        """Pin a checkpoint, or unpin it.

        Raises:
            CheckpointNotFound: There is none of that step.
            CheckpointDamaged: It cannot be read. It is then not pinned, but is unpinned before this is raised.
        """
        if pinned:
            self.one(step)
        else:
            self._stored(step)
        change = self._folder.pin if pinned else self._folder.unpin
        with self._at_store():
            change(step)
        return Checkpoint.model_validate(self.one(step).model_dump())

    def delete(self, step: int) -> None:
        """Remove a checkpoint.

        Raises:
            CheckpointNotFound: There is none of that step.
            CheckpointInUse: The job has not ended, and would resume from it.
            CheckpointPinned: It is pinned.
        """
        self._stored(step)
        with self._at_store():
            newest = self._folder.newest_intact()
        if step == newest and not self._job.finished:
            raise CheckpointInUse(
                f"job {self._job.id} is {self._job.state} and would resume from step {step}; cancel it first"
            )
        with self._at_store():
            try:
                self._folder.remove(step)
            except stored.CheckpointPinned as error:
                raise CheckpointPinned(str(error)) from error

    def _stored(self, step: int) -> StoredCheckpoint:
        with self._at_store():
            try:
                return self._folder.checkpoint(step)
            except FileNotFoundError as error:
                raise CheckpointNotFound(self._job.id, step) from error

    @contextmanager
    def _at_store(self) -> Iterator[None]:
        """Raise the store's failures as ``StoreUnavailable``; clients of object stores raise types of their own."""
        try:
            yield
        except (CheckpointNotFound, CheckpointPinned):
            raise
        except Exception as error:
            why = str(error) if isinstance(error, SecretUnusable) else f"{type(error).__name__}: {error}"
            problem = f"the checkpoints of job {self._job.id} cannot be reached at {self._job.checkpoint_url}: {why}"
            raise StoreUnavailable(redact(problem)) from error


def _facts(folder: CheckpointFolder, manifest: Manifest, pinned: bool) -> dict[str, object]:
    return {
        "step": manifest.step,
        "url": folder.step_url(manifest.step),
        "bytes": manifest.bytes,
        "saved_at": manifest.saved_at,
        "pinned": pinned,
        **Layout.of(manifest.parallelism).sizes,
        "samples": manifest.samples,
    }


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
