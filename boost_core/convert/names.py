"""The location of each published tensor of a model within the trainer's weights."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from boost_core.architecture import model_weights
from boost_core.checkpoint.shards import Chunk, Sizes
from boost_core.config import ModelConfig

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Slot:
    """A part of one of the trainer's weights.

    Attributes:
        weight: The weight's name.
        shape: The weight's shape.
        axis: The axis along which it is one slice; ``None`` for the whole weight.
        place: The index of the slice.
        transposed: Whether the published tensor is its transpose.
    """

    weight: str
    shape: Sizes
    axis: int | None
    place: int
    transposed: bool

    @property
    def published_shape(self) -> Sizes:
        """The shape of the published tensor."""
        part = tuple(size for axis, size in enumerate(self.shape) if axis != self.axis)
        return part[::-1] if self.transposed else part

    def of(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The part, as a view in the published form."""
        weight = weights[self.weight]
        part = weight if self.axis is None else weight.select(self.axis, self.place)
        return part.T if self.transposed else part

    def chunk(self, published: torch.Tensor, kind: str = "master") -> Chunk:
        """The published tensor as a box of one of the weight's tensors in a checkpoint: its master or a moment."""
        part, name = published.T if self.transposed else published, f"{self.weight}.{kind}"
        if self.axis is None:
            return Chunk.whole(name, part)
        offsets = tuple(self.place if axis == self.axis else 0 for axis in range(len(self.shape)))
        return Chunk(name, self.shape, offsets, part.unsqueeze(self.axis))


def published_slots(model: ModelConfig) -> dict[str, Slot]:
    """The slot of every published tensor."""
    return {
        published: Slot(name, spec.shape, spec.axis, place, spec.transposed)
        for name, spec in model_weights(model).items()
        for place, published in enumerate(spec.published)
    }


def to_published(model: ModelConfig, weights: Mapping[str, torch.Tensor]) -> Tensors:
    """A model's whole weights under their published names."""
    return {name: slot.of(weights).contiguous() for name, slot in published_slots(model).items()}
