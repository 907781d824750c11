"""The baselines: dense tensor parallelism, and that of low-rank pairs along their rank.

Shape suffixes: T tokens, t this rank's part of them, d hidden, V this rank's part of the vocabulary.
"""

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import torch
from torch.nn.functional import embedding, rms_norm

from boost_core.architecture import FULLRANK, VANILLA, Sharding
from boost_core.kernels.fp8_product import PrecomputedRows
from boost_core.kernels.latent_epilogue import Epilogue
from boost_core.kernels.launch import Part
from boost_core.kernels.residual_add import Residual
from boost_core.parallel.btp import DeferredWeightGradients, Latents, NormWeights, PartialLatents
from boost_core.parallel.communicator import (
    Communicator,
    all_gather_from_tp,
    copy_to_tp,
    reduce_from_tp,
    reduce_scatter_from_tp,
)


class WholeResidual:
    """Embedding and head split along the vocabulary, as in Megatron-LM (arXiv 1909.08053).

    Args:
        communicator: The tensor parallel group.
        norm: Unused: only a sharded residual has more than one way to compute its norm.
        fp8: Unused: refused when jobs are read (``config.job``).

    Attributes:
        communicator: As given.
        deferred: Empty: no weight gradients are deferred.
    """

    fp8 = False

    def __init__(self, communicator: Communicator, norm: str = "fused", fp8: bool = False) -> None:
        self.communicator, self.deferred = communicator, DeferredWeightGradients()

    def part(self, tokens: int, width: int) -> tuple[int, int]:
        """Shape of this rank's part of a residual stream: all of it."""
        return tokens, width

    def embed(self, token_T: torch.Tensor, weight_Vd: torch.Tensor) -> Residual:
        """Whole residual vectors; one all-reduce of ``[T, d]``."""
        return self.enter(reduce_from_tp(self._looked_up(token_T, weight_Vd), self.communicator, "embedding"))

    def _looked_up(self, token_T: torch.Tensor, weight_Vd: torch.Tensor) -> torch.Tensor:
        """``[T, d]``, zero where a token is in another rank's part of the vocabulary."""
        local_T = token_T - self.communicator.rank * len(weight_Vd)
        is_local_T = (local_T >= 0) & (local_T < len(weight_Vd))
        return embedding(local_T * is_local_T, weight_Vd) * is_local_T.to(weight_Vd.dtype).unsqueeze(-1)

    def enter(self, x_Td: torch.Tensor) -> Residual:
        """This rank's part of the stream."""
        return Residual(x_Td, x_Td, None)

    def add(self, stream_Td: torch.Tensor, y_Td: torch.Tensor, part: Part | None = None) -> Residual:
        """A plain sum: norms of whole rows take their own statistic."""
        return self.enter(stream_Td + y_Td)

    def final_norm(self, residual: Residual, norm: NormWeights) -> torch.Tensor:
        """A norm of whole rows; in the backward pass, one all-reduce of ``[T, d]``."""
        normed_Td = rms_norm(residual.inputs, (norm.width,), norm.scale_d, norm.epsilon)
        return copy_to_tp(normed_Td, self.communicator, "hidden")

    def tied_head(self, embedding_Vd: torch.Tensor) -> torch.Tensor:
        """Embedding and head have the same shard."""
        return embedding_Vd.T


# Dense tensor parallelism as in Megatron-LM (arXiv 1909.08053): column then row. Outside of these pairs each rank has
# the residual vectors of a part of the tokens, and norms only these (sequence parallelism, arXiv 2205.05198). So 2d
# elements per token and block are gathered, and as many scattered.
#
# Shape suffixes: g projections of one input, f wide (this rank's shard), c = g·f.


class FullRankTensorParallel(WholeResidual):
    """The dense strategy of Megatron-LM, with sequence parallelism."""

    SHARDING: ClassVar[Sharding] = FULLRANK

    def part(self, tokens: int, width: int) -> tuple[int, int]:
        """Shape of this rank's part of a residual stream: the rows of some tokens."""
        return tokens // self.communicator.size, width

    def embed(self, token_T: torch.Tensor, weight_Vd: torch.Tensor) -> Residual:
        """Residual vectors of this rank's tokens; one reduce-scatter of ``[T, d]``."""
        if len(token_T) % self.communicator.size:  # of a job that was accepted before this was refused
            raise ValueError(
                f"{self.communicator.size} tensor parallel ranks cannot have equal parts of {len(token_T)} tokens; "
                "clone the job with another tensor_parallel_size"
            )
        partial_Td = self._looked_up(token_T, weight_Vd)
        return self.enter(reduce_scatter_from_tp(partial_Td, self.communicator, "embedding"))

    def final_norm(self, residual: Residual, norm: NormWeights) -> torch.Tensor:
        """The normed rows of all ranks, ``[T, d]``; their gradients are summed and scattered."""
        normed_td = rms_norm(residual.inputs, (norm.width,), norm.scale_d, norm.epsilon)
        return all_gather_from_tp(normed_td, self.communicator, "hidden").flatten(0, 1)

    def dense_in(
        self, x_td: torch.Tensor, weights_dgf: Sequence[torch.Tensor], norm: NormWeights
    ) -> list[torch.Tensor]:
        """``norm(x) W`` of all ranks' rows, a ``[g, T, f]`` for each weight: this rank's columns of each projection."""
        normed_td = rms_norm(x_td, (norm.width,), norm.scale_d, norm.epsilon)
        weights_dc = [weight_dgf.flatten(1) for weight_dgf in weights_dgf]
        if self.communicator.size == 1:
            products = [normed_td @ weight_dc for weight_dc in weights_dc]
        else:
            products = _GatheredProducts.apply(normed_td, self.communicator, *weights_dc)  # type: ignore[no-untyped-call]
        of_weights = zip(products, weights_dgf, strict=True)
        return [y_Tc.view(len(y_Tc), weight_dgf.shape[1], -1).transpose(0, 1) for y_Tc, weight_dgf in of_weights]

    def dense_out(self, x_Tf: torch.Tensor, weight_fd: torch.Tensor) -> torch.Tensor:
        """``x W``, back into the residual, ``[t, d]``: its partial sums are reduced and scattered."""
        return reduce_scatter_from_tp(x_Tf @ weight_fd, self.communicator, "wide")


class _GatheredProducts(torch.autograd.Function):
    """Products of all ranks' rows with some weights.

    This rank's rows are kept, and gathered again backward while the gradient of the input is computed; that is
    scattered while those of the weights are (arXiv 2205.05198, section 4.2.2).
    """

    @staticmethod
    def forward(
        ctx: Any, x_td: torch.Tensor, communicator: Communicator, *weights_dc: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        """Return a ``[T, c]`` for each weight."""
        ctx.communicator = communicator
        ctx.save_for_backward(x_td, *weights_dc)
        x_Td = communicator.all_gather(x_td, "wide").flatten(0, 1)
        return tuple(x_Td @ weight_dc for weight_dc in weights_dc)

    @staticmethod
    def backward(ctx: Any, *dy_Tc: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Return the gradient of this rank's rows, and of each weight."""
        communicator: Communicator = ctx.communicator
        x_td, *weights_dc = ctx.saved_tensors
        x_Td = x_td.new_empty((communicator.size * len(x_td), x_td.shape[1]))
        gathering = communicator.start_all_gather(x_Td, x_td, "wide again")
        dx_Td = dy_Tc[0] @ weights_dc[0].T
        for dy, weight_dc in zip(dy_Tc[1:], weights_dc[1:], strict=True):
            dx_Td.addmm_(dy, weight_dc.T)
        gathering.wait()
        dx_td = torch.empty_like(x_td)
        scattering = communicator.start_reduce_scatter(dx_td, dx_Td, "wide gradient")
        gradients_dc = [x_Td.T @ dy for dy in dy_Tc]
        scattering.wait()
        return dx_td, None, *gradients_dc


# Vanilla tensor parallelism of low-rank pairs, a baseline: each A·B is a Megatron pair of its own, split along r.
#
# A is split along its columns and B along its rows, so each rank has a slice of every latent, and the *wide*
# output of every pair is all-reduced: 5d + 2f elements per token and block, where BTP sends 7r. Attention sees whole
# queries, keys and values on every rank. Shape suffixes as in ``btp``; r is this rank's slice.


class VanillaTensorParallel(WholeResidual):
    """The low-rank strategy that the BOOST paper compares with; methods as of ``BottleneckTensorParallel``."""

    SHARDING: ClassVar[Sharding] = VANILLA

    def partial_latents(
        self, x_Td: torch.Tensor, squares_T: torch.Tensor | None, down_dgr: torch.Tensor, norm: NormWeights | None,
        quantised: PrecomputedRows | None = None, part: Part | None = None,
    ) -> PartialLatents:  # fmt: skip
        """This rank's slice of each latent; in the backward pass, an all-reduce of the wide input's gradient."""
        normed_Td = x_Td if norm is None else rms_norm(x_Td, (norm.width,), norm.scale_d, norm.epsilon)
        latent_Tr = copy_to_tp(normed_Td, self.communicator, "wide") @ down_dgr.flatten(1)
        return PartialLatents(lambda: latent_Tr, None, len(x_Td))

    def start(self, partial: PartialLatents, epilogue: Epilogue | None = None) -> Callable[[], Latents]:
        """Nothing to exchange: a slice belongs to this rank alone."""
        latent_Tr = partial.compute()
        return lambda: (latent_Tr, None)

    def up(
        self, z_gTr: torch.Tensor, up_grf: torch.Tensor, quantised: PrecomputedRows | None = None,
        of_gradient: PrecomputedRows | None = None, part: Part | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """The whole wide output: its partial sums are all-reduced."""
        return reduce_from_tp(z_gTr @ up_grf, self.communicator, "wide")
