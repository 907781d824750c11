"""The token embedding."""

import torch

from boost_core.kernels.residual_add import Residual
from boost_core.nn.strategy import Strategy
from boost_core.nn.weights import Role, WeightedModule


class TokenEmbedding(WeightedModule):
    """Token ids to the residual stream."""

    def __init__(self, vocab_size: int, hidden_size: int, strategy: Strategy) -> None:
        super().__init__()
        self.strategy = strategy
        self.declare_normal("weight", (vocab_size, hidden_size), Role.EMBEDDING, 0.02)

    def forward(self, token_T: torch.Tensor) -> Residual:
        """``[T]`` ids to a stream of ``[T, d]``."""
        return self.strategy.embed(token_T, self.get_parameter("weight"))
