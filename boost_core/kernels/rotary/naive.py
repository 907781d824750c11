"""The reference: plain torch, differentiated by autograd."""

import torch


def rotary(parts: list[torch.Tensor], cosine_se: torch.Tensor, sine_se: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rotate out of place; see the package for the arguments."""
    *compared, value_Td = (member_Td for part_gTd in parts for member_Td in part_gTd)
    return *(_turned(x_Td, cosine_se, sine_se) for x_Td in compared), value_Td


def _turned(x_Td: torch.Tensor, cosine_se: torch.Tensor, sine_se: torch.Tensor) -> torch.Tensor:
    positions, half = cosine_se.shape
    x_bshte = x_Td.reshape(-1, positions, x_Td.shape[1] // (2 * half), 2, half)
    a_bshe, b_bshe = x_bshte.to(cosine_se.dtype).unbind(-2)
    cosine_s1e, sine_s1e = cosine_se.unsqueeze(1), sine_se.unsqueeze(1)
    turned = (a_bshe * cosine_s1e - b_bshe * sine_s1e, b_bshe * cosine_s1e + a_bshe * sine_s1e)
    return torch.stack(turned, dim=-2).to(x_Td.dtype).view(x_Td.shape)
