"""The reference: plain torch, differentiated by autograd."""

import torch


def residual_add(x_Td: torch.Tensor, y_Td: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the sum twice, and its rows' sums of squares in at least fp32; see the package for the arguments."""
    sum_Td = x_Td if y_Td is None else x_Td + y_Td
    squares_T = sum_Td.to(torch.promote_types(sum_Td.dtype, torch.float32)).square().sum(dim=-1)
    return sum_Td, sum_Td, squares_T
