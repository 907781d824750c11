"""Telling that training diverges, and how often it may."""

import statistics
import sys
from collections import deque

from boost_core.config.faults import FaultToleranceConfig

RECENT_STEPS = 32
WINDOW_STEPS = 100


class DivergenceDetector:
    """Knows the recent losses. Ranks that are told the same say the same.

    Args:
        config: The jump that counts as divergence, and how many divergences are too many.
    """

    def __init__(self, config: FaultToleranceConfig) -> None:
        self._config = config
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._divergences: deque[int] = deque(maxlen=config.max_divergences)

    @property
    def limit(self) -> float:
        """The loss above which the next step has diverged; known from a full window on."""
        if self._config.loss_jump is None or len(self._recent) < RECENT_STEPS:
            return sys.float_info.max
        return statistics.median(self._recent) + self._config.loss_jump

    def update(self, loss: float) -> None:
        """Take the loss of a step that went well."""
        self._recent.append(loss)

    def too_many(self, step: int) -> bool:
        """Take a divergence; whether there have been too many of them of late."""
        self._divergences.append(step)
        full = len(self._divergences) == self._config.max_divergences
        return full and step - self._divergences[0] < WINDOW_STEPS
