"""Turns a model's declarations into this rank's weights, the same full weights in any layout."""

import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import nn

from boost_core.architecture.roles import SplitAxes, WeightSpec
from boost_core.nn.weights import WeightedModule, weight_specs
from boost_core.parallel.philox import normal_


class WeightMaker(Protocol):
    """Gives this rank's shards to a model with declared weights."""

    def __call__(
        self, model: nn.Module, axes: SplitAxes, rank: int, size: int, seed: int, device: torch.device
    ) -> None:
        """As ``make_weights`` does, from other values."""


def make_weights(
    model: nn.Module, axes: SplitAxes, rank: int, size: int, seed: int, device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """Replace every declared weight by this rank's shard of its initial value.

    The values depend only on the seed, not on the number of ranks or which one asks.

    Args:
        model: A model with declared weights.
        axes: The axis that each role is split along.
        rank: This rank's index in the tensor parallel group.
        size: Number of ranks in the tensor parallel group.
        seed: The job's seed.
        device: Where the shards live.
        dtype: Their type.
    """

    def shard(name: str, spec: WeightSpec) -> torch.Tensor:
        axis, sizes = axes[spec.role], shard_shape(spec, axes, size)
        offsets = [rank * length if place == axis else 0 for place, length in enumerate(sizes)]
        weight = torch.empty(sizes, dtype=dtype, device=device)
        initialize_(weight, offsets, name, spec, seed)
        return weight

    replace_weights(model, shard)


def allocate_weights(
    model: nn.Module, axes: SplitAxes, rank: int, size: int, seed: int, device: torch.device,
) -> None:  # fmt: skip
    """A ``WeightMaker`` without values: for weights that are loaded, or drawn if there is nothing to load."""
    del rank, seed
    replace_weights(model, lambda _, spec: torch.empty(shard_shape(spec, axes, size), device=device))


def replace_weights(model: nn.Module, shard: Callable[[str, WeightSpec], torch.Tensor]) -> None:
    """Replace every declared weight by what ``shard`` returns for its full name and declaration."""
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


def split_axes(model: nn.Module, axes: SplitAxes) -> dict[str, int | None]:
    """The axis that each weight of a model is split along, by the weight's full name."""
    return {name: axes[spec.role] for name, spec in weight_specs(model).items()}


def initialize_(box: torch.Tensor, offsets: Sequence[int], name: str, spec: WeightSpec, seed: int) -> None:
    """Fill a box of a weight with its initial values, which depend on the seed, the weight's name and their places.

    Only this part of the weight is drawn, on the box's device.

    Args:
        box: The box to fill.
        offsets: Where it begins in the full weight.
        name: The weight's full name.
        spec: Its declaration.
        seed: The job's seed.
    """
    if isinstance(spec.start, float):
        box.fill_(spec.start)
        return
    normal_(box, spec.shape, offsets, _key_of(name, seed), _stds(spec, spec.start, box, offsets))


def _stds(
    spec: WeightSpec, start: tuple[float, ...], box: torch.Tensor, offsets: Sequence[int]
) -> torch.Tensor | float:  # fmt: skip
    """Standard deviations of a box's elements: one per projection along the projections' axis, or one for all."""
    if spec.axis is None or len(start) == 1:
        return start[0]
    each = torch.tensor(start, dtype=torch.float64, device=box.device)
    along = each.repeat_interleave(spec.shape[spec.axis] // len(start))
    sizes = [1] * box.ndim
    sizes[spec.axis] = box.shape[spec.axis]
    return along.narrow(0, offsets[spec.axis], box.shape[spec.axis]).view(sizes)


def _key_of(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:8], "big")
