"""LaX's crossing: a latent meets the gated latent of the previous block, then a norm and the activation.

With ``h`` and ``s`` as in ``latent_epilogue`` and ``c`` what the gate let through::

    u = h / sqrt(s / d + epsilon) + c        (h + c where no norm precedes the projection)
    n = (u − mean(u)) / sqrt(var(u) + norm_epsilon)
    z = silu(n ∘ scale + shift)              (without the SiLU for the SVD family)

and backward, with ``dy = dz · silu'(y)`` and ``dn = dy ∘ scale``::

    dc = du = (dn − mean(dn) − n mean(dn ∘ n)) / sqrt(var(u) + norm_epsilon)
    dscale = Σ_T dy ∘ n,  dshift = Σ_T dy
    dh = du / sqrt(s / d + epsilon),  ds = −(Σ_r du ∘ (u − c)) / (2 d (s / d + epsilon))

where Σ_r du ∘ u = norm_epsilon / (var(u) + norm_epsilon) Σ_r dn ∘ n: du is nearly orthogonal to u, and summed term by
term most of it would cancel. (LaX, arXiv 2505.21732.) Shape suffixes: T tokens, g projections, r rank, c = g·r columns.
"""

import torch

from boost_core.kernels.dispatch import runs_on_triton
from boost_core.kernels.latent_crossing import naive


def latent_crossing(
    h_Tc: torch.Tensor,
    s_T: torch.Tensor | None,
    width: int,
    epsilon: float,
    crossed_gTr: torch.Tensor,
    scale_gr: torch.Tensor,
    shift_gr: torch.Tensor,
    norm_epsilon: float,
    activation: bool,
    fp8: bool = False,
) -> torch.Tensor:
    """Compute the latents ``z_gTr`` that go on to the up-projection and to the next block.

    Args:
        h_Tc: Reduced latents of all projections, ``[T, g·r]``.
        s_T: Sum of squares of each residual row, ``[T]``; ``None`` where no norm precedes the projection.
        width: The full hidden size d that the squares were summed over.
        epsilon: Added to the mean square.
        crossed_gTr: The gate's output for the previous block's latents.
        scale_gr: Scale of the latents' norm.
        shift_gr: Its shift.
        norm_epsilon: Added to the latents' variance.
        activation: Whether the bottleneck has a SiLU.
        fp8: Whether the kernel also leaves the rows for a product (``fp8_product.quantised``).
    """
    if runs_on_triton(h_Tc):
        # Imported here because Triton is not installed where there is no GPU.
        from boost_core.kernels.latent_crossing import triton

        return triton.latent_crossing(
            h_Tc, s_T, width, epsilon, crossed_gTr, scale_gr, shift_gr, norm_epsilon, activation, fp8
        )
    return naive.latent_crossing(h_Tc, s_T, width, epsilon, crossed_gTr, scale_gr, shift_gr, norm_epsilon, activation)
