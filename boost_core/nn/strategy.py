"""What a model asks of a tensor parallel strategy. Shape suffixes: T tokens, r latent columns, d hidden, V vocabulary.

A suffix names the tensor as an unsharded model has it; under a strategy the wide axes may be this rank's shard.
"""

from typing import Protocol

import torch


class Strategy(Protocol):
    """Where the ranks of a tensor parallel group exchange data."""

    def reduce_latent(
        self, partial_Tr: torch.Tensor, squares_T: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """A whole latent from this rank's part of the product with A, and with it the row sums of squares."""

    def share_latent(self, z_Tr: torch.Tensor) -> torch.Tensor:
        """A whole latent on its way into the up-projections."""

    def gather_hidden(self, x_Td: torch.Tensor, squares_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The whole hidden vector of each token, and its sum of squares, for the head."""

    def cross_entropy(self, logits_TV: torch.Tensor, target_T: torch.Tensor) -> torch.Tensor:
        """Cross entropy of each token in nats, ``[T]``, at least fp32."""
