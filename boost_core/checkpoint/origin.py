"""The other job's checkpoint that a new job starts from. Does not import torch.

A job *resumes* from its own newest checkpoint whenever it has one. Until then it may *continue* from another job's,
with all that is in it (weights, moments, step, data cursor), or *start from its weights* alone: at step 0, with a new
optimizer, schedule and data cursor.
"""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass

from boost_core.checkpoint.folder import CheckpointFolder, StoredCheckpoint, located
from boost_core.checkpoint.manifest import Manifest
from boost_core.config import JobSpec
from boost_core.config.base import UnfitField
from boost_core.config.job import CheckpointConfig
from boost_core.config.storage import StorageOptions

# The facts about a model that may be others where only its weights are kept: how far they see, and not what they are.
_CONTEXT = frozenset({"rope_theta", "rope_scaling", "sliding_window"})


class UnfitOrigin(UnfitField):
    """A job cannot start from the checkpoint that it names."""

    def __str__(self) -> str:
        return f"{self.field}: {self.message}"


@dataclass(frozen=True)
class Origin:
    """Where a job starts while it has no checkpoint of its own.

    Attributes:
        field: The job's field that names it.
        folder: The other job's checkpoints.
        step: The checkpoint's step; ``None``: the newest intact one.
        weights_only: Whether only its weights are taken.
    """

    field: str
    folder: CheckpointFolder
    step: int | None
    weights_only: bool

    @classmethod
    def of(cls, checkpoint: CheckpointConfig, storage_options: StorageOptions | None = None) -> "Origin | None":
        """The origin that a job names; ``None`` if it starts from scratch.

        Args:
            checkpoint: The job's section.
            storage_options: Options for ``s3://``, by s3fs's names; default: the process's own.
        """
        if checkpoint.origin is None:
            return None
        field, url = checkpoint.origin
        folder, step = located(url, storage_options)
        return cls(f"checkpoint.{field}", folder, step, weights_only=field == "weights_from")

    def checkpoints(self) -> Iterator[StoredCheckpoint]:
        """Yield the checkpoints that a job may start from, newest first; each is examined only when reached."""
        if self.step is None:
            yield from self.folder.checkpoints()
            return
        with suppress(FileNotFoundError):
            yield self.folder.checkpoint(self.step)

    def absent(self) -> UnfitOrigin:
        """Return the error for a checkpoint that does not exist."""
        where = self.folder.url if self.step is None else self.folder.step_url(self.step)
        return UnfitOrigin(self.field, f"no committed checkpoint is at {where!r}; check the URL")

    def refuse_unfit(self, spec: JobSpec, manifest: Manifest) -> None:
        """Refuse a job that could not start from a checkpoint, or would have nothing to train.

        Raises:
            UnfitOrigin: The checkpoint is of another model, or continuing from it leaves no step to train.
        """
        url = self.folder.step_url(manifest.step)
        try:
            different = manifest.differences(spec.model)
        except ValueError as error:
            raise UnfitOrigin(self.field, str(error)) from error
        if self.weights_only:
            different = {name: what for name, what in different.items() if name not in _CONTEXT}
        if different:
            advice = "use the same model, or another checkpoint"
            if different.keys() <= _CONTEXT:
                advice = "to change it, start from the weights alone: checkpoint.weights_from"
            problem = f"the checkpoint at {url} is of another model: {', '.join(different.values())}; {advice}"
            raise UnfitOrigin(self.field, problem)
        steps = spec.training.steps
        if not self.weights_only and manifest.step >= steps:
            problem = (
                f"{self.field} is at step {manifest.step} ({url}), which leaves nothing to train of "
                f"training.steps={steps}; set training.steps above {manifest.step}, or start from the weights alone: "
                "checkpoint.weights_from"
            )
            raise UnfitOrigin("training.steps", problem)


def refuse_unfit_origin(spec: JobSpec, storage_options: StorageOptions | None = None) -> None:
    """Refuse a job that could not start from the checkpoint that it names, by its manifest and its files' sizes.

    Args:
        spec: The job.
        storage_options: Options for ``s3://``, by s3fs's names; default: the process's own.

    Raises:
        UnfitOrigin: It is absent, damaged or of another model, or continuing from it leaves no step to train.
    """
    origin = Origin.of(spec.checkpoint, storage_options)
    if origin is None:
        return
    damage = ""
    for checkpoint in origin.checkpoints():
        if checkpoint.manifest is not None and not checkpoint.damage:
            origin.refuse_unfit(spec, checkpoint.manifest)
            return
        damage = damage or f"step {checkpoint.step}: {checkpoint.damage}"
    if damage:
        problem = f"no checkpoint in {origin.folder.url} is intact: {damage}; restore its files, or name another"
        raise UnfitOrigin(origin.field, problem)
    raise origin.absent()
