"""What is summed, and what is computed from the sum."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Peers:
    """The memory of some ranks, from the first to the last.

    Attributes:
        memory: Each rank's, flat and of one type.
        address_p: Where each begins, int64, on the device that reads it.
    """

    memory: list[torch.Tensor]
    address_p: torch.Tensor

    @classmethod
    def of(cls, memory: list[torch.Tensor]) -> "Peers":
        """Make peers from tensors."""
        addresses = [each.data_ptr() for each in memory]
        return cls(memory, torch.tensor(addresses, dtype=torch.int64, device=memory[0].device))

    def alone(self, rank: int) -> "Peers":
        """Return one of them."""
        return Peers(self.memory[rank : rank + 1], self.address_p[rank : rank + 1])


@dataclass(frozen=True)
class Epilogue:
    """What ``latent_epilogue`` will be asked to compute from latents.

    Attributes:
        tokens: T, their rows.
        count: Number of projections g, whose latents stand side by side in a row.
        statistic: Whether the norm's statistics follow the rows, one per token.
        width: The full hidden size d that these were summed over.
        epsilon: Added to the mean square.
        activation: Whether there is a SiLU.
    """

    tokens: int
    count: int
    statistic: bool
    width: int
    epsilon: float
    activation: bool

    def split(self, sent_n: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Split what was sent into ``[T, g·r]`` and ``[T]`` or ``None``."""
        if not self.statistic:
            return sent_n.view(self.tokens, -1), None
        latents = len(sent_n) - self.tokens
        return sent_n[:latents].view(self.tokens, -1), sent_n[latents:]
