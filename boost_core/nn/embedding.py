"""The token embedding."""

import torch

from boost_core.architecture.families import embedding_weights
from boost_core.config.model import ModelConfig
from boost_core.kernels.residual_add import Residual
from boost_core.nn.strategy import Strategy
from boost_core.nn.weights import WeightedModule


class TokenEmbedding(WeightedModule):
    """Maps token ids to the residual stream."""

    def __init__(self, model: ModelConfig, strategy: Strategy) -> None:
        super().__init__(embedding_weights(model))
        self.strategy = strategy

    def forward(self, token_T: torch.Tensor) -> Residual:
        """Map ``[T]`` ids to a stream of ``[T, d]``."""
        return self.strategy.embed(token_T, self.declared("weight"))
