"""Modules declare their weights by full shape and role; a strategy decides which part of them a rank holds."""

from collections.abc import Mapping

import torch
from torch import nn

from boost_core.architecture.roles import WeightSpec


class WeightedModule(nn.Module):
    """A module that declares its weights; they are on the meta device until a strategy creates them."""

    def __init__(self, weights: Mapping[str, WeightSpec]) -> None:
        super().__init__()
        self.weight_specs = weights
        for name, spec in weights.items():
            self.register_parameter(name, nn.Parameter(torch.empty(spec.shape, device="meta")))

    def declared(self, name: str) -> nn.Parameter:
        """Return one of its weights; ``get_parameter`` would first look for a module on the way to it."""
        weight = self._parameters[name]
        if weight is None:
            raise AssertionError(f"{name} has been taken away")
        return weight


def weight_specs(model: nn.Module) -> dict[str, WeightSpec]:
    """Return every declared weight of a model by its full name."""
    return {
        f"{path}.{name}": spec
        for path, module in model.named_modules()
        if isinstance(module, WeightedModule)
        for name, spec in module.weight_specs.items()
    }
