"""Python's garbage collector, run between steps.

At moments of its own, which differ from rank to rank, it would hold up one rank in one step and another in the next,
and with each of them all others.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager

FULL_EVERY_STEPS = 100


@contextmanager
def collected_between_steps() -> Iterator["GarbageCollector"]:
    """The collector runs only when it is told to meanwhile."""
    automatic = gc.isenabled()
    gc.disable()
    try:
        yield GarbageCollector()
    finally:
        gc.unfreeze()
        if automatic:
            gc.enable()


class GarbageCollector:
    """Collects what steps leave behind, at the same steps on all ranks."""

    def __init__(self) -> None:
        self._frozen = False

    def after_step(self, step: int) -> None:
        """Collect; after the first step whatever there is, from then on what has come since."""
        if not self._frozen:
            gc.collect()
            gc.freeze()  # modules, model and compiled kernels are here to stay: a full pass need not look at them
            self._frozen = True
        elif step % FULL_EVERY_STEPS == 0:
            gc.collect()
        else:
            gc.collect(1)
