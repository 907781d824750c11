"""Where each published tensor of a model is among the trainer's weights."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from boost_core.architecture.families import model_weights
from boost_core.config import ModelConfig

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Slot:
    """A part of one of the trainer's weights.

    Attributes:
        weight: The weight's name.
        index: Which part of it.
        transposed: Whether the published tensor is its transpose.
    """

    weight: str
    index: tuple[slice | int, ...] = ()
    transposed: bool = False

    def of(self, weights: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The part, seen as the published tensor is."""
        part = weights[self.weight][self.index]
        return part.T if self.transposed else part


def published_slots(model: ModelConfig) -> dict[str, Slot]:
    """The slot of every published tensor."""
    return {
        published: Slot(name, () if spec.axis is None else (slice(None),) * spec.axis + (place,), spec.transposed)
        for name, spec in model_weights(model).items()
        for place, published in enumerate(spec.published)
    }


def to_published(model: ModelConfig, weights: Mapping[str, torch.Tensor]) -> Tensors:
    """A model's whole weights under their published names."""
    return {name: slot.of(weights).contiguous() for name, slot in published_slots(model).items()}


def fill_from_published(model: ModelConfig, weights: Mapping[str, torch.Tensor], published: Tensors) -> None:
    """Fill a model's whole weights in place.

    Raises:
        ValueError: A tensor is missing, has another shape, or is not the model's.
    """
    slots = published_slots(model)
    if different := slots.keys() ^ published.keys():
        raise ValueError(
            f"the tensors are not those of a {model.family} model of {model.num_hidden_layers} layers: "
            f"{', '.join(sorted(different)[:3])}{' …' if len(different) > 3 else ''} is on one side only; "
            "make the job's model the same"
        )
    for name, slot in slots.items():
        part = slot.of(weights)
        if part.shape != published[name].shape:
            there, here = list(published[name].shape), list(part.shape)
            raise ValueError(f"{name} is {there} there and {here} in the job; make the job's model the same")
        part.copy_(published[name])
