"""How a model is cut into pipeline stages: as the job lists them, or into stages of about equal work."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from boost_core.config.base import counted
from boost_core.config.layout import Layout
from boost_core.config.model import ModelConfig
from boost_core.config.parallelism import ParallelismConfig, RecomputeMode
from boost_core.plan.flops import computed_block_flops_per_token, head_flops_per_token


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline.

    Attributes:
        index: Its number, from 0; it runs on pipeline rank ``index mod pp``.
        layers: Its blocks.
        first: Whether it has the embedding.
        last: Whether it has the head and the loss.
    """

    index: int
    layers: range
    first: bool
    last: bool


def block_modes(parallelism: ParallelismConfig, stage: Stage) -> dict[int, RecomputeMode]:
    """Return the mode of each of a stage's blocks."""
    runs = parallelism.modes(stage.index, len(stage.layers))
    return dict(zip(stage.layers, (mode for mode, count in runs for _ in range(count)), strict=True))


def miscounted(model: ModelConfig, parallelism: ParallelismConfig, sequence_length: int) -> str | None:
    """Explain which stage has another number of blocks than ``recompute`` lists, and the fix; ``None`` if all match."""
    recompute = parallelism.recompute
    if not isinstance(recompute, tuple):
        return None
    sizes = layers_per_stage(model, parallelism, sequence_length)
    wrong = next((index for index, size in enumerate(sizes) if recompute[index].blocks != size), None)
    if wrong is None:
        return None
    return (
        f"parallelism.recompute lists {counted(recompute[wrong].blocks, 'block')} for stage {wrong} of "
        f"{Layout.of(parallelism).replica_text}, which has {sizes[wrong]}; make its entries add up to "
        f"{', '.join(map(str, sizes))}"
    )


def cut(model: ModelConfig, parallelism: ParallelismConfig, sequence_length: int) -> Sequence[Stage]:
    """Return all stages in order, as in ``pipeline_layers_per_stage`` if the job sets it.

    Otherwise the last stage has fewer blocks to make up for the head; an embedding costs next to nothing.

    Raises:
        ValueError: There are more stages than blocks.
    """
    count, layers = parallelism.stages, model.num_hidden_layers
    if parallelism.pipeline_layers_per_stage is not None:
        return stages_of(parallelism.pipeline_layers_per_stage)
    if count > layers:
        raise ValueError(f"{count} pipeline stages need as many blocks; the model has {layers}")
    block = computed_block_flops_per_token(model, parallelism, sequence_length)
    return _cut(layers, count, head_flops_per_token(model) / block)


def layers_per_stage(model: ModelConfig, parallelism: ParallelismConfig, sequence_length: int) -> tuple[int, ...]:
    """Return the number of blocks of each stage. Arguments and errors as in ``cut``."""
    return tuple(len(stage.layers) for stage in cut(model, parallelism, sequence_length))


@lru_cache(1024)  # a scheduler asks the same for each number of replicas
def _cut(layers: int, count: int, head_in_blocks: float) -> tuple[Stage, ...]:
    of_last = range(1, layers - count + 2) if count > 1 else [layers]

    def work(last: int) -> tuple[float, int]:
        most_of_others = -(-(layers - last) // (count - 1)) if count > 1 else 0
        return max(most_of_others, last + head_in_blocks), -last

    last = min(of_last, key=work)
    return stages_of((*_even(layers - last, count - 1), last))


@lru_cache(1024)
def stages_of(sizes: Sequence[int]) -> tuple[Stage, ...]:
    """Build stages with the given numbers of blocks."""
    return tuple(
        Stage(index, range(end - size, end), index == 0, index == len(sizes) - 1)
        for index, (end, size) in enumerate(zip(accumulate(sizes), sizes, strict=True))
    )


def _even(layers: int, stages: int) -> list[int]:
    """Distribute blocks evenly over stages; the later ones get the extra blocks."""
    return [layers * (index + 1) // stages - layers * index // stages for index in range(stages)]
