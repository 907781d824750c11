"""The parts common to all families: embedding, blocks, head and loss.

Logits are computed for a few tokens at a time, forward and again backward, so that all T × V never exist at once.
Shape suffixes: T tokens, d hidden, V this rank's part of the vocabulary, c tokens of a chunk; b sequences of s
positions.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from boost_core.architecture import SplitAxes, chosen_sharding, embedding_weights, head_weights, projection_groups
from boost_core.config import ModelConfig, ParallelismConfig, RecomputeMode
from boost_core.kernels.cross_entropy import logits_gradient, row_statistics
from boost_core.kernels.launch import precise
from boost_core.kernels.residual_add import Residual
from boost_core.model.attention import Rotation
from boost_core.model.block import Block, Carried
from boost_core.model.low_rank import Strategy, WeightedModule
from boost_core.parallel.baselines import FullRankTensorParallel, VanillaTensorParallel
from boost_core.parallel.btp import BottleneckTensorParallel, NormWeights
from boost_core.parallel.communicator import Communicator, all_to_all
from boost_core.parallel.recompute import Lookahead, recomputed, run_in_turns
from boost_core.plan.work import Stage, block_modes

# Logits of a chunk are about this many elements: 256 MiB in fp32.
CHUNK_ELEMENTS = 1 << 26


class _HeadLoss(torch.autograd.Function):
    """Loss of token t: m − x_t·w_target with m = log Σ_v exp(x_t·w_v). Of the logits only m is saved.

    The gradient is that of loss + ζ m²; the z-loss, ζ m², keeps logits from drifting (PaLM, arXiv 2204.02311).
    """

    @staticmethod
    def forward(
        ctx: Any, x_Td: torch.Tensor, head_dV: torch.Tensor, target_T: torch.Tensor, communicator: Communicator,
        chunk: int, z_loss: float,
    ) -> torch.Tensor:  # fmt: skip
        local_T = target_T - communicator.rank * head_dV.shape[1]
        statistics = [
            row_statistics(x_cd @ head_dV, local_c)
            for x_cd, local_c in zip(torch.split(x_Td, chunk), torch.split(local_T, chunk), strict=True)
        ]
        local_sum_T, local_logit_T = (torch.cat(parts) for parts in zip(*statistics, strict=True))
        maximum_T = communicator.all_reduce_(local_sum_T.clone(), "loss maximum", dist.ReduceOp.MAX)
        sums_2T = torch.stack([(local_sum_T - maximum_T).exp(), local_logit_T])
        sum_T, target_logit_T = communicator.all_reduce_(sums_2T, "loss sums")
        log_sum_T = maximum_T + sum_T.log()
        ctx.save_for_backward(x_Td, head_dV, local_T, log_sum_T)
        ctx.chunk, ctx.z_loss = chunk, z_loss
        loss_T: torch.Tensor = log_sum_T - target_logit_T
        return loss_T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x_Td, head_dV, local_T, log_sum_T = ctx.saved_tensors
        dloss_T = gradients[0]
        dlog_sum_T = dloss_T * (1 + 2 * ctx.z_loss * log_sum_T)
        dx_Td, dhead_dV = torch.empty_like(x_Td), torch.zeros_like(precise(head_dV))
        for begin in range(0, len(x_Td), ctx.chunk):
            here = slice(begin, begin + ctx.chunk)
            x_cd = x_Td[here]
            dlogits_cV = logits_gradient(
                x_cd @ head_dV, local_T[here], log_sum_T[here], dloss_T[here], dlog_sum_T[here]
            )
            dx_Td[here] = dlogits_cV @ head_dV.T
            dhead_dV += x_cd.T @ dlogits_cV
        return dx_Td, dhead_dV.to(head_dV.dtype), None, None, None, None


def token_losses(
    communicator: Communicator, x_Td: torch.Tensor, head_dV: torch.Tensor, target_T: torch.Tensor, z_loss: float
) -> torch.Tensor:
    """Cross entropy of each token, ``[T]`` in nats and at least fp32, the same on all ranks.

    The z-loss affects only the gradient, so that losses are comparable whatever the z-loss is.

    Args:
        communicator: The tensor parallel group, over which the vocabulary is split.
        x_Td: Whole normed hidden vectors; their gradient is this rank's part of it.
        head_dV: This rank's columns of the head.
        target_T: Token ids over the whole vocabulary.
        z_loss: ζ, the weight of the z-loss.
    """
    chunk = max(1, CHUNK_ELEMENTS // head_dV.shape[1])
    return _HeadLoss.apply(x_Td, head_dV, target_T, communicator, chunk, z_loss)  # type: ignore[no-any-return, no-untyped-call]


def likeliest_tokens(communicator: Communicator, x_Td: torch.Tensor, head_dV: torch.Tensor) -> torch.Tensor:
    """The most likely token after each, ``[T]``, the same on all ranks; among equal logits, the first.

    Args:
        communicator: The tensor parallel group, over which the vocabulary is split.
        x_Td: Whole normed hidden vectors.
        head_dV: This rank's columns of the head.
    """
    columns = head_dV.shape[1]
    largest = [(x_cd @ head_dV).max(dim=1) for x_cd in torch.split(x_Td, max(1, CHUNK_ELEMENTS // columns))]
    logit_T = torch.cat([values for values, _ in largest]).float()
    token_T = torch.cat([places for _, places in largest]) + communicator.rank * columns
    maximum_T = communicator.all_reduce_(logit_T.clone(), "likeliest logit", dist.ReduceOp.MAX)
    token_T = token_T.where(logit_T == maximum_T, communicator.size * columns)
    communicator.all_reduce_(token_T, "likeliest token", dist.ReduceOp.MIN)
    return token_T.clamp_(max=communicator.size * columns - 1)  # where no logit is a number, none is the largest


class TokenEmbedding(WeightedModule):
    """Maps token ids to the residual stream."""

    def __init__(self, model: ModelConfig, strategy: Strategy) -> None:
        super().__init__(embedding_weights(model))
        self.strategy = strategy

    def forward(self, token_T: torch.Tensor) -> Residual:
        """Map ``[T]`` ids to a stream of ``[T, d]``."""
        return self.strategy.embed(token_T, self.declared("weight"))


class HeadAndLoss(WeightedModule):
    """RMSNorm, the head, and the cross entropy of each token.

    Args:
        model: The model's shape.
        strategy: Where the hidden vectors are made whole.
        embedding: The embedding, whose weight a tied head uses; ``None`` on ranks that do not have it.
        z_loss: The weight of the z-loss.

    Attributes:
        predicts: Whether it returns the most likely token after each instead of its loss.
    """

    def __init__(self, model: ModelConfig, strategy: Strategy, embedding: TokenEmbedding | None, z_loss: float) -> None:
        super().__init__(head_weights(model))
        self.hidden_size, self.norm_epsilon, self.strategy = model.hidden_size, model.norm_epsilon, strategy
        self.z_loss, self.predicts = z_loss, False
        # In a tuple, so that the embedding is not registered as a submodule of the head, too.
        self._tied_to = (embedding if model.tie_embeddings else None,)

    def forward(self, residual: Residual, target_T: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token in nats, ``[T]``; or the most likely next token."""
        norm = NormWeights(self.declared("scale"), self.hidden_size, self.norm_epsilon)
        hidden_Td = self.strategy.final_norm(residual, norm)
        (tied_to,) = self._tied_to
        if tied_to is None:
            head_dV: torch.Tensor = self.declared("weight")
        else:
            # Where the residual is sharded, so are the embedding's columns: one all-to-all turns some columns of all
            # rows into all columns of some rows. Otherwise embedding and head have the same shard.
            embedding_Vd: torch.Tensor = tied_to.declared("weight")
            if self.strategy.shards > 1:
                embedding_Vd = all_to_all(embedding_Vd, self.strategy.communicator, "tied head")
            head_dV = embedding_Vd.T
        if self.predicts:
            return likeliest_tokens(self.strategy.communicator, hidden_Td, head_dV)
        return token_losses(self.strategy.communicator, hidden_Td, head_dV, target_T, self.z_loss)


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
        self, model: ModelConfig, parallelism: ParallelismConfig, strategy: Strategy,
        modes: Mapping[int, RecomputeMode], ends: tuple[bool, bool], z_loss: float,
    ) -> None:  # fmt: skip
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
        residual: Residual = self.embedding(token_T)
        return residual

    def through(
        self, blocks: Iterable[str], residual: Residual, carried: Carried | None, rotation: Rotation
    ) -> tuple[Residual, Carried | None]:
        """Return the residual stream after the given blocks, and what the last one hands on."""
        computation = self._through(blocks, residual, carried, rotation, Lookahead())
        del residual, carried  # which it lets go of
        return run_in_turns([computation])[0]

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

    async def _half(self, token_T: torch.Tensor, rotation: Rotation) -> Residual:
        """The stream of a half of the tokens after all blocks, which the other half computes in turns with."""
        lookahead = Lookahead(overlapped=True)
        return (await self._through(self.blocks, self.embed(token_T), None, rotation, lookahead))[0]

    async def _through(
        self, blocks: Iterable[str], residual: Residual, carried: Carried | None, rotation: Rotation,
        lookahead: Lookahead,
    ) -> tuple[Residual, Carried | None]:  # fmt: skip
        for number in blocks:
            block = self.blocks[number]
            if block.traits.again == "all":
                residual, carried = recomputed(_alone, block, residual, rotation.for_layer(), carried, lookahead)
            else:
                residual, carried = await block(residual, rotation.for_layer(), carried, lookahead)
        return residual, carried


def _alone(block: Block, *inputs: Any) -> tuple[Residual, Carried | None]:
    """The block's whole computation, with nothing in between."""
    result: tuple[Residual, Carried | None] = run_in_turns([block(*inputs)])[0]
    return result


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
        self.stage, self._width = stage, model.hidden_size // decoder.strategy.shards
        self.rotations: Sequence[Rotation] = ()
        self._blocks = [str(layer) for layer in stage.layers]
        self._takes = model.crosses_into(stage.layers.start)
        self._gives = not stage.last and model.crosses_into(stage.layers.stop)
        # Number of latents of width r in each tensor of a ``Carried``.
        self._rank = model.rank or 0
        self._carried = [[len(piece) for piece in group.pieces(grouped)] for group in projection_groups(model)]

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
        inputs, outputs = (
            [(tokens, self._width), *(latents if crosses else ())] for crosses in (self._takes, self._gives)
        )
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
    modes = {layer: mode for stage in stages for layer, mode in block_modes(parallelism, stage).items()}
    sharding = chosen_sharding(model, parallelism)
    (strategy,) = (each(communicator, parallelism.norm, fp8) for each in _STRATEGIES if each.SHARDING is sharding)
    return Decoder(model, parallelism, strategy, modes, ends, z_loss), sharding.axes
