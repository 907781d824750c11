"""Where an operation runs, by Triton or by its reference, and how Triton's kernels are laid out over a tensor.

Triton is not installed on every machine: those without a GPU compute with the references.
"""

import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

__all__ = [
    "Implementation", "always", "block_of", "jit", "lacks_compiler", "members", "precise", "rows", "runs_on_triton",
    "tl", "triton", "warps_of",
]  # fmt: skip

if TYPE_CHECKING:
    import triton
    import triton.language as tl
else:
    try:
        import triton
        import triton.language as tl
    except ImportError:
        triton = tl = None

Implementation = Literal["naive", "triton"]

_forced: Implementation | None = None
_ELEMENTS_A_WARP = 256  # eight per thread: 16 bytes of bf16 in one access


def runs_on_triton(x: torch.Tensor) -> bool:
    """Return whether ``x`` is for Triton's kernels: on a GPU, and of a type for which fp32 arithmetic is enough."""
    if _forced is not None:
        return _forced == "triton"
    return x.is_cuda and x.dtype != torch.float64


def lacks_compiler() -> str | None:
    """Return what this machine lacks to launch Triton's kernels, and what to install, in a sentence; ``None``: nothing.

    Triton compiles a launcher for each kernel in C against Python's headers (``triton.runtime.build``).
    """
    named = os.environ.get("CC")
    if not any(map(shutil.which, ("gcc", "clang") if named is None else (named,))):
        lacks = "no C compiler" if named is None else f"no C compiler {named}, which CC names"
    elif not (Path(sysconfig.get_path("include")) / "Python.h").exists():
        lacks = "no headers of Python"
    else:
        return None
    return (
        f"this machine has {lacks}, with which Triton compiles the launchers of its kernels: install gcc, libc6-dev "
        "and, with Debian's Python, python3-dev where the workers run, for example in the image of Ray's nodes"
    )


@contextmanager
def always(implementation: Implementation) -> Iterator[None]:
    """Make all operations use one implementation in this context, to compare the two."""
    global _forced
    before, _forced = _forced, implementation
    try:
        yield
    finally:
        _forced = before


def jit(function: Callable[..., Any]) -> Any:
    """Compile with ``triton.jit`` where Triton is installed."""
    return function if triton is None else triton.jit(function)


def precise(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` in at least fp32, in which the references compute."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def rows(x: torch.Tensor) -> torch.Tensor:
    """Return ``x`` with its last axis dense, as the kernels read it; copies only if it is not."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def members(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return the matrices ``[T, f]`` that lie one after the other in tensors ``[g, T, f]``."""
    return [member_Tf for part_gTf in parts for member_Tf in part_gTf.unbind(0)]


def block_of(columns: int) -> int:
    """Return the power of two that holds a row."""
    return int(triton.next_power_of_2(columns))


def warps_of(block: int) -> int:
    """Return the number of warps for a program that works on ``block`` elements at once."""
    return max(1, min(16, block // _ELEMENTS_A_WARP))
