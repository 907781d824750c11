"""Computations in stages, so that several can take turns, and what a stage remembers for its backward pass."""

from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

from torch.utils.checkpoint import checkpoint

Result = TypeVar("Result")

# Pauses where it would wait; returns its result.
Stages = Generator[None, None, Result]

# Calls a function with arguments.
Local = Callable[..., Any]


def run_together(computations: Sequence[Stages[Result]]) -> list[Result]:
    """Run computations in turns, a stage each, and return their results; all have equally many stages."""
    while True:
        finished = [_advance(computation) for computation in computations]
        if all(finished):
            return [result for ended in finished for result in ended]


def _advance(computation: Stages[Result]) -> list[Result]:
    """Run one stage; the result, if it was the last one."""
    try:
        next(computation)
    except StopIteration as end:
        return [end.value]
    return []


def plainly(function: Local, *arguments: Any) -> Any:
    """Call a function; autograd remembers what it needs of it."""
    return function(*arguments)


def forgetfully(function: Local, *arguments: Any) -> Any:
    """Call a function; autograd remembers only its arguments, and calls it again for the rest (arXiv 1604.06174)."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False)


def forgetfully_between(function: Local, *arguments: Any) -> Any:
    """As ``forgetfully``, for work that ends in what is exchanged, which is not computed again; see ``is_sent``."""
    return checkpoint(function, *arguments, use_reentrant=False, preserve_rng_state=False, context_fn=_first_and_again)


def is_sent() -> bool:
    """Whether what this work ends in has been exchanged already, so that nobody will read it."""
    return _again.get()


_again: ContextVar[bool] = ContextVar("again", default=False)


def _first_and_again() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    return nullcontext(), _computing_again()


@contextmanager
def _computing_again() -> Iterator[None]:
    before = _again.set(True)
    try:
        yield
    finally:
        _again.reset(before)
