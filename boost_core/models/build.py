"""Puts a family and a strategy together."""

from boost_core.config import ModelConfig, ParallelismConfig
from boost_core.config.strategy import chosen_strategy
from boost_core.models.decoder import Decoder
from boost_core.models.dense import DenseBlock
from boost_core.models.low_rank import LowRankBlock
from boost_core.nn.strategy import LowRankStrategy
from boost_core.nn.weights import SplitAxes
from boost_core.parallel.btp import BottleneckTensorParallel
from boost_core.parallel.collectives import Collectives
from boost_core.parallel.fullrank_tp import FullRankTensorParallel
from boost_core.parallel.vanilla_tp import VanillaTensorParallel


def build(model: ModelConfig, parallelism: ParallelismConfig, collectives: Collectives) -> tuple[Decoder, SplitAxes]:
    """A model whose weights are declared, and the axes along which its strategy splits them.

    Args:
        model: The model's shape; legal with ``parallelism``.
        parallelism: The strategy and its choices.
        collectives: The tensor parallel group.
    """
    layers = range(model.num_hidden_layers)
    if chosen_strategy(model, parallelism) == "fullrank":
        fullrank = FullRankTensorParallel(collectives)
        return Decoder(model, fullrank, (DenseBlock(model, fullrank) for _ in layers)), fullrank.SHARDED_AXIS
    strategy: BottleneckTensorParallel | VanillaTensorParallel
    if chosen_strategy(model, parallelism) == "vanilla":
        strategy = VanillaTensorParallel(collectives)
    else:
        strategy = BottleneckTensorParallel(collectives, parallelism.norm)
    return _low_rank(model, strategy, parallelism.group_projections), strategy.SHARDED_AXIS


def _low_rank(model: ModelConfig, strategy: LowRankStrategy, grouped: bool) -> Decoder:
    # Nothing crosses into the first block.
    crosses = [model.lax is not None and layer > 0 for layer in range(model.num_hidden_layers)]
    return Decoder(model, strategy, (LowRankBlock(model, strategy, grouped, into) for into in crosses))
