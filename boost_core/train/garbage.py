"""Python's garbage collector, run between steps.

Left to itself it would run at moments that differ from rank to rank, holding up one rank in one step and another in the
next, and with each of them all others.
"""

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

FULL_EVERY_STEPS = 100


@contextmanager
def collected_between_steps() -> Iterator[Callable[[int], None]]:
    """Run the collector only when the yielded function is called, after a step with its number; on all ranks alike."""
    automatic = gc.isenabled()
    gc.disable()
    try:
        yield _collect
    finally:
        if automatic:
            gc.enable()


def _collect(step: int) -> None:
    gc.collect(2 if step % FULL_EVERY_STEPS == 0 else 1)


def release_broken_step(error: BaseException) -> None:
    """Drop every reference to the state, and its connections, left by a step that failed.

    The frames that the error and its causes passed through hold them, and so do ready tasks in torch's backward queue,
    which this thread's next backward pass discards.
    """
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__ or each.__context__
    torch.zeros((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
