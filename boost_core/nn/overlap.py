"""Computations in segments, so that several overlap by taking turns, and what is recomputed in the backward pass."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")

# Yields a function that waits for an exchange in flight, and is sent that exchange's result; returns its own result.
Segments = Generator[Callable[[], Any], Any, Result]


def run_together(computations: Sequence[Segments[Result]]) -> list[Result]:
    """Run computations in turns, a segment each, and return their results; all have the same number of segments."""
    waits, results = [next(computation) for computation in computations], list[Result]()
    while not results:
        for index, computation in enumerate(computations):
            try:
                waits[index] = computation.send(waits[index]())
            except StopIteration as end:
                results.append(end.value)
    return results


def no_recompute(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function; autograd keeps what it needs."""
    return function(*arguments)


def checkpoint_block(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function; autograd keeps only its arguments, and calls it again for the rest (arXiv 1604.06174)."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def checkpoint_segment(function: Callable[..., Any], *arguments: Any) -> Any:
    """As ``checkpoint_block``, but without repeating the exchanged product that ends the work; see ``in_recompute``."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=_first_and_again)


def in_recompute() -> bool:
    """Whether this is the backward pass's recomputation, in which nothing reads the product that was exchanged."""
    return _recomputes.get()


_recomputes: ContextVar[bool] = ContextVar("recomputes", default=False)


def _first_and_again() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _recomputing()


@contextmanager
def _recomputing() -> Iterator[None]:
    before = _recomputes.set(True)
    try:
        yield
    finally:
        _recomputes.reset(before)
