"""A weight as a family declares it, and the properties by which optimizers group weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from boost_core.config.training import OptimizerConfig


class Role(Enum):
    """What a weight does, which is all that a strategy needs to shard it."""

    EMBEDDING = "embedding"  # [V, d]
    DOWN_PROJECTION = "down"  # A: [d_in, g, r], for g projections of one input
    UP_PROJECTION = "up"  # B: [g, r, d_out]
    DENSE_IN = "dense in"  # out of the residual: [d_in, g, d_out]
    DENSE_OUT = "dense out"  # back into the residual: [d_in, d_out]
    CHANNELS = "channels"  # a factor for each channel of the residual, such as γ: [d]
    HEAD_CHANNELS = "head channels"  # a factor for each channel of a head; heads are split over ranks: [e]
    LATENT = "latent"  # operates on a whole latent: LaX's gates and norms
    HEAD = "head"  # [d, V]


# Weights of which each tensor parallel rank has all, but computes only a part of the gradient.
SUMMED = frozenset({Role.LATENT, Role.HEAD_CHANNELS})
FACTORS = frozenset({Role.DOWN_PROJECTION, Role.UP_PROJECTION})
MATRICES = FACTORS | {Role.DENSE_IN, Role.DENSE_OUT}

# The axis along which each role is split over the tensor parallel ranks; None if every rank has the whole weight.
SplitAxes = Mapping[Role, int | None]


@dataclass(frozen=True)
class WeightSpec:
    """One weight as the model declares it.

    Attributes:
        shape: Full shape, before sharding.
        role: What it does.
        start: Its initial values: a constant, or standard deviations of a normal distribution, either one for all or
            one for each projection along ``axis``.
        published: Names of the published tensors that it holds: one, or one for each projection along ``axis``.
        axis: The axis along which several projections' weights are stacked; ``None`` if it holds a single weight.
        transposed: Whether the published tensors are transposed.
    """

    shape: tuple[int, ...]
    role: Role
    start: float | tuple[float, ...]
    published: tuple[str, ...]
    axis: int | None = None
    transposed: bool = False


def moments_of(spec: WeightSpec, optimizer: OptimizerConfig) -> int:
    """Number of running means of a weight's gradient that an optimizer keeps."""
    return 1 if optimizer.kind == "muon" and spec.role in FACTORS else 2


@dataclass(frozen=True)
class ParamKind:
    """The properties shared by weights that are updated alike.

    Attributes:
        decay: Weight decay.
        split: Whether they are split over tensor parallel ranks; otherwise each rank has all of them.
        latent: Whether each tensor parallel rank computes only a part of their gradients.
        tied: Whether the first and last pipeline ranks both have them, and each computes a part of their gradients.
        custom_update: Whether the optimizer updates them by a special rule, for which it needs each weight whole.
        moments: Number of running means kept: 1 for the gradient only, 2 for its square as well.
    """

    decay: float
    split: bool
    latent: bool
    tied: bool
    custom_update: bool
    moments: int = 2

    @classmethod
    def of(cls, spec: WeightSpec, split: bool, optimizer: OptimizerConfig, tied: bool) -> "ParamKind":
        """The kind of one weight; weights initialized to a constant do not decay."""
        decay = 0.0 if isinstance(spec.start, float) else optimizer.weight_decay
        custom_update = optimizer.kind != "adamw" and spec.role in FACTORS
        return cls(decay, split, spec.role in SUMMED, tied, custom_update, moments_of(spec, optimizer))

    @property
    def order(self) -> tuple[float, bool, bool, bool]:
        """Sort key that puts the largest groups first, so that most gradients do not wait for the few others."""
        return -self.decay, self.latent, self.tied, self.custom_update
