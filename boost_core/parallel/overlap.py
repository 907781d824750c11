"""Computations that take turns: while an exchange of one is under way, the others compute.

With ``parallelism.split_micro_batch``, the two halves of a micro-batch go through the blocks as two coroutines of the
same code. Where one awaits an exchange, the other goes on to its own next exchange.
"""

from collections.abc import Callable, Coroutine, Generator, Sequence
from typing import Generic, TypeVar

Result = TypeVar("Result")

Computation = Coroutine[None, None, Result]


class Turn(Generic[Result]):
    """An exchange under way, to be awaited.

    Args:
        wait: Waits for the exchange, and returns its result.
        ends: Whether the other computations go on before it is waited for.
    """

    def __init__(self, wait: Callable[[], Result], ends: bool) -> None:
        self._wait, self._ends = wait, ends

    def __await__(self) -> Generator[None, None, Result]:
        if self._ends:
            yield
        return self._wait()


def run_in_turns(computations: Sequence[Computation[Result]]) -> list[Result]:
    """Run computations in turns, each to its next exchange, and return their results."""
    results: dict[int, Result] = {}
    try:
        while len(results) < len(computations):
            for index, computation in enumerate(computations):
                if index not in results:
                    try:
                        computation.send(None)
                    except StopIteration as end:
                        results[index] = end.value
    finally:
        for computation in computations:
            computation.close()
    return [results[index] for index in range(len(computations))]
