"""What a model asks of a tensor parallel strategy.

Shape suffixes: T tokens, r latent, g projections of a common input, d and f wide, V vocabulary. A suffix names the
tensor as an unsharded model has it; under a strategy an axis may be this rank's shard.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from boost_core.kernels.residual_add import Residual
from boost_core.kernels.symmetric_sum import Epilogue
from boost_core.parallel.weight_gradients import GradientSinks

# Latents [T, g·r], and the row sums of squares [T] by which they are still to be scaled, if any.
Latents = tuple[torch.Tensor, torch.Tensor | None]


@dataclass(frozen=True)
class PartialLatents:
    """This rank's part of the latents of one exchange.

    Attributes:
        compute: Returns it in memory of its own; called once, when the exchange starts. What is recomputed in the
            backward pass has ended before that.
        squares: The row sums of squares, if the exchange is to sum them, too.
        tokens: Number of rows.
    """

    compute: Callable[[], torch.Tensor]
    squares: torch.Tensor | None
    tokens: int


@dataclass
class EpilogueInExchange:
    """An epilogue that an exchange may compute in the same pass as its sum (``kernels.symmetric_sum``).

    Attributes:
        epilogue: What is to be computed.
        result: The result, if the exchange has computed it.
    """

    epilogue: Epilogue
    result: torch.Tensor | None = None

    def take(self) -> torch.Tensor | None:
        """Return the result once, so that its memory is freed after use: a recomputation computes its own."""
        result, self.result = self.result, None
        return result


# The result of one exchange, and where its epilogue may be.
Exchanged = tuple[Latents, EpilogueInExchange | None]


@dataclass
class GatheredLatents:
    """One exchange's latents as gathered for the backward pass.

    Attributes:
        latents: The latents and their statistics; ``None`` before they arrive, and after they were taken.
    """

    latents: Latents | None = None

    def take(self) -> Latents:
        """Return them once, so that their memory is freed after use."""
        if self.latents is None:
            raise AssertionError("the backward pass comes to a segment before the exchange in front of it")
        taken, self.latents = self.latents, None
        return taken


class SavedLatents(Protocol):
    """The inputs of a block's segment where no rank's device saves them whole for the backward pass."""

    def of_exchange(self) -> GatheredLatents:
        """Return where another exchange in front of the segment finds its latents in the backward pass."""


@dataclass(frozen=True)
class NormWeights:
    """An RMSNorm in front of a projection.

    Attributes:
        scale_d: γ.
        width: The full hidden size d.
        epsilon: ε, added to the mean square.
        scales_input: Whether more than latents is scaled by an exchanged statistic: the projections' input itself.
    """

    scale_d: torch.Tensor
    width: int
    epsilon: float
    scales_input: bool = False


class Strategy(Protocol):
    """The two ends of a model, which every family has.

    Attributes:
        fp8: Whether its products read their inputs' rows in 8 bits, which the preceding kernels then leave.
        sinks: Where weight gradients that are computed outside of autograd go.
    """

    fp8: bool
    sinks: GradientSinks

    def embed(self, token_T: torch.Tensor, weight_Vd: torch.Tensor) -> Residual:
        """Return the residual stream that enters the first block."""

    def enter(self, x_Td: torch.Tensor) -> Residual:
        """Return the stream received from another pipeline stage."""

    def width(self, hidden_size: int) -> int:
        """Columns of the residual stream on each rank."""

    def abandon(self) -> None:
        """Discard what an unfinished backward pass has deferred."""

    def add(self, stream_Td: torch.Tensor, y_Td: torch.Tensor) -> Residual:
        """Return the stream after adding a block's output, ``[T, d]``."""

    def final_norm(self, residual: Residual, norm: NormWeights) -> torch.Tensor:
        """Return the normalised hidden vectors, whole on every rank, as input to this rank's part of the head."""

    def token_losses(
        self, x_Td: torch.Tensor, head_dV: torch.Tensor, target_T: torch.Tensor, z_loss: float
    ) -> torch.Tensor:
        """Cross entropy of each token in nats, ``[T]``, at least fp32; its gradient includes the z-loss's."""

    def likeliest_tokens(self, x_Td: torch.Tensor, head_dV: torch.Tensor) -> torch.Tensor:
        """The most likely token after each, ``[T]``, the same on all ranks."""

    def tied_head(self, embedding_Vd: torch.Tensor) -> torch.Tensor:
        """The embedding as a head, ``[d, V]``."""


class LowRankStrategy(Strategy, Protocol):
    """How a bottleneck's two matrices are applied. Ranks wait for each other only in an exchange."""

    def partial_latents(
        self, x_Td: torch.Tensor, squares_T: torch.Tensor | None, down_dgr: torch.Tensor, norm: NormWeights | None
    ) -> PartialLatents:
        """Return this rank's part of ``norm(x) A`` for g projections.

        Args:
            x_Td: The residual's values, or any other input if there is no norm.
            squares_T: The residual's sums of squares, if it has them.
            down_dgr: A.
            norm: The norm; ``None`` for none.
        """

    def start(
        self, partial: PartialLatents, norm: NormWeights | None, epilogue: EpilogueInExchange | None = None,
        saved: SavedLatents | None = None,
    ) -> Callable[[], Latents]:  # fmt: skip
        """Start the exchange that makes latents whole.

        Args:
            partial: The result of ``partial_latents``.
            norm: As given to ``partial_latents``.
            epilogue: What will be computed from them; has the result once they are whole if the exchange computes it.
            saved: Saves the latents for the backward pass, if no rank is to save them whole.

        Returns:
            A function that waits for the whole latents.
        """

    def up(self, z_gTr: torch.Tensor, up_grf: torch.Tensor) -> torch.Tensor:
        """``z B``, ``[g, T, f]``, in memory of its own."""


class DenseStrategy(Strategy, Protocol):
    """How a dense block's matrices are applied."""

    def dense_in(
        self, x_Td: torch.Tensor, weights_dgf: Sequence[torch.Tensor], norm: NormWeights
    ) -> list[torch.Tensor]:
        """Return ``norm(x) W``, one ``[g, T, f]`` for each weight."""

    def dense_out(self, x_Tf: torch.Tensor, weight_fd: torch.Tensor) -> torch.Tensor:
        """Return ``x W``, back into the residual, ``[T, d]``."""
