"""The parts common to all families: embedding, blocks, head and loss.

Shape suffixes: T tokens, d hidden, V this rank's part of the vocabulary; b sequences of s positions.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from boost_core import architecture
from boost_core.architecture import SplitAxes, Stage, grouped_projections
from boost_core.config import ModelConfig, ParallelismConfig, RecomputeMode
from boost_core.config.parallelism import TRAITS
from boost_core.kernels.launch import Halves, Part
from boost_core.kernels.residual_add import Residual
from boost_core.model.attention import PartAttention, Rotation
from boost_core.model.block import Block, Carried
from boost_core.model.low_rank import Strategy, WeightedModule
from boost_core.parallel.baselines import FullRankTensorParallel, VanillaTensorParallel
from boost_core.parallel.btp import BottleneckTensorParallel, NormWeights
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.recompute import Lookahead, recomputed, run_in_turns, without_grad
from boost_core.parallel.vocabulary import likeliest_tokens, token_losses


class Decoder(nn.Module):
    """Embedding, blocks, head and loss, or the part of them on one pipeline rank.

    Args:
        model: The model's shape.
        parallelism: How its blocks are computed.
        strategy: How it is split over the tensor parallel ranks.
        modes: What each block keeps for the backward pass, by block number.
        ends: Whether it has the embedding, and whether it has the head.
        z_loss: The weight of the z-loss.

    Attributes:
        predicts: Set to have ``forward``, ``losses`` and pipeline stages return each most likely next token, not its
            loss.
    """

    def __init__(
        self, model: ModelConfig, parallelism: ParallelismConfig, strategy: Strategy,
        modes: Mapping[int, RecomputeMode], ends: tuple[bool, bool], z_loss: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.strategy, self.splits, self.z_loss = strategy, 2 if parallelism.split_micro_batch else 1, z_loss
        self.hidden_size, self.norm_epsilon = model.hidden_size, model.norm_epsilon
        self.saves_all = all(TRAITS[mode].again == "nothing" for mode in modes.values())
        with_embedding, with_head = ends
        self.embedding = WeightedModule(architecture.embedding_weights(model)) if with_embedding else None
        self.blocks = nn.ModuleDict()
        for layer, mode in modes.items():
            self.blocks[str(layer)] = Block(model, parallelism, strategy, model.crosses_into(layer), mode)
        self.head = WeightedModule(architecture.head_weights(model)) if with_head else None
        self.ties_embeddings, self.predicts = model.tie_embeddings, False

    def forward(self, token_T: torch.Tensor, target_T: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        """Loss of each token in nats, ``[T]``; sequences of ``rotation.sequence_length`` one after the other."""
        if self.splits == 1:
            residual, _ = self.through(self.blocks, self.embed(token_T), None, rotation)
        elif self.saves_all and rotation.attention is None and not rotation.parts:  # all tokens of its sequences
            residual = self._recorded_after_halves(self.embed(token_T), rotation)
        else:
            halves = rotation.splits(token_T, self.splits)
            through = run_in_turns([self._half(half_T, its_rotation) for half_T, its_rotation in halves])
            inputs_Td = torch.cat([half.inputs for half in through])
            squares = [half.squares for half in through if half.squares is not None]
            residual = Residual(inputs_Td, inputs_Td, torch.cat(squares) if squares else None)
        return self.losses(residual, target_T)

    def embed(self, token_T: torch.Tensor) -> Residual:
        """Return the residual stream that enters the first block."""
        if self.embedding is None:
            raise AssertionError("the embedding is on another rank")
        return self.strategy.embed(token_T, self.embedding.declared("weight"))

    def through(
        self, blocks: Iterable[str], residual: Residual, carried: Carried | None, rotation: Rotation
    ) -> tuple[Residual, Carried | None]:
        """Return the residual stream after the given blocks, and what the last one hands on."""
        computation = self._through(blocks, residual, carried, rotation, Lookahead())
        del residual, carried  # which it lets go of
        return run_in_turns([computation])[0]

    def losses(self, residual: Residual, target_T: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token in nats, ``[T]``, from the stream after the last block: norm, head and loss.

        Or, if it ``predicts``, the most likely next token.
        """
        if self.head is None:
            raise AssertionError("the head is on another rank")
        strategy, tied_to = self.strategy, self.embedding if self.ties_embeddings else None
        norm = NormWeights(self.head.declared("scale"), self.hidden_size, self.norm_epsilon)
        hidden_Td = strategy.final_norm(residual, norm)
        head_dV = self.head.declared("weight") if tied_to is None else strategy.tied_head(tied_to.declared("weight"))
        if self.predicts:
            return likeliest_tokens(strategy.communicator, hidden_Td, head_dV)
        sinks = strategy.deferred.sinks if tied_to is None else None
        return token_losses(strategy.communicator, hidden_Td, head_dV, target_T, self.z_loss, sinks)

    def _recorded_after_halves(self, residual: Residual, rotation: Rotation) -> Residual:
        """The stream after all blocks, where halves of the tokens are computed in turns."""
        tokens = len(residual.stream)
        halves, computations = Halves((-(-tokens // 2), tokens // 2)), []
        for part in (Part(halves, 0), Part(halves, 1), Part(halves, None)):
            squares_T = None if residual.squares is None else part.of(residual.squares)
            own = Residual(part.of(residual.stream), part.of(residual.inputs), squares_T)
            lookahead = Lookahead(overlapped=True, part=part)
            its_rotation = rotation.attending(rotation.attend, PartAttention(part))  # still that of all tokens
            computation = self._through(self.blocks, own, None, its_rotation, lookahead)
            computations.append(computation if part.place is None else without_grad(computation))
        return run_in_turns(computations)[-1][0]

    async def _half(self, token_T: torch.Tensor, rotation: Rotation) -> Residual:
        """The stream of a half of the tokens after all blocks, which the other half computes in turns with."""
        lookahead = Lookahead(overlapped=True)
        return (await self._through(self.blocks, self.embed(token_T), None, rotation, lookahead))[0]

    async def _through(
        self, blocks: Iterable[str], residual: Residual, carried: Carried | None, rotation: Rotation,
        lookahead: Lookahead,
    ) -> tuple[Residual, Carried | None]:  # fmt: skip
        for number in blocks:
            block = cast(Block, self.blocks[number])
            if block.traits.again == "all":
                residual, carried = recomputed(_alone, block, residual, rotation.for_layer(), carried, lookahead)
            else:
                residual, carried = await block(residual, rotation.for_layer(), carried, lookahead)
        return residual, carried


def _alone(block: Block, *inputs: Any) -> tuple[Residual, Carried | None]:
    """The block's whole computation, with nothing in between."""
    return cast(tuple[Residual, Carried | None], run_in_turns([block(*inputs)])[0])


# A pipeline stage: some of a model's blocks, with one of its ends or neither.
#
# Stages pass on the residual stream, of which each tensor parallel rank sends its own part, and under LaX the latents
# that cross into the next block. Shape suffixes: T tokens, d hidden.

Shape = tuple[int, ...]


class StageModule(nn.Module):
    """A stage as a module of tensors in, tensors out.

    Args:
        decoder: This rank's part of the model, which remains the owner of the weights.
        model: The model's shape.
        stage: Which of its blocks and ends.
        grouped: Whether projections with a common input share an exchange.

    Attributes:
        stage: As given.
        rotations: The positions of each micro-batch's tokens, and how they attend; kept while the micro-batch is here.
    """

    def __init__(self, decoder: Decoder, model: ModelConfig, stage: Stage, grouped: bool) -> None:
        super().__init__()
        self._decoder = (decoder,)  # in a tuple, so that the weights are registered only once
        self.stage, self._width = stage, model.hidden_size
        self.rotations: Sequence[Rotation] = ()
        self._blocks = [str(layer) for layer in stage.layers]
        self._takes = model.crosses_into(stage.layers.start)
        self._gives = not stage.last and model.crosses_into(stage.layers.stop)
        # Number of latents of width r in each tensor of a ``Carried``.
        self._rank = model.rank or 0
        self._carried = [[len(piece) for piece in group.pieces(grouped)] for group in grouped_projections(model)]

    def forward(self, *inputs: torch.Tensor, number_1: torch.Tensor, target_T: torch.Tensor | None = None) -> Any:
        """Map tokens ``[T]`` in the first stage, else the previous stage's output; the last returns losses ``[T]``.

        ``number_1`` is the micro-batch's number, on the host.
        """
        (decoder,) = self._decoder
        carried: Any = None
        if self.stage.first:
            residual = decoder.embed(inputs[0])
        else:
            residual, latents = decoder.strategy.enter(inputs[0]), iter(inputs[1:])
            if self._takes:
                carried = tuple([next(latents) for _ in counts] for counts in self._carried)
        residual, carried = decoder.through(self._blocks, residual, carried, self.rotations[int(number_1)])
        if not self.stage.last:
            sent = carried if self._gives and carried is not None else ()
            crossing = [each.flatten().view(each.shape) for part in sent for each in part]
            return (residual.inputs, *crossing)
        if target_T is None:
            raise AssertionError("the last stage needs the targets")
        return decoder.losses(residual, target_T)

    def shapes(self, tokens: int) -> tuple[list[Shape], list[Shape]]:
        """Shapes of the inputs and of the outputs for ``tokens`` tokens."""
        latents = [(count, tokens, self._rank) for counts in self._carried for count in counts]
        stream = self._decoder[0].strategy.part(tokens, self._width)
        inputs, outputs = ([stream, *(latents if crosses else ())] for crosses in (self._takes, self._gives))
        return [(tokens,)] if self.stage.first else inputs, [(tokens,)] if self.stage.last else outputs


# Builds a model from a family and a strategy.

_STRATEGIES = (BottleneckTensorParallel, VanillaTensorParallel, FullRankTensorParallel)


def build(
    model: ModelConfig, parallelism: ParallelismConfig, communicator: Communicator,
    stages: Sequence[Stage] | None = None, z_loss: float = 0.0, fp8: bool = False,
) -> tuple[Decoder, SplitAxes]:  # fmt: skip
    """Build a model with declared weights, and the axes along which its strategy splits them.

    Args:
        model: The model's shape; legal with ``parallelism``.
        parallelism: The strategy and its options.
        communicator: The tensor parallel group.
        stages: This rank's pipeline stages; ``None`` for the whole model.
        z_loss: The weight of the z-loss in the loss's gradient.
        fp8: Whether the blocks' products use ``kernels.fp8_product``; for btp.
    """
    if stages is None:
        stages = [Stage(0, range(model.num_hidden_layers), first=True, last=True)]
    with_head = any(stage.last for stage in stages)
    # A tied head always has the embedding on its rank.
    ends = (any(stage.first for stage in stages) or (with_head and model.tie_embeddings), with_head)
    modes = {layer: mode for stage in stages for layer, mode in architecture.block_modes(parallelism, stage).items()}
    sharding = architecture.chosen_sharding(model, parallelism)
    (strategy,) = (each(communicator, parallelism.norm, fp8) for each in _STRATEGIES if each.SHARDING is sharding)
    return Decoder(model, parallelism, strategy, modes, ends, z_loss), sharding.axes
