"""The final norm, the language-model head and the loss. Shape suffixes: T tokens, d hidden, V vocabulary."""

import torch

from boost_core.nn.bottleneck import sum_of_squares
from boost_core.nn.strategy import Strategy
from boost_core.nn.weights import Role, WeightedModule


class HeadAndLoss(WeightedModule):
    """RMSNorm, an untied dense head, and the cross entropy of each token.

    The norm costs no exchange of its own: its sum of squares travels with the hidden vectors, and 1/rms is
    applied to the logits' input after it.
    """

    def __init__(self, vocab_size: int, hidden_size: int, norm_epsilon: float, strategy: Strategy) -> None:
        super().__init__()
        self.hidden_size, self.norm_epsilon, self.strategy = hidden_size, norm_epsilon, strategy
        self.declare("scale", (hidden_size,), Role.NORM_SCALE)
        self.declare("weight", (hidden_size, vocab_size), Role.HEAD, 0.02)

    def forward(self, x_Td: torch.Tensor, target_T: torch.Tensor) -> torch.Tensor:
        """Loss of each token in nats, ``[T]``."""
        scaled_Td, squares_T = self.strategy.gather_hidden(x_Td * self.get_parameter("scale"), sum_of_squares(x_Td))
        inverse_rms_T = torch.rsqrt(squares_T / self.hidden_size + self.norm_epsilon)
        normed_Td = (scaled_Td * inverse_rms_T.unsqueeze(-1)).to(scaled_Td.dtype)
        return self.strategy.cross_entropy(normed_Td @ self.get_parameter("weight"), target_T)
