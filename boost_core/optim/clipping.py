"""Gradient clipping by the global norm of the whole model's gradients."""

from collections.abc import Sequence

import torch

from boost_core.optim.zero import ParamGroup
from boost_core.parallel.mesh import ProcessGroups


def global_norm(
    groups: Sequence[ParamGroup], process_groups: ProcessGroups, notices: Sequence[torch.Tensor] = ()
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Return the norm of the whole model's reduced gradients, and which notices any rank has given.

    Args:
        groups: This rank's groups.
        process_groups: The groups that it is in. What several ranks hold or keep whole counts on the first of them.
        notices: What all ranks are to know, one element each; they cost no collective of their own here.

    Returns:
        The norm, one float64 element, and for each notice the number of ranks that gave it; the same on all ranks.
    """
    squares = [
        group.squares()
        for group in groups
        if (group.kind.split or process_groups.tensor.rank == 0)
        and (group.sharded or process_groups.data.rank == 0)
        and (not group.kind.tied or process_groups.pipeline.rank == 0)
    ]
    # A rank may have nothing to count.
    total = sum(squares, torch.zeros((), dtype=torch.float64, device=groups[0].own_gradient.device))
    message = torch.stack([total, *(notice.to(total) for notice in notices)])
    square, *counts = process_groups.gang.all_reduce_(message, "gradient norm").unbind()
    return square.sqrt(), counts


def clip_factor(norm: torch.Tensor, clip_norm: float) -> torch.Tensor:
    """Return the factor that reduces gradients of this norm to at most ``clip_norm``: one fp32 element."""
    return (clip_norm / (norm + 1e-6)).clamp(max=1.0).float().view(1)
