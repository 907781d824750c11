"""The choice of a checkpoint, and errors that explain if it is gone or damaged."""

from collections.abc import Iterator
from contextlib import contextmanager

from boost_core.checkpoint.folder import CheckpointFolder, located
from boost_core.checkpoint.manifest import CheckpointDamaged


class CheckpointRemoved(ValueError):
    """A checkpoint was removed while it was being read."""


def chosen_checkpoint(url: str, step: int | None) -> tuple[CheckpointFolder, int]:
    """Find a folder of checkpoints, by its URL or that of one of them, and a step: the given one or the newest.

    Raises:
        ValueError: The checkpoint does not exist.
    """
    folder, step = located(url) if step is None else (CheckpointFolder(url), step)
    steps = folder.steps()
    if not steps:
        raise ValueError(f"{folder.url} holds no checkpoint; check it")
    if step not in (None, *steps):
        raise ValueError(
            f"{folder.url} holds no checkpoint of step {step}; there are: {', '.join(map(str, steps))}; if its job is "
            "still training, it may have removed it: run the command again, or pin one first (boost ckpt pin)"
        )
    return folder, steps[-1] if step is None else step


@contextmanager
def damage_named(folder: CheckpointFolder, step: int) -> Iterator[None]:
    """Make errors about damage name the checkpoint and list the others."""
    try:
        yield
    except CheckpointDamaged as damage:
        others = ", ".join(str(other) for other in folder.steps() if other != step) or "none"
        raise CheckpointDamaged(
            f"the checkpoint of step {step} is damaged: {damage}; restore it, or choose another with --step: {others}"
        ) from damage


@contextmanager
def removal_named(folder: CheckpointFolder, step: int) -> Iterator[None]:
    """Replace errors caused by the removal of a checkpoint with one that says so.

    Raises:
        CheckpointRemoved: The checkpoint is gone.
    """
    try:
        yield
    except (OSError, CheckpointDamaged) as error:
        if step not in folder.steps():
            raise CheckpointRemoved(
                f"the checkpoint of step {step} was removed while it was being read; choose another with --step, and "
                "pin it first (boost ckpt pin) if the job is still training"
            ) from error
        raise
