"""Vanilla tensor parallelism of low-rank pairs, a baseline: each A·B is a Megatron pair of its own, split along r.

A is split along its columns and B along its rows, so each rank has a slice of every latent, and the *wide*
output of every pair is all-reduced: 5d + 2f elements per token and block, where BTP sends 7r. Attention sees whole
queries, keys and values on every rank. Shape suffixes as in ``btp``; r is this rank's slice.
"""

from collections.abc import Callable
from typing import ClassVar

import torch

from boost_core.architecture.sharding import VANILLA, Sharding
from boost_core.kernels.symmetric_sum.memory import Epilogue
from boost_core.nn.strategy import Latents, NormWeights, SharedLatents
from boost_core.parallel.mappings import copy_to_tp, reduce_from_tp
from boost_core.parallel.whole_residual import WholeResidual, rms_norm


class VanillaTensorParallel(WholeResidual):
    """The ``LowRankStrategy`` that the BOOST paper compares with."""

    SHARDING: ClassVar[Sharding] = VANILLA

    def partial_latents(
        self,
        x_Td: torch.Tensor,
        squares_T: torch.Tensor | None,  # noqa: ARG002
        down_dgr: torch.Tensor,
        norm: NormWeights | None,
    ) -> Latents:
        """This rank's slice of each latent; in the backward pass, an all-reduce of the wide input's gradient."""
        normed_Td = x_Td if norm is None else rms_norm(x_Td, norm)
        return copy_to_tp(normed_Td, self._communicator, "wide") @ down_dgr.flatten(1), None

    def start(
        self,
        partial: Latents,
        norm: NormWeights | None,  # noqa: ARG002
        epilogue: Epilogue | None = None,  # noqa: ARG002
        shared: SharedLatents | None = None,  # noqa: ARG002
    ) -> Callable[[], Latents]:
        """Nothing to exchange: a slice belongs to this rank alone."""
        return lambda: partial

    def up(self, z_gTr: torch.Tensor, up_grf: torch.Tensor) -> torch.Tensor:
        """The whole wide output: its partial sums are all-reduced."""
        return reduce_from_tp(z_gTr @ up_grf, self._communicator, "wide")
