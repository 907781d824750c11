"""What happens to a latent between its all-reduce and its up-projection.

With ``h`` the reduced product of the raw residual and A∘γ, ``s`` the reduced sum of squares and ``d`` the
full hidden size::

    y = h / sqrt(s / d + epsilon)        (only where a norm precedes the projection)
    z = silu(y)                          (only where the family has an activation in its bottleneck)

and backward, with ``dz`` given::

    dy = dz · silu'(y)
    dh = dy / sqrt(s / d + epsilon)
    ds = −(Σ_r dy ∘ y) / (2 d (s / d + epsilon)) = −(Σ_r dh ∘ h) / (2 (s + d epsilon))

All of ``h``, ``s``, ``z``, ``dz`` are replicated over the tensor parallel ranks, so that the backward of the
norm needs no collective (BOOST, arXiv 2512.12131, online RMSNorm; the backward is derived here).

The latents of g projections stand side by side in h, as one matrix product returned them, and one after the other in z,
as the batched up-projection reads them: the kernel writes them that way. Shape suffixes: T tokens, c = g·r columns,
r rank.
"""

import torch

from boost_core.kernels.dispatch import runs_on_triton
from boost_core.kernels.latent_epilogue import naive


def latent_epilogue(
    h_Tc: torch.Tensor, s_T: torch.Tensor | None, count: int, width: int, epsilon: float, activation: bool,
    fp8: bool = False, made_gTr: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """Scale by the norm's statistic (if there is one), apply SiLU (if asked), and separate the projections.

    Args:
        h_Tc: Reduced latents of all projections, ``[T, g·r]``; rows may be strided, columns not.
        s_T: Sum of squares of each residual row over the full hidden size, ``[T]``; ``None`` without a norm.
        count: Number of projections g.
        width: The full hidden size d that the squares were summed over.
        epsilon: Added to the mean square.
        activation: Whether the bottleneck has a SiLU.
        fp8: Whether the kernel also leaves the rows for a scaled product (``fp8_product.quantised``).
        made_gTr: The result, if already computed (``made_of``); the reference computes its own.

    Returns:
        ``z_gTr`` in the type of ``h``; a view of it where there is nothing to compute.
    """
    if s_T is None and not activation:
        return naive.apart(h_Tc, count)
    if runs_on_triton(h_Tc):
        # Imported here because Triton is not installed where there is no GPU.
        from boost_core.kernels.latent_epilogue import triton

        return triton.latent_epilogue(h_Tc, s_T, count, width, epsilon, activation, fp8, made_gTr)
    return naive.latent_epilogue(h_Tc, s_T, count, width, epsilon, activation)


def leave_made(h_Tc: torch.Tensor, z_gTr: torch.Tensor) -> None:
    """Leave what the kernel that wrote ``h_Tc`` has already computed from it, for ``made_of`` to find."""
    h_Tc.made_latents = z_gTr  # type: ignore[attr-defined]


def made_of(h_Tc: torch.Tensor) -> torch.Tensor | None:
    """Return what ``leave_made`` left, only once, so that it is freed after use: a recomputation makes it again."""
    left: torch.Tensor | None = vars(h_Tc).pop("made_latents", None)
    return left


def statistic_gradient(
    dh_Tc: torch.Tensor, h_Tc: torch.Tensor, s_T: torch.Tensor, width: int, epsilon: float
) -> torch.Tensor:
    """Return ``ds`` from the whole ``dh``, which several ranks have only after their gradients are summed.

    Args:
        dh_Tc: The latents' gradient, ``[T, g·r]``.
        h_Tc: The latents.
        s_T: As in ``latent_epilogue``.
        width: As in ``latent_epilogue``.
        epsilon: As in ``latent_epilogue``.

    Returns:
        ``[T]`` in at least fp32.
    """
    if runs_on_triton(h_Tc):
        from boost_core.kernels.latent_epilogue import triton

        return triton.statistic_gradient(dh_Tc, h_Tc, s_T, width, epsilon)
    return naive.statistic_gradient(dh_Tc, h_Tc, s_T, width, epsilon)
