"""Gradient clipping by the norm over all shards."""

from collections.abc import Mapping

import torch

from boost_core.parallel.collectives import Collectives


def global_norm(
    gradients: Mapping[str, torch.Tensor], axes: Mapping[str, int | None], tensor_parallel: Collectives
) -> torch.Tensor:
    """Norm of the gradients over all tensor parallel shards: one float64 element, the same on all ranks.

    Args:
        gradients: This rank's gradient of each weight.
        axes: The axis that each weight is split along; ``None`` for one that every rank has whole, which is
            counted once.
        tensor_parallel: The tensor parallel group.
    """
    norms = [
        torch.linalg.vector_norm(gradient, dtype=torch.float64)
        for name, gradient in gradients.items()
        if axes[name] is not None or tensor_parallel.rank == 0
    ]
    squares = torch.stack(norms).square().sum()
    return tensor_parallel.all_reduce_(squares, "gradient norm").sqrt()


def clip_factor(norm: torch.Tensor, clip_norm: float) -> torch.Tensor:
    """What gradients of a norm are multiplied by so that it becomes at most ``clip_norm``: one fp32 element."""
    return (clip_norm / (norm + 1e-6)).clamp(max=1.0).float().view(1)
