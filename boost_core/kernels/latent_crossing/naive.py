"""The reference: plain torch, differentiated by autograd."""

import torch
from torch.nn.functional import layer_norm, silu


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
) -> torch.Tensor:
    """Scale, add, norm and activation in at least fp32; see the package for the arguments."""
    precise = torch.promote_types(h_Tc.dtype, torch.float32)
    # A product even without a norm, so that the gradient of h has memory of its own, as in the kernel.
    inverse_rms_T = h_Tc.new_ones(len(h_Tc)) if s_T is None else torch.rsqrt(s_T.to(precise) / width + epsilon)
    u_Tc = h_Tc.to(precise) * inverse_rms_T.unsqueeze(-1)
    count, rank = scale_gr.shape
    u_gTr = u_Tc.view(-1, count, rank).transpose(0, 1) + crossed_gTr
    n_gTr = layer_norm(u_gTr, (rank,), eps=norm_epsilon)
    y_gTr = n_gTr * scale_gr.unsqueeze(1) + shift_gr.unsqueeze(1)
    return (silu(y_gTr) if activation else y_gTr).to(h_Tc.dtype)
