"""What a block adds to the residual stream, and the sum of squares that the next norm needs, in one pass.

::

    x = x + y
    s = Σ_d x²

and backward, where x continues in the stream and into the next projection, with gradients ``dx₁``, ``dx₂``, ``ds``::

    dx = dy = dx₁ + dx₂ + 2 x ds

One pass reads x and y, another one three gradients, where separate additions would read and write each sum again (the
fused norm's backward, BOOST, arXiv 2512.12131, derived here). Shape suffixes: T tokens, d hidden, whole or this rank's
shard.
"""

from typing import NamedTuple

import torch

from boost_core.kernels.dispatch import runs_on_triton
from boost_core.kernels.residual_add import naive


class Residual(NamedTuple):
    """The residual stream between two additions.

    Attributes:
        stream: The values for the next addition, ``[T, d]``.
        inputs: The same values for the next projection. Two names for them, so that both gradients arrive together.
        squares: Sum of squares of each row, ``[T]``, at least fp32; ``None`` if no norm needs it.
    """

    stream: torch.Tensor
    inputs: torch.Tensor
    squares: torch.Tensor | None


def residual_add(x_Td: torch.Tensor, y_Td: torch.Tensor, fp8: bool = False) -> Residual:
    """Compute ``x + y`` and its sums of squares.

    Args:
        x_Td: The stream so far, ``[T, d]``.
        y_Td: A block's output, of the same shape and type.
        fp8: Whether the kernel also leaves the rows for a scaled product (``fp8_product.quantised``).
    """
    if runs_on_triton(x_Td):
        # Imported here because Triton is not installed where there is no GPU.
        from boost_core.kernels.residual_add import triton

        return Residual(*triton.residual_add(x_Td, y_Td, fp8))
    return Residual(*naive.residual_add(x_Td, y_Td))


def residual_start(x_Td: torch.Tensor, fp8: bool = False) -> Residual:
    """Return the stream before anything is added: ``x`` with its sums of squares; ``fp8`` as in ``residual_add``."""
    if runs_on_triton(x_Td):
        from boost_core.kernels.residual_add import triton

        return Residual(*triton.residual_add(x_Td, None, fp8))
    return Residual(*naive.residual_add(x_Td, None))
