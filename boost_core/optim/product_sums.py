"""Products of 16-bit factors that are added to fp32 sums by the kernel that multiplies them.

A weight's gradient is then neither rounded to 16 bits nor written, read again and added. torch can do so on GPUs.
Shape suffixes: T tokens, d rows and c columns of a weight.
"""

from functools import lru_cache

import torch


@lru_cache(8)
def adds_products(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether ``add_product_`` is available for factors of a type; tries it on small ones."""
    if dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        return all(_is_right(count, device, dtype) for count in (None, 2))
    except (RuntimeError, TypeError):  # torch lacks it for this device, or altogether
        return False


def add_product_(sum_dc: torch.Tensor, x_Td: torch.Tensor, dy_Tc: torch.Tensor) -> None:
    """Add xᵀ dy to fp32 sums; with an extra leading axis, each x and dy to its own sum."""
    multiply = torch.addmm if x_Td.dim() == 2 else torch.baddbmm
    multiply(sum_dc, x_Td.mT, dy_Tc, out_dtype=torch.float32, out=sum_dc)


def _is_right(count: int | None, device: torch.device, dtype: torch.dtype) -> bool:
    """Check with small integers, exact in all types, and sums with gaps between their rows."""
    several = () if count is None else (count,)
    x = torch.arange(16 * 16, device=device).remainder(5).view(16, 16).expand(*several, 16, 16)
    dy = torch.arange(16 * 8, device=device).remainder(7).view(16, 8).expand(*several, 16, 8)
    memory = torch.ones(*several, 16, 24, device=device)
    add_product_(memory[..., :8], x.to(dtype), dy.to(dtype))
    expected = torch.ones_like(memory)
    expected[..., :8] += (x.cpu().mT @ dy.cpu()).to(expected)
    return torch.equal(memory, expected)
