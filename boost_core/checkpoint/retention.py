"""Which checkpoints a job no longer needs. Does not import torch."""

from collections.abc import Collection, Sequence


def prunable(
    steps: Sequence[int],
    keep_last: int | None,
    keep_every: int | None,
    pinned: Collection[int] = (),
    damaged: Collection[int] = (),
) -> list[int]:
    """Steps whose checkpoints may be removed, ascending.

    Args:
        steps: Steps with a committed checkpoint, ascending.
        keep_last: Number of newest checkpoints to keep; ``None``: all.
        keep_every: Checkpoints at multiples of this many steps are kept as well.
        pinned: Steps that are always kept.
        damaged: Steps that do not count among the newest, so that checkpoints to resume from are kept.
    """
    intact = [step for step in steps if step not in damaged]
    if keep_last is None or len(intact) < keep_last:
        return []
    older = [step for step in steps if step < intact[-keep_last]]
    return [step for step in older if step not in pinned and (not keep_every or step % keep_every)]
