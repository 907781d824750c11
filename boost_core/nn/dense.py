"""Dense projections: y = norm(x) W out of the residual, y = x W back into it.

Shape suffixes: T tokens, d hidden, g projections of one input, f output width.
"""

import torch

from boost_core.nn.strategy import DenseStrategy, NormWeights
from boost_core.nn.weights import Role, WeightedModule, equal_runs

STD = 0.02


class DenseIn(WeightedModule):
    """One or more dense projections of the normed residual.

    Args:
        hidden_size: Width d of the residual.
        wide_outs: Output width of each projection; equal ones stand next to each other.
        norm_epsilon: ε of the RMSNorm in front of them.
        strategy: How the matrices are split.
    """

    def __init__(
        self, hidden_size: int, wide_outs: tuple[int, ...], norm_epsilon: float, strategy: DenseStrategy
    ) -> None:
        super().__init__()
        self.hidden_size, self.norm_epsilon, self.strategy = hidden_size, norm_epsilon, strategy
        self.runs = equal_runs(wide_outs)
        for index, (width, members) in enumerate(self.runs):
            self.declare_normal(f"weight_{index}", (hidden_size, members, width), Role.DENSE_IN, STD)
        self.declare_constant("scale", (hidden_size,), Role.NORM_SCALE, 1.0)

    def forward(self, x_Td: torch.Tensor) -> list[torch.Tensor]:
        """``[T, d]`` to one ``[g, T, f]`` for each run of equal widths."""
        norm = NormWeights(self.get_parameter("scale"), self.hidden_size, self.norm_epsilon)
        weights = [self.get_parameter(f"weight_{index}") for index in range(len(self.runs))]
        return self.strategy.dense_in(x_Td, weights, norm)


class DenseOut(WeightedModule):
    """A dense projection back into the residual."""

    def __init__(self, wide_in: int, hidden_size: int, strategy: DenseStrategy) -> None:
        super().__init__()
        self.strategy = strategy
        self.declare_normal("weight", (wide_in, hidden_size), Role.DENSE_OUT, STD)

    def forward(self, x_Tf: torch.Tensor) -> torch.Tensor:
        """``[T, f]`` to ``[T, d]``."""
        return self.strategy.dense_out(x_Tf, self.get_parameter("weight"))
