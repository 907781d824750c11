"""Triton, where it is installed, and how its kernels are laid out over a tensor."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

__all__ = ["block_of", "jit", "rows", "tl", "triton", "warps_of"]

if TYPE_CHECKING:
    import triton
    import triton.language as tl
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:  # machines without a GPU compute with the references
        triton = tl = None


def jit(function: Callable[..., Any]) -> Any:
    """Compile with ``triton.jit`` where Triton is installed."""
    return function if triton is None else triton.jit(function)


_ELEMENTS_A_WARP = 256  # eight per thread: 16 bytes of bf16 in one access


def rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with its last axis dense, as the kernels read it; copies only if it is not."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def block_of(columns: int) -> int:
    """Return the power of two that holds a row."""
    return int(triton.next_power_of_2(columns))


def warps_of(block: int) -> int:
    """Return the number of warps for a program that works on ``block`` elements at once."""
    return max(1, min(16, block // _ELEMENTS_A_WARP))
