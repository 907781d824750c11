"""The reference: plain torch, differentiated by autograd."""

import torch
from torch.nn.functional import silu


def latent_epilogue(
    h_Tr: torch.Tensor, s_T: torch.Tensor | None, width: int, epsilon: float, activation: bool
) -> torch.Tensor:
    """``silu(h / sqrt(s / d + epsilon))``, computed in at least fp32; see the package for the arguments."""
    y_Tr = h_Tr.to(torch.promote_types(h_Tr.dtype, torch.float32))
    if s_T is not None:
        y_Tr = y_Tr * torch.rsqrt(s_T.to(y_Tr.dtype) / width + epsilon).unsqueeze(-1)
    if activation:
        y_Tr = silu(y_Tr)
    return y_Tr.to(h_Tr.dtype)
