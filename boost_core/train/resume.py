"""Finding the checkpoint to continue from."""

import logging
import time

import torch.distributed as dist

from boost_core.checkpoint.folder import CheckpointFolder

logger = logging.getLogger(__name__)

STORE_PATIENCE_SECONDS = 60.0
RETRY_SECONDS = 2.0
_MOST_NAMED = 3


def newest_checkpoint(folder: CheckpointFolder, resume_from: str | None) -> tuple[CheckpointFolder, int] | None:
    """The newest intact checkpoint of a job, or else of another's; ``None`` if there is none. All ranks call it.

    Args:
        folder: The job's checkpoints.
        resume_from: URL of the other's.

    Returns:
        Its folder and step, the same on all ranks.

    Raises:
        ValueError: All that there are are damaged, or there are none in ``resume_from``.
    """
    candidates = _candidates(folder, resume_from)
    left_out = []
    for url, step in candidates:
        found = CheckpointFolder(url)
        damage: list[list[str]] = [[]] * dist.get_world_size()
        dist.all_gather_object(damage, found.damage(step, dist.get_rank(), dist.get_world_size()))
        if not any(damage):
            return found, step
        problems = [problem for of_rank in damage for problem in of_rank]
        left_out.append(f"step {step}: {problems[0]}")
        if dist.get_rank() == 0:
            logger.warning("checkpoint %s is damaged and left out: %s", found.step_url(step), "; ".join(problems))
    if candidates:
        named = left_out[:_MOST_NAMED] + ["…"] * (len(left_out) > _MOST_NAMED)
        raise ValueError(
            f"no checkpoint in {candidates[0][0]} is intact; restore its files, or remove the folder to start anew: "
            f"{'; '.join(named)}"
        )
    return None


def _candidates(folder: CheckpointFolder, resume_from: str | None) -> list[tuple[str, int]]:
    """URL of the folder and step of each checkpoint to continue from, the newest first, the same on all ranks."""
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
    """Steps of its checkpoints. A store that is away is waited for, as it is when one is saved."""
    deadline = time.monotonic() + STORE_PATIENCE_SECONDS
    while True:
        try:
            return folder.steps()
        except (FileNotFoundError, PermissionError):  # it is there, and has said no
            raise
        except Exception as error:  # the clients of object stores raise types of their own
            if time.monotonic() > deadline:
                raise
            logger.warning("%s cannot be looked at, the next try is in %g s: %s", folder.url, RETRY_SECONDS, error)
        time.sleep(RETRY_SECONDS)
