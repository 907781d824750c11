"""Where each published tensor of a model is among the trainer's weights.

Dense models have the names of Hugging Face's LLaMA; low-rank ones those of CoLA's code, which has ``cola_a`` (d_in × r)
and ``cola_b`` (r × d_out) in the place of a projection's ``weight``. LLaMA's matrices are stored d_out × d_in. LaX's
crossings, which nobody has published, are ``crossing`` beside the ``cola_a`` of the projection that they cross into.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from boost_core.config import ModelConfig
from boost_core.nn.weights import equal_runs, places_in_runs
from boost_core.plan.parameters import projections

Tensors = dict[str, torch.Tensor]

# The trainer's modules of a block, and the projections in each, by their published names.
_MODULES = {
    "query_key_value": {"query": "self_attn.q_proj", "key": "self_attn.k_proj", "value": "self_attn.v_proj"},
    "output": {"output": "self_attn.o_proj"},
    "gate_up": {"gate": "mlp.gate_proj", "up": "mlp.up_proj"},
    "down": {"down": "mlp.down_proj"},
}
# A crossing's weights by its gate; each has a place for every projection of its module.
_CROSSINGS = {
    "identity": ("norm_scale", "norm_shift"),
    "dense": ("norm_scale", "norm_shift", "gate_matrix"),
    "tensor": ("norm_scale", "norm_shift", "gate_a", "gate_b"),
}
_NORMS = {"query_key_value": "input_layernorm", "gate_up": "post_attention_layernorm"}


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
    slots = {"model.embed_tokens.weight": Slot("embedding.weight"), "model.norm.weight": Slot("head.scale")}
    if not model.tie_embeddings:
        slots["lm_head.weight"] = Slot("head.weight", transposed=True)
    for layer in range(model.num_hidden_layers):
        here, there = f"blocks.{layer}", f"model.layers.{layer}"
        for module, norm in _NORMS.items():
            slots[f"{there}.{norm}.weight"] = Slot(f"{here}.{module}.scale")
        for module, names in _MODULES.items():
            for name, slot in _projection_slots(model, f"{here}.{module}", names):
                slots[f"{there}.{name}"] = slot
            if model.lax is not None and model.crosses_into(layer):
                for place, name in enumerate(names.values()):
                    for part in _CROSSINGS[model.lax.gate]:
                        slots[f"{there}.{name}.crossing.{part}"] = Slot(f"{here}.{module}.crossing.{part}", (place,))
    return slots


def _projection_slots(model: ModelConfig, module: str, names: dict[str, str]) -> Iterator[tuple[str, Slot]]:
    whole = slice(None)
    for place, (name, run, member) in enumerate(_runs(model, list(names))):
        if model.family != "dense":
            yield f"{names[name]}.cola_a", Slot(f"{module}.down", (whole, place))
            yield f"{names[name]}.cola_b", Slot(f"{module}.up_{run}", (member,))
        elif module.endswith(("query_key_value", "gate_up")):
            yield f"{names[name]}.weight", Slot(f"{module}.weight_{run}", (whole, member), transposed=True)
        else:
            yield f"{names[name]}.weight", Slot(f"{module}.weight", transposed=True)


def _runs(model: ModelConfig, names: list[str]) -> Iterator[tuple[str, int, int]]:
    """Each projection with its place among those of equal output width, which share a weight."""
    widths = [projections(model)[name][1] for name in names]
    for name, (run, member) in zip(names, places_in_runs(equal_runs(widths)), strict=True):
        yield name, run, member


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
