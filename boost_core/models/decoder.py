"""What all families share: embedding, blocks, head and loss.

Shape suffixes: T tokens, d hidden; b sequences of s positions.
"""

from collections.abc import Iterable
from typing import Any, Protocol, cast

import torch
from torch import nn

from boost_core.config import ModelConfig
from boost_core.kernels.residual_add import Residual
from boost_core.nn.attention import Rotation
from boost_core.nn.embedding import TokenEmbedding
from boost_core.nn.head import HeadAndLoss
from boost_core.nn.stages import Local, Stages, plainly, run_together
from boost_core.nn.strategy import Strategy


class Block(Protocol):
    """A decoder block; ``carried`` is what it hands to the next one beside the residual."""

    def __call__(self, residual: Residual, rotation: Rotation, carried: Any) -> tuple[Residual, Any]:
        """The residual stream after the block, and what the next block is handed."""


class StagedBlock(Block, Protocol):
    """A block that can be left at its exchanges."""

    def stages(self, residual: Residual, rotation: Rotation, carried: Any) -> Stages[tuple[Residual, Any]]:
        """The call in stages; all blocks have equally many."""


class Decoder(nn.Module):
    """Embedding, the blocks of one family, head and loss.

    Args:
        model: The model's shape.
        strategy: How it is split over the tensor parallel ranks.
        blocks: The blocks, each a ``Block``; a ``StagedBlock`` where there are several portions.
        portions: In how many portions the sequences go through the blocks, in turns.
        local: Calls a block; it may forget what that computes and compute it again.
    """

    def __init__(
        self,
        model: ModelConfig,
        strategy: Strategy,
        blocks: Iterable[nn.Module],
        portions: int = 1,
        local: Local = plainly,
    ) -> None:
        super().__init__()
        self.portions, self.local = portions, local
        self.embedding = TokenEmbedding(model.vocab_size, model.hidden_size, strategy)
        self.blocks = nn.ModuleList(blocks)
        tied_to = self.embedding if model.tie_embeddings else None
        self.head = HeadAndLoss(model.vocab_size, model.hidden_size, model.norm_epsilon, strategy, tied_to)

    def forward(self, token_T: torch.Tensor, target_T: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Loss of each token in nats, ``[T]``; sequences of ``rotation.sequence_length`` one after the other."""
        if self.portions == 1:
            residual = self._through_blocks(token_T, rotation)
        else:
            token_bs = token_T.view(-1, rotation.sequence_length)
            portions = [self._in_stages(portion_bs.flatten(), rotation) for portion_bs in token_bs.chunk(self.portions)]
            residual = _joined(run_together(portions))
        loss_T: torch.Tensor = self.head(residual, target_T)
        return loss_T

    def _through_blocks(self, token_T: torch.Tensor, rotation: Rotation) -> Residual:
        residual: Residual = self.embedding(token_T)
        carried = None
        for block in self.blocks:
            residual, carried = self.local(block, residual, rotation, carried)
        return residual

    def _in_stages(self, token_T: torch.Tensor, rotation: Rotation) -> Stages[Residual]:
        residual: Residual = self.embedding(token_T)
        carried = None
        for block in self.blocks:
            residual, carried = yield from cast(StagedBlock, block).stages(residual, rotation, carried)
        return residual


def _joined(portions: list[Residual]) -> Residual:
    """The streams of all portions, one after the other, on their way into the head."""
    inputs_Td = torch.cat([portion.inputs for portion in portions])
    squares = [portion.squares for portion in portions if portion.squares is not None]
    return Residual(inputs_Td, inputs_Td, torch.cat(squares) if squares else None)
