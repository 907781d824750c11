"""A weight as a family states it, and what optimizers group it by."""

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
    CHANNELS = "channels"  # a factor for each channel of the residual, as γ: [d]
    HEAD_CHANNELS = "head channels"  # a factor for each channel of every head, of which each rank has some: [e]
    LATENT = "latent"  # works on a whole latent: LaX's gates and norms
    HEAD = "head"  # [d, V]


# Whole on each tensor parallel rank, which computes a part of their gradients.
SUMMED = frozenset({Role.LATENT, Role.HEAD_CHANNELS})
FACTORS = frozenset({Role.DOWN_PROJECTION, Role.UP_PROJECTION})
MATRICES = FACTORS | {Role.DENSE_IN, Role.DENSE_OUT}

# The axis that each role is split along over the tensor parallel ranks; None where every rank has the whole.
SplitAxes = Mapping[Role, int | None]


@dataclass(frozen=True)
class WeightSpec:
    """One weight as the model declares it.

    Attributes:
        shape: Full shape, before sharding.
        role: What it does.
        start: Its initial values: a constant, or the standard deviation of a normal for each projection along ``axis``,
            or one for all.
        published: Names of the published tensors that it holds: one, or one for each projection along ``axis``.
        axis: The axis along which the weights of several projections lie; ``None`` for a weight of its own.
        transposed: Whether published tensors are its transpose.
    """

    shape: tuple[int, ...]
    role: Role
    start: float | tuple[float, ...]
    published: tuple[str, ...]
    axis: int | None = None
    transposed: bool = False


def moments_of(spec: WeightSpec, optimizer: OptimizerConfig) -> int:
    """How many running means of a weight's gradient an optimizer keeps."""
    return 1 if optimizer.kind == "muon" and spec.role in FACTORS else 2


@dataclass(frozen=True)
class ParamKind:
    """What weights that are updated alike have in common.

    Attributes:
        decay: Weight decay.
        split: Whether tensor parallel ranks have parts of them; else each has the whole.
        latent: Whether each tensor parallel rank computes a part of their gradients.
        tied: Whether the first and the last pipeline rank both have them, and compute a part of their gradients each.
        custom_update: Whether the optimizer updates them by a rule of its own, for which it needs each of them whole.
        moments: How many running means of their gradients it keeps: the first, or that of their squares, too.
    """

    decay: float
    split: bool
    latent: bool
    tied: bool
    custom_update: bool
    moments: int = 2

    @classmethod
    def of(cls, spec: WeightSpec, split: bool, optimizer: OptimizerConfig, tied: bool) -> "ParamKind":
        """That of one weight; what starts at a constant does not decay."""
        decay = 0.0 if isinstance(spec.start, float) else optimizer.weight_decay
        custom_update = optimizer.kind != "adamw" and spec.role in FACTORS
        return cls(decay, split, spec.role in SUMMED, tied, custom_update, moments_of(spec, optimizer))

    @property
    def order(self) -> tuple[float, bool, bool, bool]:
        """Sorts the largest groups first, so that most gradients need not wait for what little there is of others."""
        return -self.decay, self.latent, self.tied, self.custom_update
