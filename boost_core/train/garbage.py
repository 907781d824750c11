"""Python's garbage collector, run between steps.

At moments of its own, which differ from rank to rank, it would hold up one rank in one step and another in the next,
and with each of them all others.
"""

import gc
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

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


def release_broken_step(error: BaseException) -> None:
    """Have nothing hold the state that a step was at work on when it failed, nor the state's connections.

    The frames that the error and its causes came through do, and so does what was ready in torch's queue of the
    backward pass, which this thread's next backward pass throws away.
    """
    each: BaseException | None = error
    while each is not None:
        traceback.clear_frames(each.__traceback__)
        each = each.__cause__ or each.__context__
    torch.zeros((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
