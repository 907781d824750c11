"""Factoring of a dense model's projections to low rank by truncated singular value decomposition."""

import torch

from boost_core.checkpoint.chunks import Sizes
from boost_core.convert.model_folder import Source

_PROJECTION, _FACTORS = "_proj.weight", ("cola_a", "cola_b")


class Factored:
    """A dense model as a low-rank one whose A·B is the best approximation of each projection at a given rank.

    The singular values are split evenly between the two factors.

    Args:
        dense: The dense model.
        rank: Width of every bottleneck.

    Attributes:
        shapes: Shapes of all tensors by name; the two factors of a projection are adjacent.
    """

    def __init__(self, dense: Source, rank: int) -> None:
        self._dense, self._rank = dense, rank
        self._last: tuple[str, dict[str, torch.Tensor]] = ("", {})
        self.shapes: dict[str, Sizes] = {}
        for name, shape in dense.shapes.items():
            if name.endswith(_PROJECTION):
                wide_out, wide_in = shape
                of_factors = ((wide_in, rank), (rank, wide_out))
                self.shapes |= dict(zip(_factors_of(name), of_factors, strict=True))
            else:
                self.shapes[name] = shape

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor in fp32; a projection is factored when the first of its two factors is read."""
        if name in self._dense.shapes:
            return self._dense.read(name)
        whole = f"{name.rpartition('.')[0]}.weight"
        if self._last[0] != whole:
            factors = truncated(self._dense.read(whole).T, self._rank)
            self._last = whole, dict(zip(_factors_of(whole), factors, strict=True))
        return self._last[1][name]


def _factors_of(weight: str) -> tuple[str, ...]:
    return tuple(f"{weight.removesuffix('.weight')}.{factor}" for factor in _FACTORS)


def truncated(w_df: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Approximate W by A B, with A d × r and B r × f. If W is narrower than the rank, both are padded with zeros."""
    left, values, right = torch.linalg.svd(w_df.double(), full_matrices=False)
    kept = min(rank, len(values))
    root = values[:kept].sqrt()
    a_dr, b_rf = w_df.new_zeros(w_df.shape[0], rank), w_df.new_zeros(rank, w_df.shape[1])
    a_dr[:, :kept], b_rf[:kept] = left[:, :kept] * root, root.unsqueeze(-1) * right[:kept]
    return a_dr, b_rf
