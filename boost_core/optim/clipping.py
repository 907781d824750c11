"""Gradient clipping by the true global norm."""

import torch

from boost_core.parallel.collectives import Collectives


def global_norm(gradients_n: torch.Tensor, counted_b: torch.Tensor, tensor_parallel: Collectives) -> torch.Tensor:
    """Norm of the gradients over all tensor parallel shards: one float64 element, the same on all ranks.

    Args:
        gradients_n: This rank's gradients, flat.
        counted_b: Which of b equal blocks of them count; what several ranks have whole counts on one.
        tensor_parallel: The tensor parallel group.
    """
    # Within a block fp32 is precise enough; there are many blocks.
    norms_b = torch.linalg.vector_norm(gradients_n.view(len(counted_b), -1), dim=1)
    squares = (norms_b.double() * counted_b).square().sum()
    return tensor_parallel.all_reduce_(squares, "gradient norm").sqrt()


def clip_factor(norm: torch.Tensor, clip_norm: float) -> torch.Tensor:
    """What gradients of a norm are multiplied by so that it becomes at most ``clip_norm``: one fp32 element."""
    return (clip_norm / (norm + 1e-6)).clamp(max=1.0).float().view(1)
