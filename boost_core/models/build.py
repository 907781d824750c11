"""Puts a family and a strategy together."""

from collections.abc import Sequence
from typing import cast

from boost_core.architecture.block import ProjectionGroup
from boost_core.architecture.strategies import chosen_sharding
from boost_core.architecture.weights import SplitAxes
from boost_core.config import ModelConfig, ParallelismConfig
from boost_core.models.block import Block, Projections
from boost_core.models.decoder import Decoder
from boost_core.nn.bottleneck import Bottleneck
from boost_core.nn.dense import Dense
from boost_core.nn.overlap import checkpoint_block, checkpoint_segment, no_recompute
from boost_core.nn.strategy import DenseStrategy, LowRankStrategy
from boost_core.parallel.btp import BottleneckTensorParallel
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.fullrank_tp import FullRankTensorParallel
from boost_core.parallel.vanilla_tp import VanillaTensorParallel
from boost_core.plan.stages import Stage

_STRATEGIES = (BottleneckTensorParallel, VanillaTensorParallel, FullRankTensorParallel)


def build(
    model: ModelConfig,
    parallelism: ParallelismConfig,
    communicator: Communicator,
    stages: Sequence[Stage] | None = None,
) -> tuple[Decoder, SplitAxes]:
    """A model whose weights are declared, and the axes along which its strategy splits them.

    Args:
        model: The model's shape; legal with ``parallelism``.
        parallelism: The strategy and its choices.
        communicator: The tensor parallel group.
        stages: The pipeline stages of this rank; ``None`` for the whole model.
    """
    layers: Sequence[int] = range(model.num_hidden_layers)
    ends = (True, True)
    if stages is not None:
        layers = [layer for stage in stages for layer in stage.layers]
        with_head = any(stage.last for stage in stages)
        # A tied head has the embedding beside it wherever it is.
        ends = (any(stage.first for stage in stages) or (with_head and model.tie_embeddings), with_head)
    sharding = chosen_sharding(model, parallelism)
    (strategy,) = (each(communicator, parallelism.norm) for each in _STRATEGIES if each.SHARDING is sharding)
    whole_block = checkpoint_block if parallelism.recompute == "full" else no_recompute
    between_exchanges = checkpoint_segment if parallelism.recompute == "latent" else no_recompute

    def block(layer: int) -> Block:
        def project(group: ProjectionGroup) -> Projections:
            if model.rank is None:
                return Dense(model, group, cast(DenseStrategy, strategy))
            crosses = model.crosses_into(layer)
            return Bottleneck(model, group, cast(LowRankStrategy, strategy), parallelism.group_projections, crosses)

        return Block(model, project, strategy, between_exchanges)

    splits = 2 if parallelism.split_micro_batch else 1
    blocks = {layer: block(layer) for layer in layers}
    return Decoder(model, strategy, blocks, ends, splits, whole_block), sharding.axes
