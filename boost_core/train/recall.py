"""Detects that sparse attention loses more than a job allows."""

from collections import deque
from statistics import fmean

from boost_core.config.attention import SparseAttentionConfig

RECENT_STEPS = 32


class RecallWatch:
    """Tracks the recall of recent steps, and warns once when their mean falls below the target.

    Args:
        config: The target; ``None`` where attention is dense.
    """

    def __init__(self, config: SparseAttentionConfig | None) -> None:
        self._config = config
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._told = False

    def update(self, recall: float | None) -> str | None:
        """Record a step's recall, and return a warning if one is due."""
        if self._config is None or recall is None:
            return None
        self._recent.append(recall)
        if len(self._recent) < RECENT_STEPS:
            return None
        mean, target = fmean(self._recent), self._config.recall
        told, self._told = self._told, mean < target
        if told or not self._told:
            return None
        return (
            f"sparse attention kept {mean:.1%} of dense attention in the last {RECENT_STEPS} steps, below "
            f"training.attention.recall={target:g}; raise budget, or train densely until attention is sharper"
        )
