"""Continuing from a checkpoint."""

import logging
import time
from collections.abc import Callable, Sequence

import torch.distributed as dist

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.manifest import CheckpointDamaged, CheckpointUnreadable
from boost_core.checkpoint.shards import read_on_first_rank

logger = logging.getLogger(__name__)

STORE_PATIENCE_SECONDS = 60.0
RETRY_SECONDS = 2.0
_MOST_NAMED = 3
_PROBED_CHECKPOINTS, _PROBED_FILES = 3, 2  # the index and a shard of each


class StoreAway(OSError):
    """A store returns nothing of any checkpoint. All ranks raise it."""


def load_newest(load: Callable[[int], None], folder: CheckpointFolder, step: int | None = None) -> int | None:
    """Load the newest checkpoint of a folder that can be read and is intact, if it has any. All ranks call it.

    In a store, a checkpoint is left out only when it has failed twice, and if it cannot be read, only while others can:
    a store that is away is waited for, so that no progress is lost.

    Args:
        load: Loads the checkpoint of a step. Raises on all ranks ``CheckpointDamaged`` if any finds it damaged, and
            ``CheckpointUnreadable`` if any cannot read it.
        folder: The checkpoints.
        step: The only one to try; default: all, newest first.

    Returns:
        The step that was loaded, the same on all ranks; ``None`` if the folder has no checkpoint.

    Raises:
        ValueError: All existing checkpoints are damaged.
        StoreAway: Nothing can be read.
        OSError: The checkpoints cannot be listed, or none of them can be read.
    """
    # Rank 0 looks and tells the others, so that all load the same one.
    candidates = read_on_first_rank(lambda: [each for each in reversed(_steps(folder)) if step in (None, each)])
    left_out, unread = [], None
    for each in candidates:
        try:
            _load_patiently(load, folder, each, candidates)
        except (CheckpointDamaged, CheckpointUnreadable, PermissionError) as problem:
            left_out.append(f"step {each}: {problem}")
            unread = problem if isinstance(problem, OSError) else unread
            if dist.get_rank() == 0:
                what = "is damaged" if isinstance(problem, CheckpointDamaged) else "cannot be read, though others can,"
                logger.warning("checkpoint %s %s and skipped: %s", folder.step_url(each), what, problem)
        else:
            return each
    if not candidates:
        return None
    named = "; ".join(left_out[:_MOST_NAMED] + ["…"] * (len(left_out) > _MOST_NAMED))
    if unread is not None:
        raise CheckpointUnreadable(f"no checkpoint in {folder.url} can be read: {named}")
    raise ValueError(
        f"no checkpoint in {folder.url} is intact; restore its files, or remove the folder to start over: {named}"
    )


def _load_patiently(
    load: Callable[[int], None], folder: CheckpointFolder, step: int, candidates: Sequence[int]
) -> None:
    """Load a checkpoint, and try again if that fails.

    Raises:
        CheckpointDamaged: On all ranks: it was damaged twice, or is on a disk, where reading again helps nothing.
        CheckpointUnreadable: On all ranks: it has failed between two times that another could be read.
        PermissionError: Likewise.
        StoreAway: On all ranks: nothing can be read.
    """
    deadline = time.monotonic() + STORE_PATIENCE_SECONDS  # of the first rank alone
    attempts, others_answered = 0, False
    while True:
        attempts += 1
        try:
            _refuse_incomplete(folder, step)
            load(step)
        except CheckpointDamaged:
            if folder.is_local or attempts > 1:
                raise
        except (CheckpointUnreadable, PermissionError) as failure:
            others_answer, is_too_late = read_on_first_rank(
                lambda: (_another_answers(folder, step, candidates), time.monotonic() > deadline)
            )
            if others_answered and others_answer and attempts > 1:
                raise
            if is_too_late:
                raise StoreAway(f"checkpoint {folder.step_url(step)} cannot be read: {failure}") from failure
            others_answered = others_answer
            if dist.get_rank() == 0:
                logger.warning(
                    "checkpoint %s cannot be read; retrying in %g s: %s", folder.step_url(step), RETRY_SECONDS, failure
                )
            time.sleep(RETRY_SECONDS)
        else:
            return


def _another_answers(folder: CheckpointFolder, step: int, candidates: Sequence[int]) -> bool:
    """Whether the store returns all of another intact checkpoint's smallest files."""
    for other in [each for each in candidates if each != step][:_PROBED_CHECKPOINTS]:
        try:
            manifest = folder.manifest(other)
            smallest = sorted(manifest.files, key=lambda name: manifest.files[name].bytes)[:_PROBED_FILES]
            if not folder.damage_of(manifest, smallest):
                return True
        except Exception as error:  # stores raise types of their own
            logger.warning("checkpoint %s cannot be read either: %s", folder.step_url(other), error)
    return False


def _refuse_incomplete(folder: CheckpointFolder, step: int) -> None:
    """Check a checkpoint's manifest and file sizes on the first rank, which is cheap."""

    def damage() -> str:
        try:
            return folder.checkpoint(step).damage
        except FileNotFoundError:
            return f"{folder.step_url(step)} is gone"

    if problem := read_on_first_rank(damage):
        raise CheckpointDamaged(problem)


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
