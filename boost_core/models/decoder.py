"""What all families share: embedding, blocks, head and loss. Shape suffixes: T tokens, d hidden."""

from collections.abc import Iterable
from typing import Any, Protocol

import torch
from torch import nn

from boost_core.config import ModelConfig
from boost_core.nn.attention import Rotation
from boost_core.nn.embedding import TokenEmbedding
from boost_core.nn.head import HeadAndLoss
from boost_core.nn.strategy import Strategy


class Block(Protocol):
    """A decoder block; ``carried`` is what it hands to the next one beside the residual."""

    def __call__(self, x_Td: torch.Tensor, rotation: Rotation, carried: Any) -> tuple[torch.Tensor, Any]:
        """The residual ``[T, d]`` after the block, and what the next block is handed."""


class Decoder(nn.Module):
    """Embedding, the blocks of one family, head and loss.

    Args:
        model: The model's shape.
        strategy: How it is split over the tensor parallel ranks.
        blocks: The blocks, each a ``Block``.
    """

    def __init__(self, model: ModelConfig, strategy: Strategy, blocks: Iterable[nn.Module]) -> None:
        super().__init__()
        self.embedding = TokenEmbedding(model.vocab_size, model.hidden_size, strategy)
        self.blocks = nn.ModuleList(blocks)
        tied_to = self.embedding if model.tie_embeddings else None
        self.head = HeadAndLoss(model.vocab_size, model.hidden_size, model.norm_epsilon, strategy, tied_to)

    def forward(self, token_T: torch.Tensor, target_T: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Loss of each token in nats, ``[T]``; sequences of ``rotation.sequence_length`` one after the other."""
        x_Td, carried = self.embedding(token_T), None
        for block in self.blocks:
            x_Td, carried = block(x_Td, rotation, carried)
        loss_T: torch.Tensor = self.head(x_Td, target_T)
        return loss_T
