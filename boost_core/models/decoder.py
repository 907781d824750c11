"""What all families share: embedding, blocks, head and loss.

Shape suffixes: T tokens, d hidden; b sequences of s positions.
"""

from collections.abc import Iterable, Mapping
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
    """Embedding, the blocks of one family, head and loss, or the part of them that a pipeline rank has.

    Args:
        model: The model's shape.
        strategy: How it is split over the tensor parallel ranks.
        blocks: The blocks by number, each a ``Block``; a ``StagedBlock`` where there are several portions.
        ends: Whether the embedding is there, and whether the head is.
        portions: In how many portions the sequences go through the blocks, in turns.
        local: Calls a block; it may forget what that computes and compute it again.
    """

    def __init__(
        self,
        model: ModelConfig,
        strategy: Strategy,
        blocks: Mapping[int, nn.Module],
        ends: tuple[bool, bool] = (True, True),
        portions: int = 1,
        local: Local = plainly,
    ) -> None:
        super().__init__()
        self.strategy, self.portions, self.local = strategy, portions, local
        with_embedding, with_head = ends
        self.embedding = TokenEmbedding(model.vocab_size, model.hidden_size, strategy) if with_embedding else None
        self.blocks = nn.ModuleDict({str(number): block for number, block in blocks.items()})
        tied_to = self.embedding if model.tie_embeddings else None
        self.head = (
            HeadAndLoss(model.vocab_size, model.hidden_size, model.norm_epsilon, strategy, tied_to)
            if with_head
            else None
        )

    def forward(self, token_T: torch.Tensor, target_T: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Loss of each token in nats, ``[T]``; sequences of ``rotation.sequence_length`` one after the other."""
        if self.portions == 1:
            residual, _ = self.through(self.blocks, self.embed(token_T), None, rotation)
        else:
            token_bs = token_T.view(-1, rotation.sequence_length)
            chunks = token_bs.chunk(self.portions)  # of one sequence there is only one
            portions = [
                self._in_stages(portion_bs.flatten(), its_rotation)
                for portion_bs, its_rotation in zip(chunks, rotation.portions(len(chunks)), strict=True)
            ]
            residual = _joined(run_together(portions))
        return self.losses(residual, target_T)

    def embed(self, token_T: torch.Tensor) -> Residual:
        """The residual stream that the first block begins with."""
        if self.embedding is None:
            raise AssertionError("the embedding is on another rank")
        residual: Residual = self.embedding(token_T)
        return residual

    def through(
        self, blocks: Iterable[str], residual: Residual, carried: Any, rotation: Rotation
    ) -> tuple[Residual, Any]:
        """The residual stream through blocks of these numbers, and what the last hands on."""
        for number in blocks:
            residual, carried = self.local(self.blocks[number], residual, rotation, carried)
        return residual, carried

    def losses(self, residual: Residual, target_T: torch.Tensor) -> torch.Tensor:
        """Loss of each token from the stream after the last block."""
        if self.head is None:
            raise AssertionError("the head is on another rank")
        loss_T: torch.Tensor = self.head(residual, target_T)
        return loss_T

    def _in_stages(self, token_T: torch.Tensor, rotation: Rotation) -> Stages[Residual]:
        residual, carried = self.embed(token_T), None
        for block in self.blocks.values():
            residual, carried = yield from cast(StagedBlock, block).stages(residual, rotation, carried)
        return residual


def _joined(portions: list[Residual]) -> Residual:
    """The streams of all portions, one after the other, on their way into the head."""
    inputs_Td = torch.cat([portion.inputs for portion in portions])
    squares = [portion.squares for portion in portions if portion.squares is not None]
    return Residual(inputs_Td, inputs_Td, torch.cat(squares) if squares else None)
