"""Builds a model from a family and a strategy."""

from collections.abc import Sequence

from boost_core.architecture.roles import SplitAxes
from boost_core.architecture.sharding import chosen_sharding
from boost_core.config import ModelConfig, ParallelismConfig
from boost_core.models.decoder import Decoder
from boost_core.parallel.btp import BottleneckTensorParallel
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.fullrank_tp import FullRankTensorParallel
from boost_core.parallel.vanilla_tp import VanillaTensorParallel
from boost_core.plan.stages import Stage, block_modes

_STRATEGIES = (BottleneckTensorParallel, VanillaTensorParallel, FullRankTensorParallel)


def build(
    model: ModelConfig,
    parallelism: ParallelismConfig,
    communicator: Communicator,
    stages: Sequence[Stage] | None = None,
    z_loss: float = 0.0,
    fp8: bool = False,
) -> tuple[Decoder, SplitAxes]:
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
