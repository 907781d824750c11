"""How a model is cut into pipeline stages of about equal work."""

from dataclasses import dataclass

from boost_core.config.model import ModelConfig
from boost_core.config.parallelism import ParallelismConfig
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


def cut(model: ModelConfig, parallelism: ParallelismConfig, sequence_length: int) -> list[Stage]:
    """All stages in order. The last has fewer blocks by what the head costs; an embedding costs next to nothing.

    Raises:
        ValueError: There are more stages than blocks.
    """
    count, layers = parallelism.stages, model.num_hidden_layers
    if count > layers:
        raise ValueError(f"{count} pipeline stages need as many blocks; the model has {layers}")
    block = computed_block_flops_per_token(model, parallelism, sequence_length)
    head_in_blocks = head_flops_per_token(model) / block
    of_last = range(1, layers - count + 2) if count > 1 else [layers]
    sizes = min(
        ([*_even(layers - last, count - 1), last] for last in of_last),
        key=lambda sizes: (max([*sizes[:-1], sizes[-1] + head_in_blocks]), -sizes[-1]),
    )  # fmt: skip
    begins = [sum(sizes[:index]) for index in range(count)]
    return [
        Stage(index, range(begin, begin + size), index == 0, index == count - 1)
        for index, (begin, size) in enumerate(zip(begins, sizes, strict=True))
    ]


def _even(layers: int, stages: int) -> list[int]:
    """Blocks of each of some stages, the later ones first to have one more."""
    return [layers * (index + 1) // stages - layers * index // stages for index in range(stages)]
