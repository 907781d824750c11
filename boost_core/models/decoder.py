"""The parts common to all families: embedding, blocks, head and loss.

Shape suffixes: T tokens, d hidden; b sequences of s positions.
"""

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import cast

import torch
from torch import nn

from boost_core.config import ModelConfig, ParallelismConfig, RecomputeMode
from boost_core.kernels.residual_add import Residual
from boost_core.models.block import Block, Carried
from boost_core.nn.attention import Rotation
from boost_core.nn.embedding import TokenEmbedding
from boost_core.nn.head import HeadAndLoss
from boost_core.nn.overlap import Segments, run_together
from boost_core.nn.strategy import Strategy
from boost_core.parallel.shared_latents import Lookahead


class Decoder(nn.Module):
    """Embedding, blocks, head and loss, or the part of them on one pipeline rank.

    Args:
        model: The model's shape.
        parallelism: How its blocks are computed.
        strategy: How it is split over the tensor parallel ranks.
        modes: What each block keeps for the backward pass, by block number.
        ends: Whether it has the embedding, and whether it has the head.
        z_loss: The weight of the z-loss.
    """

    def __init__(
        self,
        model: ModelConfig,
        parallelism: ParallelismConfig,
        strategy: Strategy,
        modes: Mapping[int, RecomputeMode],
        ends: tuple[bool, bool],
        z_loss: float,
    ) -> None:
        super().__init__()
        self.strategy, self.splits = strategy, 2 if parallelism.split_micro_batch else 1
        with_embedding, with_head = ends
        self.embedding = TokenEmbedding(model, strategy) if with_embedding else None
        self.blocks = nn.ModuleDict(
            {
                str(layer): Block(model, parallelism, strategy, model.crosses_into(layer), mode)
                for layer, mode in modes.items()
            }
        )
        self.head = HeadAndLoss(model, strategy, self.embedding, z_loss) if with_head else None

    def forward(self, token_T: torch.Tensor, target_T: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Loss of each token in nats, ``[T]``; sequences of ``rotation.sequence_length`` one after the other."""
        if self.splits == 1:
            residual, _ = self.through(self.blocks, self.embed(token_T), None, rotation)
        else:
            splits = rotation.splits(token_T, self.splits)
            residual = _joined(run_together([self._in_segments(*split) for split in splits]))
        return self.losses(residual, target_T)

    def embed(self, token_T: torch.Tensor) -> Residual:
        """Return the residual stream that enters the first block."""
        if self.embedding is None:
            raise AssertionError("the embedding is on another rank")
        residual: Residual = self.embedding(token_T)
        return residual

    def through(
        self, blocks: Iterable[str], residual: Residual, carried: Carried | None, rotation: Rotation
    ) -> tuple[Residual, Carried | None]:
        """Return the residual stream after the given blocks, and what the last one hands on."""
        lookahead = Lookahead()
        for number in blocks:
            residual, carried = self.blocks[number](residual, rotation.for_layer(), carried, lookahead)
        return residual, carried

    def losses(self, residual: Residual, target_T: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token from the stream after the last block."""
        if self.head is None:
            raise AssertionError("the head is on another rank")
        loss_T: torch.Tensor = self.head(residual, target_T)
        return loss_T

    @contextmanager
    def predicting(self) -> Iterator[None]:
        """Make ``forward``, ``losses`` and pipeline stages return each most likely next token, not its loss."""
        heads = [self.head] if self.head is not None else []
        try:
            for head in heads:
                head.predicts = True
            yield
        finally:
            for head in heads:
                head.predicts = False

    def _in_segments(self, token_T: torch.Tensor, rotation: Rotation) -> Segments[Residual]:
        residual, carried, lookahead = self.embed(token_T), None, Lookahead()
        for block in self.blocks.values():
            residual, carried = yield from cast(Block, block).segments(
                residual, rotation.for_layer(), carried, lookahead
            )
        return residual


def _joined(splits: list[Residual]) -> Residual:
    """Concatenate the streams of all splits on their way into the head."""
    inputs_Td = torch.cat([split.inputs for split in splits])
    squares = [split.squares for split in splits if split.squares is not None]
    return Residual(inputs_Td, inputs_Td, torch.cat(squares) if squares else None)
