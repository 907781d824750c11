"""Weights are declared by full shape and role; a strategy decides which part of them a rank holds."""

from dataclasses import dataclass
from enum import Enum

import torch
from torch import nn


class Role(Enum):
    """What a weight does, which is all that a strategy needs to shard it."""

    EMBEDDING = "embedding"  # [V, d]
    DOWN_PROJECTION = "down"  # A: [d_in, r], several side by side for several projections of one input
    UP_PROJECTION = "up"  # B: [r, d_out]
    NORM_SCALE = "norm"  # γ: [d]
    HEAD = "head"  # [d, V]


@dataclass(frozen=True)
class WeightSpec:
    """One weight as the model declares it.

    Attributes:
        shape: Full shape, before sharding.
        role: What it does.
        column_stds: Standard deviations of the normal that it starts from, one for each of as many equal
            groups of columns; empty for a weight that starts at one.
    """

    shape: tuple[int, ...]
    role: Role
    column_stds: tuple[float, ...]


class WeightedModule(nn.Module):
    """A module that declares its weights; until a strategy makes them they are on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.weight_specs: dict[str, WeightSpec] = {}

    def declare(self, name: str, shape: tuple[int, ...], role: Role, *column_stds: float) -> None:
        """Declare the weight ``name``; see :class:`WeightSpec` for the arguments."""
        self.weight_specs[name] = WeightSpec(shape, role, column_stds)
        self.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))
