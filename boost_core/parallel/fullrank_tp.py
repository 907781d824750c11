"""Dense tensor parallelism as in Megatron-LM (arXiv 1909.08053): column then row, 2d elements per token and block.

Shape suffixes: T tokens, d hidden, g projections of one input, f wide (this rank's shard).
"""

from collections.abc import Sequence
from typing import ClassVar

import torch

from boost_core.architecture.sharding import FULLRANK, Sharding
from boost_core.nn.strategy import NormWeights
from boost_core.parallel.mappings import copy_to_tp, reduce_from_tp
from boost_core.parallel.whole_residual import WholeResidual, rms_norm


class FullRankTensorParallel(WholeResidual):
    """The ``DenseStrategy`` of Megatron-LM."""

    SHARDING: ClassVar[Sharding] = FULLRANK

    def dense_in(
        self, x_Td: torch.Tensor, weights_dgf: Sequence[torch.Tensor], norm: NormWeights
    ) -> list[torch.Tensor]:
        """This rank's columns of each projection; in the backward pass, an all-reduce of the residual's gradient."""
        shared_Td = copy_to_tp(rms_norm(x_Td, norm), self._communicator, "wide")
        products = ((shared_Td @ weight_dgf.flatten(1), weight_dgf.shape[1]) for weight_dgf in weights_dgf)
        return [y_Tc.view(len(y_Tc), count, -1).transpose(0, 1) for y_Tc, count in products]

    def dense_out(self, x_Tf: torch.Tensor, weight_fd: torch.Tensor) -> torch.Tensor:
        """The whole output: its partial sums are all-reduced."""
        return reduce_from_tp(x_Tf @ weight_fd, self._communicator, "wide")
