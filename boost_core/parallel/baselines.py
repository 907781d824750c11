"""Strategies that keep the whole residual on every rank. T tokens, d hidden, V vocabulary."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch.nn.functional import embedding, rms_norm

from boost_core.architecture import FULLRANK, VANILLA, Sharding
from boost_core.kernels.fp8_product import PrecomputedRows
from boost_core.kernels.latent_epilogue import Epilogue
from boost_core.kernels.residual_add import Residual
from boost_core.parallel.btp import DeferredWeightGradients, Latents, NormWeights, PartialLatents
from boost_core.parallel.communicator import Communicator, copy_to_tp, reduce_from_tp


class WholeResidual:
    """Embedding and head split along the vocabulary, as in Megatron-LM (arXiv 1909.08053).

    Args:
        communicator: The tensor parallel group.
        norm: Unused: only a sharded residual has more than one way to compute its norm.
        fp8: Unused: refused when jobs are read (``config.job``).

    Attributes:
        communicator: As given.
        shards: Number of ranks over which the residual stream is sharded: one.
        deferred: Empty: no weight gradients are deferred.
    """

    fp8, shards = False, 1

    def __init__(self, communicator: Communicator, norm: str = "fused", fp8: bool = False) -> None:  # noqa: ARG002
        self.communicator, self.deferred = communicator, DeferredWeightGradients()

    def embed(self, token_T: torch.Tensor, weight_Vd: torch.Tensor) -> Residual:
        """Whole residual vectors; one all-reduce of ``[T, d]``."""
        local_T = token_T - self.communicator.rank * len(weight_Vd)
        is_local_T = (local_T >= 0) & (local_T < len(weight_Vd))
        partial_Td = embedding(local_T * is_local_T, weight_Vd)
        partial_Td = partial_Td * is_local_T.to(weight_Vd.dtype).unsqueeze(-1)
        return self.enter(reduce_from_tp(partial_Td, self.communicator, "embedding"))

    def enter(self, x_Td: torch.Tensor) -> Residual:
        """The whole stream."""
        return Residual(x_Td, x_Td, None)

    def add(self, stream_Td: torch.Tensor, y_Td: torch.Tensor) -> Residual:
        """A plain sum: norms of whole rows take their own statistic."""
        return self.enter(stream_Td + y_Td)

    def final_norm(self, residual: Residual, norm: NormWeights) -> torch.Tensor:
        """A norm of whole rows; in the backward pass, one all-reduce of ``[T, d]``."""
        normed_Td = rms_norm(residual.inputs, (norm.width,), norm.scale_d, norm.epsilon)
        return copy_to_tp(normed_Td, self.communicator, "hidden")

    def tied_head(self, embedding_Vd: torch.Tensor) -> torch.Tensor:
        """Embedding and head have the same shard."""
        return embedding_Vd.T


# Dense tensor parallelism as in Megatron-LM (arXiv 1909.08053): column then row, 2d elements per token and block.
#
# Shape suffixes: T tokens, d hidden, g projections of one input, f wide (this rank's shard).


class FullRankTensorParallel(WholeResidual):
    """The dense strategy of Megatron-LM."""

    SHARDING: ClassVar[Sharding] = FULLRANK

    def dense_in(
        self, x_Td: torch.Tensor, weights_dgf: Sequence[torch.Tensor], norm: NormWeights
    ) -> list[torch.Tensor]:
        """``norm(x) W``, one ``[g, T, f]`` for each weight: this rank's columns of each projection.

        In the backward pass, an all-reduce of the residual's gradient.
        """
        normed_Td = rms_norm(x_Td, (norm.width,), norm.scale_d, norm.epsilon)
        shared_Td = copy_to_tp(normed_Td, self.communicator, "wide")
        products = ((shared_Td @ weight_dgf.flatten(1), weight_dgf.shape[1]) for weight_dgf in weights_dgf)
        return [y_Tc.view(len(y_Tc), count, -1).transpose(0, 1) for y_Tc, count in products]

    def dense_out(self, x_Tf: torch.Tensor, weight_fd: torch.Tensor) -> torch.Tensor:
        """``x W``, back into the residual, ``[T, d]``: its partial sums are all-reduced."""
        return reduce_from_tp(x_Tf @ weight_fd, self.communicator, "wide")


# Vanilla tensor parallelism of low-rank pairs, a baseline: each A·B is a Megatron pair of its own, split along r.
#
# A is split along its columns and B along its rows, so each rank has a slice of every latent, and the *wide*
# output of every pair is all-reduced: 5d + 2f elements per token and block, where BTP sends 7r. Attention sees whole
# queries, keys and values on every rank. Shape suffixes as in ``btp``; r is this rank's slice.


class VanillaTensorParallel(WholeResidual):
    """The low-rank strategy that the BOOST paper compares with; methods as of ``BottleneckTensorParallel``."""

    SHARDING: ClassVar[Sharding] = VANILLA

    def partial_latents(
        self,
        x_Td: torch.Tensor,
        squares_T: torch.Tensor | None,  # noqa: ARG002
        down_dgr: torch.Tensor,
        norm: NormWeights | None,
        quantised: PrecomputedRows | None = None,  # noqa: ARG002
    ) -> PartialLatents:
        """This rank's slice of each latent; in the backward pass, an all-reduce of the wide input's gradient."""
        normed_Td = x_Td if norm is None else rms_norm(x_Td, (norm.width,), norm.scale_d, norm.epsilon)
        latent_Tr = copy_to_tp(normed_Td, self.communicator, "wide") @ down_dgr.flatten(1)
        return PartialLatents(lambda: latent_Tr, None, len(x_Td))

    def start(
        self,
        partial: PartialLatents,
        epilogue: Epilogue | None = None,  # noqa: ARG002
    ) -> Callable[[], Latents]:
        """Nothing to exchange: a slice belongs to this rank alone."""
        latent_Tr = partial.compute()
        return lambda: (latent_Tr, None)

    def up(
        self,
        z_gTr: torch.Tensor,
        up_grf: torch.Tensor,
        quantised: PrecomputedRows | None = None,  # noqa: ARG002
        of_gradient: PrecomputedRows | None = None,  # noqa: ARG002
    ) -> torch.Tensor:
        """The whole wide output: its partial sums are all-reduced."""
        return reduce_from_tp(z_gTr @ up_grf, self.communicator, "wide")
