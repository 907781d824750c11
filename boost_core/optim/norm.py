"""The true global norm of the gradients, and clipping by it."""

from collections.abc import Sequence

import torch

from boost_core.optim.group import Group
from boost_core.parallel.ranks import Ranks


def global_norm(groups: Sequence[Group], ranks: Ranks) -> torch.Tensor:
    """Norm of the reduced gradients of the whole model: one float64 element, the same on all ranks.

    Args:
        groups: This rank's.
        ranks: The groups that it is in. What several of them have whole, or keep all of, counts on the first.
    """
    squares = [
        group.squares()
        for group in groups
        if (group.kind.split or ranks.tensor.rank == 0)
        and (group.sharded or ranks.data.rank == 0)
        and (not group.kind.tied or ranks.pipeline.rank == 0)
    ]
    # A rank may have nothing to count.
    total = sum(squares, torch.zeros((), dtype=torch.float64, device=groups[0].own_gradient.device))
    return ranks.gang.all_reduce_(total, "gradient norm").sqrt()


def clip_factor(norm: torch.Tensor, clip_norm: float) -> torch.Tensor:
    """What gradients of a norm are multiplied by so that it becomes at most ``clip_norm``: one fp32 element."""
    return (clip_norm / (norm + 1e-6)).clamp(max=1.0).float().view(1)
