"""Curves one line high."""

import math
from collections.abc import Sequence
from typing import TypeGuard

_BLOCKS = "▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float | None]) -> str:
    """Draw a block for each value, taller for larger values; a blank for missing and non-finite ones."""
    numbers = [value for value in values if _is_number(value)]
    if not numbers:
        return " " * len(values)
    low, high = min(numbers), max(numbers)
    return "".join(_block(value, low, high) for value in values)


def _block(value: float | None, low: float, high: float) -> str:
    if not _is_number(value):
        return " "
    share = (value - low) / (high - low) if high > low else 0.5
    return _BLOCKS[min(int(share * len(_BLOCKS)), len(_BLOCKS) - 1)]


def _is_number(value: float | None) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
