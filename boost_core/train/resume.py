"""Continuing from a checkpoint."""

import logging
import time
from collections.abc import Callable

import torch.distributed as dist

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.manifest import CheckpointDamaged

logger = logging.getLogger(__name__)

STORE_PATIENCE_SECONDS = 60.0
RETRY_SECONDS = 2.0
_MOST_NAMED = 3


def load_newest(
    load: Callable[[CheckpointFolder, int], None], folder: CheckpointFolder, resume_from: str | None
) -> tuple[CheckpointFolder, int] | None:
    """Load the newest intact checkpoint of a job, or else of another job, if there is one. All ranks call it.

    Args:
        load: Loads a checkpoint, and raises ``CheckpointDamaged`` on all ranks if any finds it damaged.
        folder: The job's checkpoints.
        resume_from: URL of the other job's checkpoints.

    Returns:
        Its folder and step, the same on all ranks; ``None`` if there is none.

    Raises:
        ValueError: All existing checkpoints are damaged, or there are none in ``resume_from``.
    """
    candidates = _candidates(folder, resume_from)
    left_out = []
    for url, step in candidates:
        found = CheckpointFolder(url)
        try:
            _refuse_incomplete(found, step)
            load(found, step)
        except CheckpointDamaged as damage:
            left_out.append(f"step {step}: {damage}")
            if dist.get_rank() == 0:
                logger.warning("checkpoint %s is damaged and skipped: %s", found.step_url(step), damage)
        else:
            return found, step
    if candidates:
        named = left_out[:_MOST_NAMED] + ["…"] * (len(left_out) > _MOST_NAMED)
        raise ValueError(
            f"no checkpoint in {candidates[0][0]} is intact; restore its files, or remove the folder to start over: "
            f"{'; '.join(named)}"
        )
    return None


def _refuse_incomplete(folder: CheckpointFolder, step: int) -> None:
    """Check a checkpoint's manifest and file sizes on the first rank, which is cheap."""
    damage = [""]
    if dist.get_rank() == 0:
        damage = [folder.checkpoint(step).damage]
    dist.broadcast_object_list(damage, src=0)
    if damage[0]:
        raise CheckpointDamaged(damage[0])


def _candidates(folder: CheckpointFolder, resume_from: str | None) -> list[tuple[str, int]]:
    """Return folder URL and step of each checkpoint to try, the newest first, the same on all ranks."""
    # Rank 0 looks and tells the others, so that all load the same one.
    found: list[list[tuple[str, int]]] = [[]]
    if dist.get_rank() == 0:
        folders = [folder] if resume_from is None else [folder, CheckpointFolder(resume_from)]
        listings = ([(each.url, step) for step in reversed(_steps(each))] for each in folders)
        found = [next(filter(None, listings), [])]
        if resume_from is not None and not found[0]:
            raise ValueError(f"checkpoint.resume_from: no committed checkpoint is at {resume_from!r}; check the URL")
    dist.broadcast_object_list(found, src=0)
    return found[0]


def _steps(folder: CheckpointFolder) -> list[int]:
    """Return the steps of its checkpoints. Waits for an unavailable store, as saving does."""
    deadline = time.monotonic() + STORE_PATIENCE_SECONDS
    while True:
        try:
            return folder.steps()
        except (FileNotFoundError, PermissionError):  # the store is there, and refused
            raise
        except Exception as error:  # the clients of object stores raise types of their own
            if time.monotonic() > deadline:
                raise
            logger.warning("%s cannot be listed; retrying in %g s: %s", folder.url, RETRY_SECONDS, error)
        time.sleep(RETRY_SECONDS)
