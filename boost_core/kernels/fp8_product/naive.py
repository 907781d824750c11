"""The reference: 8-bit numbers as torch rounds to them, multiplied in fp32."""

import torch

LARGEST = 448.0  # torch.finfo(torch.float8_e4m3fn).max, 0.875 · 2⁹
_LEAST_EXPONENT = -126


def quantise_rows(x: torch.Tensor, factor_T: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and scales; see the package for the arguments."""
    precise = x.float() if factor_T is None else x.float() * factor_T.float().unsqueeze(-1)
    scales = _scales(precise.abs().amax(dim=-1))
    return (precise / scales.unsqueeze(-1)).to(torch.float8_e4m3fn), scales


def quantise_columns(x: torch.Tensor, factor_k: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values and scales; see the package for the arguments."""
    precise = x.float() if factor_k is None else x.float() * factor_k.float().unsqueeze(-1)
    values, scales = quantise_rows(precise.mT)
    return values.contiguous(), scales


def fp8_product(
    left: tuple[torch.Tensor, torch.Tensor], right: tuple[torch.Tensor, torch.Tensor]
) -> torch.Tensor:  # fmt: skip
    """Return the product in fp32."""
    return whole(*left) @ whole(*right).mT


def whole(values: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Convert 8-bit numbers back to fp32."""
    return values.float() * scales.unsqueeze(-1)


def _scales(largest: torch.Tensor) -> torch.Tensor:
    """The smallest power of two that brings the largest number to 448 or less; non-finite values stay so."""
    mantissa, exponent = torch.frexp(largest.clamp(min=2.0**_LEAST_EXPONENT))  # mantissa from 0.5
    exponent = (exponent - 9 + (mantissa > LARGEST / 2**9)).clamp(min=_LEAST_EXPONENT)
    return torch.where(largest.isfinite(), torch.ldexp(torch.ones_like(largest), exponent), largest)
