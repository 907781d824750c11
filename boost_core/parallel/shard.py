"""Turns a model's declarations into this rank's weights, the same full weights in any layout."""

import hashlib
from collections.abc import Callable
from typing import Protocol

import torch
from torch import nn

from boost_core.architecture.roles import SplitAxes, WeightSpec
from boost_core.nn.weights import WeightedModule, weight_specs


class WeightMaker(Protocol):
    """Gives a model whose weights are declared this rank's shards."""

    def __call__(
        self, model: nn.Module, axes: SplitAxes, rank: int, size: int, seed: int, device: torch.device
    ) -> None:
        """As ``make_weights`` does, from other values."""


def make_weights(
    model: nn.Module, axes: SplitAxes, rank: int, size: int, seed: int, device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """Replace every declared weight by this rank's shard of its initial value.

    Each full weight is drawn from a generator of its own, seeded by the weight's name, so the values depend
    on the seed alone and not on how many ranks there are or which one asks.

    Args:
        model: A model whose weights are declared.
        axes: The axis that each role is split along.
        rank: This rank's place in the tensor parallel group.
        size: Ranks in the tensor parallel group.
        seed: The job's seed.
        device: Where the shards live.
        dtype: Their type.
    """

    def shard(name: str, spec: WeightSpec) -> torch.Tensor:
        full = initial_value(name, spec, seed)
        return shard_of(full, axes[spec.role], rank, size).to(device, dtype, copy=True).contiguous()

    replace_weights(model, shard)


def allocate_weights(
    model: nn.Module, axes: SplitAxes, rank: int, size: int, seed: int, device: torch.device,
) -> None:  # fmt: skip
    """As a ``WeightMaker``, without values: for weights that are loaded, or drawn when nothing is there to load."""
    del rank, seed
    replace_weights(model, lambda _, spec: torch.empty(shard_shape(spec, axes, size), device=device))


def replace_weights(model: nn.Module, shard: Callable[[str, WeightSpec], torch.Tensor]) -> None:
    """Replace every declared weight by what ``shard`` makes of its full name and its declaration."""
    for path, module in model.named_modules():
        if isinstance(module, WeightedModule):
            for name, spec in module.weight_specs.items():
                module.register_parameter(name, nn.Parameter(shard(f"{path}.{name}", spec)))


def shard_shape(spec: WeightSpec, axes: SplitAxes, size: int) -> list[int]:
    """The shape of one rank's part of a weight."""
    shape, axis = list(spec.shape), axes[spec.role]
    if axis is not None:
        shape[axis] //= size
    return shape


def shard_of(full: torch.Tensor, axis: int | None, rank: int, size: int) -> torch.Tensor:
    """The part of a full weight that one rank holds."""
    return full if axis is None else full.chunk(size, dim=axis)[rank]


def split_axes(model: nn.Module, axes: SplitAxes) -> dict[str, int | None]:
    """The axis that each weight of a model is split along, by the weight's full name."""
    return {name: axes[spec.role] for name, spec in weight_specs(model).items()}


def initial_value(name: str, spec: WeightSpec, seed: int) -> torch.Tensor:
    """The full initial value of one weight, fp32 on CPU."""
    if isinstance(spec.start, float):
        return torch.full(spec.shape, spec.start)
    generator = torch.Generator().manual_seed(_seed_of(name, seed))
    values = torch.randn(spec.shape, generator=generator)
    for part, std in zip(values.chunk(len(spec.start), dim=spec.axis or 0), spec.start, strict=True):
        part.mul_(std)
    return values


def _seed_of(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")
