"""Weights are declared by full shape and role; a strategy decides which part of them a rank holds."""

import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn


class Role(Enum):
    """What a weight does, which is all that a strategy needs to shard it."""

    EMBEDDING = "embedding"  # [V, d]
    DOWN_PROJECTION = "down"  # A: [d_in, g, r], for g projections of one input
    UP_PROJECTION = "up"  # B: [g, r, d_out]
    DENSE_IN = "dense in"  # out of the residual: [d_in, g, d_out]
    DENSE_OUT = "dense out"  # back into the residual: [d_in, d_out]
    NORM_SCALE = "norm"  # γ: [d]
    LATENT = "latent"  # works on a whole latent: LaX's gates and norms
    HEAD = "head"  # [d, V]


# The axis that each role is split along over the tensor parallel ranks; None where every rank has the whole.
SplitAxes = Mapping[Role, int | None]


@dataclass(frozen=True)
class WeightSpec:
    """One weight as the model declares it.

    Attributes:
        shape: Full shape, before sharding.
        role: What it does.
        start: Its initial values: a constant, or the standard deviation of a normal for each group of columns.
        group_axis: The axis along which the groups lie.
    """

    shape: tuple[int, ...]
    role: Role
    start: float | tuple[float, ...]
    group_axis: int = 0


class WeightedModule(nn.Module):
    """A module that declares its weights; until a strategy makes them they are on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_specs: dict[str, WeightSpec] = {}

    def declare_constant(self, name: str, shape: tuple[int, ...], role: Role, value: float) -> None:
        """Declare a weight that starts at one value everywhere."""
        self._declare(name, WeightSpec(shape, role, value))

    def declare_normal(self, name: str, shape: tuple[int, ...], role: Role, *stds: float, group_axis: int = 0) -> None:
        """Declare a weight that starts from a normal; several ``stds`` belong to as many groups on ``group_axis``."""
        self._declare(name, WeightSpec(shape, role, stds, group_axis))

    def _declare(self, name: str, spec: WeightSpec) -> None:
        self.weight_specs[name] = spec
        self.register_parameter(name, nn.Parameter(torch.empty(spec.shape, device="meta")))


def equal_runs(widths: Iterable[int]) -> list[tuple[int, int]]:
    """Equal widths that stand next to each other, whose projections share a weight: each width, and how many."""
    return [(width, len(list(run))) for width, run in itertools.groupby(widths)]


def places_in_runs(runs: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """For each projection in order, the number of its run and its place in it."""
    return [(index, member) for index, (_, members) in enumerate(runs) for member in range(members)]


def norm_weights(model: nn.Module) -> list[str]:
    """Names of the scales and shifts of norms, which are what starts at a constant."""
    return [name for name, spec in weight_specs(model).items() if isinstance(spec.start, float)]


def weight_specs(model: nn.Module) -> dict[str, WeightSpec]:
    """Every declared weight of a model by its full name."""
    return {
        f"{path}.{name}": spec
        for path, module in model.named_modules()
        if isinstance(module, WeightedModule)
        for name, spec in module.weight_specs.items()
    }
