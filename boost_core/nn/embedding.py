"""The token embedding."""

import torch
from torch.nn.functional import embedding

from boost_core.nn.weights import Role, WeightedModule


class TokenEmbedding(WeightedModule):
    """Token ids to residual vectors.

    Under BTP a rank holds all tokens of its own columns, so that the residual is born sharded and neither
    the look-up nor its gradient is communicated.
    """

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.declare("weight", (vocab_size, hidden_size), Role.EMBEDDING, 0.02)

    def forward(self, token_T: torch.Tensor) -> torch.Tensor:
        """``[T]`` ids to ``[T, d]``."""
        return embedding(token_T, self.get_parameter("weight"))
