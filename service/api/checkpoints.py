"""The API's access to a job's checkpoints, read from their folder with the trainer's library."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from boost_core.checkpoint import folder as stored
from boost_core.checkpoint.folder import CheckpointFolder, StoredCheckpoint
from boost_core.checkpoint.manifest import Manifest
from boost_core.config import Layout
from boost_core.config.storage import giving_up_soon
from service.api.admission import storage_options
from service.api.deps import Context
from service.api.errors import (
    CheckpointDamaged,
    CheckpointInUse,
    CheckpointNotFound,
    CheckpointPinned,
    StoreUnavailable,
)
from service.jobs.model import JobRecord
from service.models.checkpoints import (
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
            for found in self._folder.checkpoints():
                if found.manifest is None or found.damage:
                    damaged.append(self._damaged(found, found.step in pinned))
                else:
                    checkpoints.append(Checkpoint(**_facts(self._folder, found.manifest, found.step in pinned)))
        return CheckpointList(checkpoints=checkpoints, damaged=damaged)

    def one(self, step: int) -> CheckpointDetail:
        """One checkpoint.

        Raises:
            CheckpointNotFound: There is none of that step.
            CheckpointDamaged: It cannot be read.
        """
        found = self._found(step)
        manifest = found.manifest
        if manifest is None or found.damage:
            why = redact(found.damage)
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
            self._found(step)
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
        self._found(step)
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

    def _found(self, step: int) -> StoredCheckpoint:
        with self._at_store():
            try:
                return self._folder.checkpoint(step)
            except FileNotFoundError as error:
                raise CheckpointNotFound(self._job.id, step) from error

    def _damaged(self, found: StoredCheckpoint, pinned: bool) -> DamagedCheckpoint:
        url = self._folder.step_url(found.step)
        return DamagedCheckpoint(step=found.step, url=url, pinned=pinned, damage=redact(found.damage))

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
