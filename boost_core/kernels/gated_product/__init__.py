"""The MLP's gate: the product of two up-projections, one of them optionally through a SiLU.

::

    h = silu(a) ∘ b          dh gives  db = dh ∘ silu(a),  da = dh ∘ b ∘ silu'(a)
    h = a ∘ b                          db = dh ∘ a,        da = dh ∘ b

(SwiGLU, arXiv 2002.05202; without the SiLU, CoLA's, arXiv 2502.10940.) The batched up-projection returns a and b one
after the other in one tensor, and its backward pass needs their gradients in the same form: they are written there
directly. Shape suffixes: g projections, T tokens, f MLP.
"""

import torch

from boost_core.kernels.dispatch import runs_on_triton
from boost_core.kernels.gated_product import naive


def gated_product(parts: list[torch.Tensor], activation: bool, fp8: bool = False) -> torch.Tensor:
    """Compute the gated product, ``[T, f]``.

    Args:
        parts: Gate and up, ``[2, T, f]`` or two of ``[1, T, f]``.
        activation: Whether the gate passes through a SiLU.
        fp8: Whether the kernel also leaves the rows for a scaled product (``fp8_product.quantised``).
    """
    if runs_on_triton(parts[0]):
        # Imported here because Triton is not installed where there is no GPU.
        from boost_core.kernels.gated_product import triton

        return triton.gated_product(parts, activation, fp8)
    return naive.gated_product(parts, activation)
