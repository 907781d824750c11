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


def load_newest(load: Callable[[int], None], folder: CheckpointFolder, step: int | None = None) -> int | None:
    """Load the newest intact checkpoint of a folder, if it has any. All ranks call it.

    Args:
        load: Loads the checkpoint of a step, and raises ``CheckpointDamaged`` on all ranks if any finds it damaged.
        folder: The checkpoints.
        step: The only one to try; default: all, newest first.

    Returns:
        The step that was loaded, the same on all ranks; ``None`` if the folder has no checkpoint.

    Raises:
        ValueError: All existing checkpoints are damaged.
    """
    # Rank 0 looks and tells the others, so that all load the same one.
    found: list[list[int]] = [[]]
    if dist.get_rank() == 0:
        found = [[each for each in reversed(_steps(folder)) if step in (None, each)]]
    dist.broadcast_object_list(found, src=0)
    (candidates,) = found
    left_out = []
    for each in candidates:
        try:
            _refuse_incomplete(folder, each)
            load(each)
        except CheckpointDamaged as damage:
            left_out.append(f"step {each}: {damage}")
            if dist.get_rank() == 0:
                logger.warning("checkpoint %s is damaged and skipped: %s", folder.step_url(each), damage)
        else:
            return each
    if candidates:
        named = left_out[:_MOST_NAMED] + ["…"] * (len(left_out) > _MOST_NAMED)
        raise ValueError(
            f"no checkpoint in {folder.url} is intact; restore its files, or remove the folder to start over: "
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
