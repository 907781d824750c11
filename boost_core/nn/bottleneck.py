"""Low-rank bottleneck projections: z = act(norm(x) A), y = z B.

Shape suffixes: T tokens, d input width, r rank, g projections of one input side by side, f output width.
"""

import torch

from boost_core.kernels.latent_epilogue import latent_epilogue
from boost_core.nn.strategy import Strategy
from boost_core.nn.weights import Role, WeightedModule


def cola_std(rank: int, wide_in: int, wide_out: int) -> float:
    """CoLA's initial standard deviation of A and B, r^(-1/4) (d_in + d_out)^(-1/4) (arXiv 2502.10940)."""
    return float((rank * (wide_in + wide_out)) ** -0.25)


class Bottleneck(WeightedModule):
    """One or more bottleneck projections of one input, with one exchange for all their latents.

    With a norm before it, γ is folded into A and the raw input is multiplied; its sum of squares goes along
    with the latents, and the scale 1/rms is applied to them after the exchange, so that no pass over the
    wide input is spent on normalising: norm(x) A = (x (A∘γ)) / sqrt(Σ x² / d + ε).

    Args:
        wide_in: Input width d.
        wide_outs: Output width of each projection.
        rank: Bottleneck width r of each projection.
        activation: Whether the latent passes through a SiLU.
        norm_epsilon: ε of the RMSNorm before the projections; ``None`` for no norm.
        strategy: Where latents are exchanged.
    """

    def __init__(
        self,
        wide_in: int,
        wide_outs: tuple[int, ...],
        rank: int,
        activation: bool,
        norm_epsilon: float | None,
        strategy: Strategy,
    ) -> None:
        super().__init__()
        self.wide_in, self.rank, self.activation = wide_in, rank, activation
        self.norm_epsilon, self.strategy = norm_epsilon, strategy
        stds = [cola_std(rank, wide_in, wide_out) for wide_out in wide_outs]
        self.declare("down", (wide_in, rank * len(wide_outs)), Role.DOWN_PROJECTION, *stds)
        for index, (wide_out, std) in enumerate(zip(wide_outs, stds, strict=True)):
            self.declare(f"up_{index}", (rank, wide_out), Role.UP_PROJECTION, std)
        if norm_epsilon is not None:
            self.declare("scale", (wide_in,), Role.NORM_SCALE)

    def forward(self, x_Td: torch.Tensor) -> list[torch.Tensor]:
        """``[T, d_in]`` to one ``[T, d_out]`` a projection."""
        z_Tgr = self.strategy.share_latent(self._latent(x_Td))
        latents = torch.split(z_Tgr, self.rank, dim=-1)
        return [z_Tr @ self.get_parameter(f"up_{index}") for index, z_Tr in enumerate(latents)]

    def _latent(self, x_Td: torch.Tensor) -> torch.Tensor:
        down_dgr = self.get_parameter("down")
        if self.norm_epsilon is None:
            h_Tgr, _ = self.strategy.reduce_latent(x_Td @ down_dgr, None)
            return latent_epilogue(h_Tgr, None, self.wide_in, 0.0, self.activation)
        scaled_dgr = down_dgr * self.get_parameter("scale").unsqueeze(-1)
        h_Tgr, squares_T = self.strategy.reduce_latent(x_Td @ scaled_dgr, sum_of_squares(x_Td))
        return latent_epilogue(h_Tgr, squares_T, self.wide_in, self.norm_epsilon, self.activation)


def sum_of_squares(x_Td: torch.Tensor) -> torch.Tensor:
    """Row sums of squares in at least fp32, ``[T]``."""
    return x_Td.to(torch.promote_types(x_Td.dtype, torch.float32)).square().sum(dim=-1)
