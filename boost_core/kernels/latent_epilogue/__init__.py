"""What happens to a latent between its all-reduce and its up-projection.

With ``h`` the reduced product of the raw residual and A∘γ, ``s`` the reduced sum of squares and ``d`` the
full hidden size::

    y = h / sqrt(s / d + epsilon)        (only where a norm precedes the projection)
    z = silu(y)                          (only where the family has an activation in its bottleneck)

and backward, with ``dz`` given::

    dy = dz · silu'(y)
    dh = dy / sqrt(s / d + epsilon)
    ds = −(Σ_r dy ∘ y) / (2 d (s / d + epsilon))

All of ``h``, ``s``, ``z``, ``dz`` are replicated over the tensor parallel ranks, so that the backward of the
norm needs no collective (BOOST, arXiv 2512.12131, online RMSNorm; the backward is derived here).
"""

import torch

from boost_core.kernels.latent_epilogue import naive


def latent_epilogue(
    h_Tr: torch.Tensor, s_T: torch.Tensor | None, width: int, epsilon: float, activation: bool
) -> torch.Tensor:
    """Scale by the norm's statistic (if there is one), then apply SiLU (if asked).

    Args:
        h_Tr: Reduced latents, ``[T, r]``; rows may be strided, columns not.
        s_T: Sum of squares of each residual row over the full hidden size, ``[T]``; ``None`` without a norm.
        width: The full hidden size d that the squares were summed over.
        epsilon: Added to the mean square.
        activation: Whether the bottleneck has a SiLU.

    Returns:
        ``z_Tr`` in the type of ``h_Tr``.
    """
    if h_Tr.is_cuda:
        # Imported here because Triton is not installed where there is no GPU.
        from boost_core.kernels.latent_epilogue import triton

        return triton.latent_epilogue(h_Tr, s_T, width, epsilon, activation)
    return naive.latent_epilogue(h_Tr, s_T, width, epsilon, activation)
