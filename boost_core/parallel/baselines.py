"""The ends of a model under strategies that keep the whole residual on every rank. T tokens, d hidden, V vocabulary."""

from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch.nn import functional

from boost_core.architecture import FULLRANK, VANILLA, Sharding
from boost_core.kernels.residual_add import Residual
from boost_core.model.low_rank import EpilogueInExchange, Latents, NormWeights, PartialLatents, SavedLatents
from boost_core.parallel.communicator import Communicator, copy_to_tp, reduce_from_tp
from boost_core.parallel.vocabulary import SplitHead
from boost_core.parallel.weight_gradients import GradientSinks


class WholeResidual(SplitHead):
    """Embedding and head split along the vocabulary, as in Megatron-LM (arXiv 1909.08053).

    Args:
        communicator: The tensor parallel group.
        norm: Unused: only a sharded residual has more than one way to compute its norm.
        fp8: Unused: refused when jobs are read (``config.legality``).

    Attributes:
        sinks: Where weight gradients that are computed outside of autograd go.
    """

    fp8 = False

    def __init__(self, communicator: Communicator, norm: str = "fused", fp8: bool = False) -> None:  # noqa: ARG002
        super().__init__(communicator)
        self.sinks = GradientSinks()

    def embed(self, token_T: torch.Tensor, weight_Vd: torch.Tensor) -> Residual:
        """Whole residual vectors; one all-reduce of ``[T, d]``."""
        local_T = token_T - self._communicator.rank * len(weight_Vd)
        is_local_T = (local_T >= 0) & (local_T < len(weight_Vd))
        partial_Td = functional.embedding(local_T * is_local_T, weight_Vd)
        partial_Td = partial_Td * is_local_T.to(weight_Vd.dtype).unsqueeze(-1)
        x_Td = reduce_from_tp(partial_Td, self._communicator, "embedding")
        return Residual(x_Td, x_Td, None)

    def enter(self, x_Td: torch.Tensor) -> Residual:
        """The whole stream."""
        return Residual(x_Td, x_Td, None)

    def width(self, hidden_size: int) -> int:
        """The whole hidden size."""
        return hidden_size

    def abandon(self) -> None:
        """Nothing is kept from one operation to the next."""

    def add(self, stream_Td: torch.Tensor, y_Td: torch.Tensor) -> Residual:
        """A plain sum: norms of whole rows take their own statistic."""
        x_Td = stream_Td + y_Td
        return Residual(x_Td, x_Td, None)

    def final_norm(self, residual: Residual, norm: NormWeights) -> torch.Tensor:
        """A norm of whole rows; in the backward pass, one all-reduce of ``[T, d]``."""
        return copy_to_tp(rms_norm(residual.inputs, norm), self._communicator, "hidden")

    def tied_head(self, embedding_Vd: torch.Tensor) -> torch.Tensor:
        """Embedding and head have the same shard."""
        return embedding_Vd.T


def rms_norm(x_Td: torch.Tensor, norm: NormWeights) -> torch.Tensor:
    """RMSNorm of whole rows, by torch's fused kernel where it has one."""
    return functional.rms_norm(x_Td, (norm.width,), norm.scale_d, norm.epsilon)


# Dense tensor parallelism as in Megatron-LM (arXiv 1909.08053): column then row, 2d elements per token and block.
#
# Shape suffixes: T tokens, d hidden, g projections of one input, f wide (this rank's shard).


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


# Vanilla tensor parallelism of low-rank pairs, a baseline: each A·B is a Megatron pair of its own, split along r.
#
# A is split along its columns and B along its rows, so each rank has a slice of every latent, and the *wide*
# output of every pair is all-reduced: 5d + 2f elements per token and block, where BTP sends 7r. Attention sees whole
# queries, keys and values on every rank. Shape suffixes as in ``btp``; r is this rank's slice.


class VanillaTensorParallel(WholeResidual):
    """The ``LowRankStrategy`` that the BOOST paper compares with."""

    SHARDING: ClassVar[Sharding] = VANILLA

    def partial_latents(
        self,
        x_Td: torch.Tensor,
        squares_T: torch.Tensor | None,  # noqa: ARG002
        down_dgr: torch.Tensor,
        norm: NormWeights | None,
    ) -> PartialLatents:
        """This rank's slice of each latent; in the backward pass, an all-reduce of the wide input's gradient."""
        normed_Td = x_Td if norm is None else rms_norm(x_Td, norm)
        latent_Tr = copy_to_tp(normed_Td, self._communicator, "wide") @ down_dgr.flatten(1)
        return PartialLatents(lambda: latent_Tr, None, len(x_Td))

    def start(
        self,
        partial: PartialLatents,
        norm: NormWeights | None,  # noqa: ARG002
        epilogue: EpilogueInExchange | None = None,  # noqa: ARG002
        saved: SavedLatents | None = None,  # noqa: ARG002
    ) -> Callable[[], Latents]:
        """Nothing to exchange: a slice belongs to this rank alone."""
        latent_Tr = partial.compute()
        return lambda: (latent_Tr, None)

    def up(self, z_gTr: torch.Tensor, up_grf: torch.Tensor) -> torch.Tensor:
        """The whole wide output: its partial sums are all-reduced."""
        return reduce_from_tp(z_gTr @ up_grf, self._communicator, "wide")
