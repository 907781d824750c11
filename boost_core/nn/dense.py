"""Dense projections: y = norm(x) W out of the residual, y = x W back into it.

Shape suffixes: T tokens, d input width, g projections of a common input, f output width.
"""

from collections.abc import Callable

import torch

from boost_core.architecture.families import group_weights
from boost_core.architecture.projections import ProjectionGroup
from boost_core.config.model import ModelConfig
from boost_core.nn.strategy import DenseStrategy, Latents, NormWeights, SharedLatents
from boost_core.nn.weights import WeightedModule


class Dense(WeightedModule):
    """One or more dense projections of a common input, called like a ``Bottleneck``, but without latents.

    Args:
        model: The model's shape.
        group: The projections.
        strategy: How their matrices are split.
    """

    def __init__(self, model: ModelConfig, group: ProjectionGroup, strategy: DenseStrategy) -> None:
        super().__init__(group_weights(model, group))
        self.group, self.strategy, self.norm_epsilon = group, strategy, model.norm_epsilon

    def down_project(
        self, x_Td: torch.Tensor, squares_T: torch.Tensor | None = None  # noqa: ARG002
    ) -> tuple[list[Latents], list[torch.Tensor]]:  # fmt: skip
        """Return no latents, but the input."""
        return [], [x_Td]

    def start(
        self, partials: list[Latents], shared: SharedLatents | None = None  # noqa: ARG002
    ) -> Callable[[], list[Latents]]:  # fmt: skip
        """Exchange nothing: there are no two matrices."""
        return lambda: partials

    def up_project(
        self, whole: list[Latents], carried: list[torch.Tensor] | None, x_Td: torch.Tensor  # noqa: ARG002
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:  # fmt: skip
        """Return one ``[g, T, f]`` for each run of equal widths, and no latents."""
        if self.group.norm is None:
            return [self.strategy.dense_out(x_Td, self.declared("weight")).unsqueeze(0)], []
        norm = NormWeights(self.declared("scale"), self.group.wide_in, self.norm_epsilon)
        weights_dgf = [self.declared(f"weight_{index}") for index in range(len(self.group.runs))]
        return self.strategy.dense_in(x_Td, weights_dgf, norm), []
