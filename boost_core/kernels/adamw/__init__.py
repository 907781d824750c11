"""AdamW on flat fp32 masters, with clipping before it and rounding after it, in one pass (arXiv 1711.05101).

With gradient ``g``, moments ``m``, ``v``, master ``p``, step t from 1 and clip factor ``k``::

    m = β₁ m + (1 − β₁) k g
    v = β₂ v + (1 − β₂) (k g)²
    p = p (1 − lr · decay) − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)
    w = p                                 rounded to the compute type

torch's own fused AdamW neither clips nor writes w: that would be two more passes over all weights. The clip factor
stays on the device, so that nobody waits for the gradients' norm.
"""

import torch

from boost_core.kernels.adamw import naive
from boost_core.kernels.adamw.update import AdamWUpdate
from boost_core.kernels.dispatch import runs_on_triton


def adamw_(
    master: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    weight: torch.Tensor | None,
    clip: torch.Tensor,
    update: AdamWUpdate,
) -> None:
    """Update ``master`` and its moments in place, and ``weight`` with it.

    Args:
        master: fp32, flat and dense, as are all others.
        gradient: Its gradient, fp32; it may be overwritten.
        first: Running mean of the gradient.
        second: Running mean of its square.
        weight: What the model computes with; ``None`` if that is the master itself.
        clip: Factor for the gradient: one fp32 element on the same device.
        update: Rates and step.
    """
    if runs_on_triton(master):
        # Imported here because Triton is not installed where there is no GPU.
        from boost_core.kernels.adamw import triton

        triton.adamw_(master, gradient, first, second, weight, clip, update)
    else:
        naive.adamw_(master, gradient, first, second, weight, clip, update)
