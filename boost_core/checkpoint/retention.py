"""Which checkpoints a job no longer needs. Torch-free."""

from collections.abc import Sequence


def expendable(steps: Sequence[int], keep_last: int | None, keep_every: int | None) -> list[int]:
    """Steps whose checkpoints may go, ascending.

    Args:
        steps: Steps with a committed checkpoint, ascending.
        keep_last: How many of the newest stay; ``None``: all.
        keep_every: Multiples of this many steps stay, too.
    """
    if keep_last is None:
        return []
    return [step for step in steps[: max(0, len(steps) - keep_last)] if not keep_every or step % keep_every]
