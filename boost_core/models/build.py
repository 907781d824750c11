"""Puts a family and a strategy together."""

from collections.abc import Sequence

from boost_core.config import ModelConfig, ParallelismConfig
from boost_core.config.strategy import chosen_strategy
from boost_core.models.decoder import Decoder
from boost_core.models.dense import DenseBlock
from boost_core.models.low_rank import LowRankBlock
from boost_core.nn.overlap import checkpoint_block, checkpoint_segment, no_recompute
from boost_core.nn.weights import SplitAxes
from boost_core.parallel.btp import BottleneckTensorParallel
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.fullrank_tp import FullRankTensorParallel
from boost_core.parallel.vanilla_tp import VanillaTensorParallel
from boost_core.plan.stages import Stage


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
    whole_block = checkpoint_block if parallelism.recompute == "full" else no_recompute
    if chosen_strategy(model, parallelism) == "fullrank":
        fullrank = FullRankTensorParallel(communicator)
        dense_blocks = {layer: DenseBlock(model, fullrank) for layer in layers}
        return Decoder(model, fullrank, dense_blocks, ends, recompute=whole_block), fullrank.SHARDED_AXIS
    strategy: BottleneckTensorParallel | VanillaTensorParallel
    if chosen_strategy(model, parallelism) == "vanilla":
        strategy = VanillaTensorParallel(communicator)
    else:
        strategy = BottleneckTensorParallel(communicator, parallelism.norm)
    between_exchanges = checkpoint_segment if parallelism.recompute == "latent" else no_recompute
    blocks = {
        layer: LowRankBlock(
            model, strategy, parallelism.group_projections, model.crosses_into(layer), between_exchanges
        )
        for layer in layers
    }
    splits = 2 if parallelism.split_micro_batch else 1
    return Decoder(model, strategy, blocks, ends, splits, whole_block), strategy.SHARDED_AXIS
