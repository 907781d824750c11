"""Gradient clipping by the norm over all shards."""

from collections.abc import Mapping

import torch

from boost_core.parallel.collectives import Collectives


def clip_by_global_norm_(
    gradients: Mapping[str, torch.Tensor],
    axes: Mapping[str, int | None],
    clip_norm: float,
    tensor_parallel: Collectives,
) -> float:
    """Scale ``gradients`` in place so that their norm over all tensor parallel shards is at most ``clip_norm``.

    Args:
        gradients: This rank's gradient of each weight.
        axes: The axis that each weight is split along; ``None`` for one that every rank has whole, which is
            counted once.
        clip_norm: The largest norm.
        tensor_parallel: The tensor parallel group.

    Returns:
        The global norm before clipping.
    """
    counted = [gradient for name, gradient in gradients.items() if axes[name] is not None or tensor_parallel.rank == 0]
    squares = torch.stack([gradient.to(torch.float64).square().sum() for gradient in counted]).sum()
    norm = tensor_parallel.all_reduce_(squares, "gradient norm").sqrt()
    torch._foreach_mul_(list(gradients.values()), (clip_norm / (norm + 1e-6)).clamp(max=1.0).item())
    return norm.item()
