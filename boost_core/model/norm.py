"""RMSNorm in parts (arXiv 1910.07467). Shape suffixes: T tokens, d hidden, c columns."""

import torch


def precise(x: torch.Tensor) -> torch.Tensor:
    """Convert ``x`` to at least fp32."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def with_statistic(x_Tc: torch.Tensor, squares_T: torch.Tensor) -> torch.Tensor:
    """Append the rows' sums of squares as one more column, rounded to the type of the others."""
    return torch.cat((x_Tc, squares_T.to(x_Tc.dtype).unsqueeze(-1)), dim=-1)


def scale_rows(x_Td: torch.Tensor, squares_T: torch.Tensor, width: int, epsilon: float) -> torch.Tensor:
    """Divide each row by its root mean square, given its sum of squares over ``width``; in the type of ``x``."""
    inverse_rms_T = torch.rsqrt(precise(squares_T) / width + epsilon)
    return (precise(x_Td) * inverse_rms_T.unsqueeze(-1)).to(x_Td.dtype)
