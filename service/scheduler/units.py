"""Counting in units: amounts that must be free together on one node. See ``backfill`` for their use."""

import math

from boost_core.config import Layout
from service.scheduler.demand import Amounts, Demand
from service.scheduler.placement import ROUNDING, copies


def units_in(amounts: Amounts, unit: Amounts) -> int:
    """The number of units that there is room for; 0 if no resource decides."""
    return copies(amounts, unit) if unit else 0


def units_taken(demand: Demand, layout: Layout, unit: Amounts) -> tuple[int, int]:
    """The fewest and the most units for which a gang leaves no room."""
    size, count = demand.groups(layout)
    parts = [size * demand.each.get(name, 0) / amount for name, amount in unit.items()]
    if not parts:
        return 0, 0
    return count * math.floor(min(parts) + ROUNDING), count * math.ceil(max(parts) - ROUNDING)


class Taken:
    """The possible total numbers of units taken: every sum of one number from each of some ranges.

    Args:
        spare: Maximum that may be taken; larger sums are ignored.
    """

    def __init__(self, spare: int) -> None:
        self._spare, self._mask = spare, (1 << max(0, spare + 1)) - 1
        self._sums = 1 & self._mask  # a bit for each

    def add(self, low: int, high: int) -> None:
        """Add a gang that may take units: none, or a number from a range."""
        shifted, width = self._sums << low, 1
        while width <= high - low:
            step = min(width, high - low + 1 - width)
            shifted |= shifted << step
            width += step
        self._sums = (self._sums | shifted) & self._mask

    def too_much_with(self, more: int) -> bool:
        """Whether some sum is within the maximum, but not with ``more`` added."""
        return more > 0 and self._sums >> max(0, self._spare - more + 1) != 0
