"""Python's garbage collector, run between steps.

At moments of its own, which differ from rank to rank, it would hold up one rank in one step and another in the next,
and with each of them all others.
"""

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager

FULL_EVERY_STEPS = 100


@contextmanager
def collected_between_steps() -> Iterator[Callable[[int], None]]:
    """The collector runs only when what this gives is called, after a step with its number; on all ranks alike."""
    automatic = gc.isenabled()
    gc.disable()
    try:
        yield _collect
    finally:
        if automatic:
            gc.enable()


def _collect(step: int) -> None:
    gc.collect(2 if step % FULL_EVERY_STEPS == 0 else 1)
