"""What a model asks of a tensor parallel strategy.

Shape suffixes: T tokens, r latent, g projections of one input, d and f wide, V vocabulary. A suffix names the
tensor as an unsharded model has it; under a strategy an axis may be this rank's shard.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from boost_core.kernels.residual_add import Residual
from boost_core.kernels.symmetric_sum.memory import Epilogue

# Latents [T, g·r], and the row sums of squares [T] by which they are still to be scaled, if any.
Latents = tuple[torch.Tensor, torch.Tensor | None]


@dataclass
class GatheredLatents:
    """One exchange's latents as they were gathered, for its own backward pass.

    Attributes:
        latents: They themselves, and their statistics; ``None`` before, and after they were taken.
    """

    latents: Latents | None = None

    def take(self) -> Latents:
        """Give them once, so that their memory goes when it is used."""
        if self.latents is None:
            raise AssertionError("the backward pass comes to a segment before the exchange in front of it")
        taken, self.latents = self.latents, None
        return taken


class SharedLatents(Protocol):
    """What a segment of a block is given, of which no rank keeps the whole for its backward pass."""

    def of_exchange(self) -> GatheredLatents:
        """Where one more exchange in front of the segment finds its latents in backward."""

    def keep(self, latents: list[Latents], carried: list[torch.Tensor] | None) -> None:
        """Keep what the exchanges gave, in their order, and what crosses into the segment."""

    def give(self) -> tuple[list[Latents], list[torch.Tensor] | None]:
        """What was kept: first as it came, for the forward pass, and then as the ranks have it together, once."""


@dataclass(frozen=True)
class NormWeights:
    """An RMSNorm in front of a projection.

    Attributes:
        scale_d: γ.
        width: The full hidden size d.
        epsilon: ε, added to the mean square.
    """

    scale_d: torch.Tensor
    width: int
    epsilon: float


class Strategy(Protocol):
    """The ends of a model, which every family has.

    Attributes:
        fp8: Whether its products read their inputs' rows in 8 bits, which the kernels before them then leave.
    """

    fp8: bool

    def embed(self, token_T: torch.Tensor, weight_Vd: torch.Tensor) -> Residual:
        """The residual stream that the first block begins with."""

    def enter(self, x_Td: torch.Tensor) -> Residual:
        """The stream that comes from another pipeline stage."""

    def width(self, hidden_size: int) -> int:
        """Columns of the residual stream on each rank."""

    def abandon(self) -> None:
        """Forget what a backward pass that is not finished has left to be done."""

    def add(self, stream_Td: torch.Tensor, y_Td: torch.Tensor) -> Residual:
        """The stream after what a block adds to it, ``[T, d]``."""

    def final_norm(self, residual: Residual, norm: NormWeights) -> torch.Tensor:
        """The normalised hidden vectors, whole on every rank, on their way into this rank's part of the head."""

    def token_losses(
        self, x_Td: torch.Tensor, head_dV: torch.Tensor, target_T: torch.Tensor, z_loss: float
    ) -> torch.Tensor:
        """Cross entropy of each token in nats, ``[T]``, at least fp32; its gradient has the z-loss's in it."""

    def likeliest_tokens(self, x_Td: torch.Tensor, head_dV: torch.Tensor) -> torch.Tensor:
        """The likeliest token after each, ``[T]``, the same on all ranks."""

    def tied_head(self, embedding_Vd: torch.Tensor) -> torch.Tensor:
        """The embedding as a head, ``[d, V]``."""


class LowRankStrategy(Strategy, Protocol):
    """How the two matrices of a bottleneck are applied. Ranks wait for each other only in an exchange."""

    def partial_latents(
        self, x_Td: torch.Tensor, squares_T: torch.Tensor | None, down_dgr: torch.Tensor, norm: NormWeights | None
    ) -> Latents:
        """This rank's part of ``norm(x) A`` for g projections.

        Args:
            x_Td: The residual's values, or any other input where there is no norm.
            squares_T: The residual's sums of squares, if it has them.
            down_dgr: A.
            norm: The norm; ``None`` for none.
        """

    def start(
        self, partial: Latents, norm: NormWeights | None, epilogue: Epilogue | None = None,
        shared: SharedLatents | None = None,
    ) -> Callable[[], Latents]:  # fmt: skip
        """Start the exchange that makes latents whole.

        Args:
            partial: What ``partial_latents`` gave; overwritten.
            norm: What ``partial_latents`` was given.
            epilogue: What will be computed of them. Where the exchange does that in the same pass, it is left for
                ``latent_epilogue.made_of``.
            shared: Keeps the latents for the backward pass, if no rank is to keep them whole.

        Returns:
            Waits for the whole latents.
        """

    def up(self, z_gTr: torch.Tensor, up_grf: torch.Tensor) -> torch.Tensor:
        """``z B``, ``[g, T, f]``, in memory of its own."""


class DenseStrategy(Strategy, Protocol):
    """How a dense block's matrices are applied."""

    def dense_in(
        self, x_Td: torch.Tensor, weights_dgf: Sequence[torch.Tensor], norm: NormWeights
    ) -> list[torch.Tensor]:
        """``norm(x) W``, one ``[g, T, f]`` for each weight."""

    def dense_out(self, x_Tf: torch.Tensor, weight_fd: torch.Tensor) -> torch.Tensor:
        """``x W`` back into the residual, ``[T, d]``."""
