"""The true global norm of the gradients, and clipping by it."""

from collections.abc import Sequence

import torch

from boost_core.optim.group import Group
from boost_core.parallel.collectives import Collectives


def global_norm(
    groups: Sequence[Group], tensor_parallel: Collectives, replicas: Collectives, gang: Collectives
) -> torch.Tensor:
    """Norm of the reduced gradients of the whole model: one float64 element, the same on all ranks.

    Args:
        groups: This rank's.
        tensor_parallel: The tensor parallel group, of which the first rank counts what each has whole.
        replicas: The data parallel group, of which the first counts what each keeps all of.
        gang: All ranks.
    """
    squares = torch.stack(
        [
            group.squares()
            * ((group.kind.split or tensor_parallel.rank == 0) and (group.sharded or replicas.rank == 0))
            for group in groups
        ]
    ).sum()
    return gang.all_reduce_(squares, "gradient norm").sqrt()


def clip_factor(norm: torch.Tensor, clip_norm: float) -> torch.Tensor:
    """What gradients of a norm are multiplied by so that it becomes at most ``clip_norm``: one fp32 element."""
    return (clip_norm / (norm + 1e-6)).clamp(max=1.0).float().view(1)
