"""Rotary position embedding of queries and keys, between their up-projection and attention.

For position t of a sequence and each pair (a, b) of elements i and i + e/2 of a head, with angle φ = t θ^(−2i/e)::

    a′ = a cos φ − b sin φ,   b′ = b cos φ + a sin φ

and backward the same with −φ (RoFormer, arXiv 2104.09864; pairs as in LLaMA). Queries, keys and values come from
batched up-projections one after the other in one tensor; queries and keys are rotated in place, which is the
layout that attention reads, and backward the three gradients are written side by side, as the projections' backward
pass reads them: nothing is permuted or copied in between. Shape suffixes: g projections, T = b·s tokens, d = heads · e,
s positions, e head size.
"""

import torch

from boost_core.kernels.dispatch import runs_on_triton
from boost_core.kernels.rotary import naive


def rotary(parts: list[torch.Tensor], cosine_se: torch.Tensor, sine_se: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rotate queries and keys, and leave values alone.

    Args:
        parts: Queries, keys and values in this order, in tensors ``[g, T, d]`` of one or more of them: ``[3, T, d]``,
            or ``[1, T, d]`` and ``[2, T, d′]``, or three of one; or keys and values alone, or queries with values of no
            width. Owned by this call: their memory may be reused for the result.
        cosine_se: Cosines of each position's angles, ``[s, e/2]``, at least fp32; T is a multiple of s.
        sine_se: Their sines.

    Returns:
        Each as ``[T, d]``.
    """
    if runs_on_triton(parts[0]):
        # Imported here because Triton is not installed where there is no GPU.
        from boost_core.kernels.rotary import triton

        return triton.rotary(parts, cosine_se, sine_se)
    return naive.rotary(parts, cosine_se, sine_se)
