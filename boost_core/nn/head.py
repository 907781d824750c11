"""The final norm, the language-model head and the loss. Shape suffixes: T tokens, d hidden, V vocabulary."""

import torch

from boost_core.kernels.residual_add import Residual
from boost_core.nn.embedding import TokenEmbedding
from boost_core.nn.strategy import NormWeights, Strategy
from boost_core.nn.weights import Role, WeightedModule


class HeadAndLoss(WeightedModule):
    """RMSNorm, the head, and the cross entropy of each token.

    Args:
        vocab_size: V.
        hidden_size: d.
        norm_epsilon: ε of the norm.
        strategy: Where the hidden vectors are made whole.
        tied_to: The embedding whose weight is the head's, too; ``None`` for a head of its own.
    """

    def __init__(
        self, vocab_size: int, hidden_size: int, norm_epsilon: float, strategy: Strategy, tied_to: TokenEmbedding | None
    ) -> None:
        super().__init__()
        self.hidden_size, self.norm_epsilon, self.strategy = hidden_size, norm_epsilon, strategy
        self.declare_constant("scale", (hidden_size,), Role.NORM_SCALE, 1.0)
        # In a tuple, so that the embedding does not become a part of the head, too.
        self._tied_to = (tied_to,)
        if tied_to is None:
            self.declare_normal("weight", (hidden_size, vocab_size), Role.HEAD, 0.02)

    def forward(self, residual: Residual, target_T: torch.Tensor) -> torch.Tensor:
        """Loss of each token in nats, ``[T]``."""
        norm = NormWeights(self.get_parameter("scale"), self.hidden_size, self.norm_epsilon)
        return self.strategy.token_losses(self.strategy.final_norm(residual, norm), self._head(), target_T)

    def _head(self) -> torch.Tensor:
        (tied_to,) = self._tied_to
        if tied_to is None:
            return self.get_parameter("weight")
        return self.strategy.tied_head(tied_to.get_parameter("weight"))
