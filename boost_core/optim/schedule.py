"""The learning rate: a linear warm-up to the peak, and then the job's schedule.

========  ==========================================================================================================
cosine    half a cosine from the peak down to a share of it (SGDR, arXiv 1608.03983)
linear    a straight line down to it
constant  the peak, to the end
wsd       warm-up, stable, decay: the peak, and a straight line down to the share in the last steps (MiniCPM, arXiv
          2404.06395); what comes before the decay does not depend on the number of steps
========  ==========================================================================================================
"""

import math

from boost_core.config.training import OptimizerConfig


def learning_rate(step: int, steps: int, optimizer: OptimizerConfig) -> float:
    """Return the learning rate of the optimizer step number ``step``, counted from 1 to ``steps``."""
    step = min(step, steps)  # a job file may say of earlier values that they held for longer
    if step <= optimizer.warmup_steps:
        return optimizer.learning_rate * step / optimizer.warmup_steps
    # How much is left of the way from the peak, 1, to the share at which the schedule ends, 0.
    way = max(1, steps - optimizer.warmup_steps)  # a job file may say of earlier values that they were all warm-up
    progress = (step - optimizer.warmup_steps) / way
    decay = optimizer.decay_steps or -(-way // 10)  # at the end
    height = {
        "cosine": 0.5 * (1 + math.cos(math.pi * progress)),
        "linear": 1 - progress,
        "constant": 1.0,
        "wsd": min(1.0, (steps - step) / decay),
    }[optimizer.schedule]
    floor = optimizer.final_learning_rate_ratio
    return optimizer.learning_rate * (floor + (1 - floor) * height)
