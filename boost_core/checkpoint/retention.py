"""Which checkpoints a job no longer needs. Torch-free."""

from collections.abc import Collection, Sequence


def prunable(
    steps: Sequence[int],
    keep_last: int | None,
    keep_every: int | None,
    pinned: Collection[int] = (),
    damaged: Collection[int] = (),
) -> list[int]:
    """Steps whose checkpoints may go, ascending.

    Args:
        steps: Steps with a committed checkpoint, ascending.
        keep_last: How many of the newest stay; ``None``: all.
        keep_every: Multiples of this many steps stay, too.
        pinned: Steps that stay, whatever else is said.
        damaged: Steps that do not count among the newest, so that what can be resumed from stays.
    """
    intact = [step for step in steps if step not in damaged]
    if keep_last is None or len(intact) < keep_last:
        return []
    older = [step for step in steps if step < intact[-keep_last]]
    return [step for step in older if step not in pinned and (not keep_every or step % keep_every)]
