"""The ends of a model under strategies that keep the whole residual on every rank. T tokens, d hidden, V vocabulary."""

import torch
from torch.nn import functional

from boost_core.kernels.residual_add import Residual
from boost_core.nn.strategy import NormWeights
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.mappings import copy_to_tp
from boost_core.parallel.vocabulary import SplitHead, vocabulary_parallel_embedding


class WholeResidual(SplitHead):
    """Embedding and head split along the vocabulary, as in Megatron-LM (arXiv 1909.08053).

    Args:
        communicator: The tensor parallel group.
        norm: Unused: only a sharded residual has more than one way to compute its norm.
        fp8: Unused: refused when jobs are read (``config.legality``).
    """

    fp8 = False

    def __init__(self, communicator: Communicator, norm: str = "fused", fp8: bool = False) -> None:  # noqa: ARG002
        super().__init__(communicator)

    def embed(self, token_T: torch.Tensor, weight_Vd: torch.Tensor) -> Residual:
        """Whole residual vectors; one all-reduce of ``[T, d]``."""
        x_Td = vocabulary_parallel_embedding(token_T, weight_Vd, self._communicator)
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
