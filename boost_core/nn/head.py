"""The final norm, the language-model head and the loss. Shape suffixes: T tokens, d hidden, V vocabulary."""

import torch

from boost_core.architecture.families import head_weights
from boost_core.config.model import ModelConfig
from boost_core.kernels.residual_add import Residual
from boost_core.nn.embedding import TokenEmbedding
from boost_core.nn.strategy import NormWeights, Strategy
from boost_core.nn.weights import WeightedModule


class HeadAndLoss(WeightedModule):
    """RMSNorm, the head, and the cross entropy of each token.

    Args:
        model: The model's shape.
        strategy: Where the hidden vectors are made whole.
        embedding: The embedding, whose weight a tied head uses; ``None`` on ranks that do not have it.
        z_loss: The weight of the z-loss.

    Attributes:
        predicts: Whether it returns the most likely token after each instead of its loss.
    """

    def __init__(self, model: ModelConfig, strategy: Strategy, embedding: TokenEmbedding | None, z_loss: float) -> None:
        super().__init__(head_weights(model))
        self.hidden_size, self.norm_epsilon, self.strategy = model.hidden_size, model.norm_epsilon, strategy
        self.z_loss, self.predicts = z_loss, False
        # In a tuple, so that the embedding is not registered as a submodule of the head, too.
        self._tied_to = (embedding if model.tie_embeddings else None,)

    def forward(self, residual: Residual, target_T: torch.Tensor) -> torch.Tensor:
        """Return the loss of each token in nats, ``[T]``; or the most likely next token."""
        norm = NormWeights(self.declared("scale"), self.hidden_size, self.norm_epsilon)
        hidden_Td = self.strategy.final_norm(residual, norm)
        if self.predicts:
            return self.strategy.likeliest_tokens(hidden_Td, self._head())
        return self.strategy.token_losses(hidden_Td, self._head(), target_T, self.z_loss)

    def _head(self) -> torch.Tensor:
        (tied_to,) = self._tied_to
        if tied_to is None:
            return self.declared("weight")
        return self.strategy.tied_head(tied_to.declared("weight"))
