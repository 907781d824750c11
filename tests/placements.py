"""Placements of other systems, for comparisons, and tests in which ranks need each other's keys; no job uses any."""

from collections.abc import Callable, Mapping

from boost_core.context.placement import Placement, Window, place


def zigzag(window: Window, ranks: int) -> Placement:
    """A piece from the front and one from the back: balanced for a single causal sequence, as in rings."""
    count = window.chunks // ranks
    fronts = [rank for rank in range(ranks) for _ in range(count // 2)]
    return fronts + [rank for rank in reversed(range(ranks)) for _ in range(count - count // 2)]


def striped(window: Window, ranks: int) -> Placement:
    """Round robin, as MTraining does for attention along diagonals."""
    return [chunk % ranks for chunk in range(window.chunks)]


OTHERS: Mapping[str, Callable[[Window, int], Placement]] = {"zigzag": zigzag, "striped": striped}


def placed(window: Window, ranks: int, how: str) -> Placement:
    """By one of these or of the trainer's placements."""
    return OTHERS[how](window, ranks) if how in OTHERS else place(window, ranks, how)
