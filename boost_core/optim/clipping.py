"""Gradient clipping by the norm over all shards."""

from collections.abc import Sequence

import torch

from boost_core.parallel.collectives import Collectives


def clip_by_global_norm_(gradients: Sequence[torch.Tensor], clip_norm: float, tensor_parallel: Collectives) -> float:
    """Scale ``gradients`` in place so that their norm over all tensor parallel shards is at most ``clip_norm``.

    Under BTP every weight is sharded, so the squares of all ranks add up without counting any twice.

    Returns:
        The global norm before clipping.
    """
    squares = torch.stack([gradient.to(torch.float64).square().sum() for gradient in gradients]).sum()
    norm = tensor_parallel.all_reduce_(squares, "gradient norm").sqrt()
    torch._foreach_mul_(list(gradients), (clip_norm / (norm + 1e-6)).clamp(max=1.0).item())
    return norm.item()
