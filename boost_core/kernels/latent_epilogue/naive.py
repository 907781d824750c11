"""The reference: plain torch, differentiated by autograd."""

import torch
from torch.nn.functional import silu


def apart(x_Tc: torch.Tensor, count: int) -> torch.Tensor:
    """View ``[T, g·r]`` as ``[g, T, r]``, without a copy."""
    return x_Tc.view(len(x_Tc), count, -1).transpose(0, 1)


def latent_epilogue(
    h_Tc: torch.Tensor, s_T: torch.Tensor | None, count: int, width: int, epsilon: float, activation: bool
) -> torch.Tensor:
    """``silu(h / sqrt(s / d + epsilon))``, computed in at least fp32; see the package for the arguments."""
    y_Tc = _precise(h_Tc)
    if s_T is not None:
        y_Tc = y_Tc * torch.rsqrt(s_T.to(y_Tc.dtype) / width + epsilon).unsqueeze(-1)
    if activation:
        y_Tc = silu(y_Tc)
    return apart(y_Tc.to(h_Tc.dtype), count)


def statistic_gradient(
    dh_Tc: torch.Tensor, h_Tc: torch.Tensor, s_T: torch.Tensor, width: int, epsilon: float
) -> torch.Tensor:
    """``−(Σ dh ∘ h) / (2 (s + d epsilon))``; see the package for the arguments."""
    return -(_precise(dh_Tc) * h_Tc).sum(dim=-1) / (2 * (_precise(s_T) + width * epsilon))


def _precise(x: torch.Tensor) -> torch.Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))
