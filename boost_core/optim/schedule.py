"""The learning rate: linear warm-up, then a cosine down to a share of the peak."""

import math

from boost_core.config.training import OptimizerConfig


def learning_rate(step: int, steps: int, optimizer: OptimizerConfig) -> float:
    """Learning rate of the optimizer step number ``step``, counted from 1 to ``steps``."""
    if step <= optimizer.warmup_steps:
        return optimizer.learning_rate * step / optimizer.warmup_steps
    progress = (step - optimizer.warmup_steps) / (steps - optimizer.warmup_steps)
    cosine = 0.5 * (1 + math.cos(math.pi * progress))
    floor = optimizer.final_learning_rate_ratio
    return optimizer.learning_rate * (floor + (1 - floor) * cosine)
