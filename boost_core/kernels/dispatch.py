"""Chooses the implementation of an operation for a tensor."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Implementation = Literal["naive", "triton"]

_chosen: Implementation | None = None


def runs_on_triton(x: torch.Tensor) -> bool:
    """Return whether ``x`` is for Triton's kernels: on a GPU, and of a type for which fp32 arithmetic is enough."""
    if _chosen is not None:
        return _chosen == "triton"
    return x.is_cuda and x.dtype != torch.float64


@contextmanager
def always(implementation: Implementation) -> Iterator[None]:
    """Make all operations use one implementation in this context, to compare the two."""
    global _chosen
    before, _chosen = _chosen, implementation
    try:
        yield
    finally:
        _chosen = before
