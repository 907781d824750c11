"""Which of many cases to run where all of them would prove no more."""

from collections.abc import Callable, Hashable, Iterable, Sequence
from itertools import combinations
from typing import TypeVar

Case = TypeVar("Case")


def pairwise(cases: Sequence[Case], choices: Callable[[Case], Iterable[Hashable]]) -> list[Case]:
    """Few cases in which any two choices are made together that are made together in some case.

    Args:
        cases: All that are legal.
        choices: What a case chooses, in the same order for each.
    """
    pairs = [set(combinations(enumerate(choices(case)), 2)) for case in cases]
    left, chosen = set().union(*pairs), set()
    while left:
        best = max(range(len(cases)), key=lambda index: len(pairs[index] & left))
        chosen.add(best)
        left -= pairs[best]
    return [cases[index] for index in sorted(chosen)]
