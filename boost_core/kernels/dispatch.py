"""Which implementation of an operation serves a tensor."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import torch

Implementation = Literal["naive", "triton"]

_chosen: Implementation | None = None


def runs_on_triton(x: torch.Tensor) -> bool:
    """Whether ``x`` is for Triton's kernels: it is on a GPU, and their fp32 arithmetic is enough for it."""
    if _chosen is not None:
        return _chosen == "triton"
    return x.is_cuda and x.dtype != torch.float64


@contextmanager
def always(implementation: Implementation) -> Iterator[None]:
    """Have all operations use one implementation meanwhile, to compare the two."""
    global _chosen
    before, _chosen = _chosen, implementation
    try:
        yield
    finally:
        _chosen = before
