"""Detects that training diverges, and limits how often it may."""

import statistics
import sys
from collections import deque

from boost_core.config.faults import FaultToleranceConfig

RECENT_STEPS = 32
WINDOW_STEPS = 100


class DivergenceDetector:
    """Tracks recent losses. Ranks given the same losses decide the same.

    Args:
        config: The jump that counts as divergence, and how many divergences are too many.
    """

    def __init__(self, config: FaultToleranceConfig) -> None:
        self._config = config
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._divergences: deque[int] = deque(maxlen=config.max_divergences)

    @property
    def limit(self) -> float:
        """The loss above which the next step has diverged; unlimited until the window is full."""
        if self._config.loss_jump is None or len(self._recent) < RECENT_STEPS:
            return sys.float_info.max
        return statistics.median(self._recent) + self._config.loss_jump

    def update(self, loss: float) -> None:
        """Record the loss of a step that did not diverge."""
        self._recent.append(loss)

    def too_many(self, step: int) -> bool:
        """Record a divergence, and return whether there have been too many recently."""
        self._divergences.append(step)
        full = len(self._divergences) == self._config.max_divergences
        return full and step - self._divergences[0] < WINDOW_STEPS
