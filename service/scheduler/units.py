"""Counting in units: amounts that must be free together on one node. ``backfill`` says what for."""

import math

from boost_core.config import Layout
from service.scheduler.demand import Amounts, Demand
from service.scheduler.placement import ROUNDING, copies


def units_in(amounts: Amounts, unit: Amounts) -> int:
    """For how many units there is room; none if nothing decides."""
    return copies(amounts, unit) if unit else 0


def units_taken(demand: Demand, layout: Layout, unit: Amounts) -> tuple[int, int]:
    """The fewest and the most units for which there is no more room beside a gang."""
    size, count = demand.groups(layout)
    parts = [size * demand.each.get(name, 0) / amount for name, amount in unit.items()]
    if not parts:
        return 0, 0
    return count * math.floor(min(parts) + ROUNDING), count * math.ceil(max(parts) - ROUNDING)


class Taken:
    """How many units may be taken in all: every sum of one number of some ranges.

    Args:
        spare: How many may be; larger sums are of no interest.
    """

    def __init__(self, spare: int) -> None:
        self._spare, self._mask = spare, (1 << max(0, spare + 1)) - 1
        self._sums = 1 & self._mask  # a bit for each

    def add(self, low: int, high: int) -> None:
        """There may be one more who takes units: none, or a number of a range."""
        shifted, width = self._sums << low, 1
        while width <= high - low:
            step = min(width, high - low + 1 - width)
            shifted |= shifted << step
            width += step
        self._sums = (self._sums | shifted) & self._mask

    def too_much_with(self, more: int) -> bool:
        """Whether there is a sum that is not too much, and is with some more."""
        return more > 0 and self._sums >> max(0, self._spare - more + 1) != 0
