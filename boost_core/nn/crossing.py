"""LaX's latent crossing: h ← LN_r(h + G(z of the block before)); z = act(h) (arXiv 2505.21732).

Each projection crosses to the same projection of the next block. Shape suffixes: T tokens, g projections of one
input, r rank, c = g·r; a·b = r for the tensor gate.
"""

import math

import torch

from boost_core.kernels.latent_crossing import latent_crossing
from boost_core.nn.strategy import Latents
from boost_core.nn.weights import Role, WeightedModule
from boost_core.plan.parameters import balanced_factors


class Crossing(WeightedModule):
    """The crossing into the projections of one input.

    Args:
        count: Projections g.
        rank: Width r of a latent.
        gate: ``identity``, ``dense`` (an r × r matrix) or ``tensor`` (a × a and b × b).
        epsilon: ε of the norm.
    """

    def __init__(self, count: int, rank: int, gate: str, epsilon: float) -> None:
        super().__init__()
        self.gate, self.epsilon, self.factors = gate, epsilon, balanced_factors(rank)
        # A normal with the variance of Kaiming-uniform: 1/(3n) for a linear map of n inputs.
        if gate == "dense":
            self.declare_normal("gate_matrix", (count, rank, rank), Role.LATENT, math.sqrt(1 / (3 * rank)))
        if gate == "tensor":
            for name, width in zip("ab", self.factors, strict=True):
                std = math.sqrt(1 / (3 * width))
                self.declare_normal(f"gate_{name}", (count, width, width), Role.LATENT, std)
        self.declare_constant("norm_scale", (count, rank), Role.LATENT, 1.0)
        self.declare_constant("norm_shift", (count, rank), Role.LATENT, 0.0)

    def forward(
        self,
        latents: Latents,
        width: int,
        epsilon: float,
        carried_gTr: torch.Tensor,
        projections: slice,
        activation: bool,
    ) -> torch.Tensor:
        """Latents with what the block before carried over, through norm and activation, ``[g, T, r]``.

        Args:
            latents: As the exchange gave them, still to be scaled by the norm in front of the projection, if any.
            width: Of that norm.
            epsilon: Of that norm.
            carried_gTr: The latents of the block before.
            projections: Which of this crossing's they are.
            activation: Whether the bottleneck has a SiLU.
        """
        crossed_gTr = self._gate(carried_gTr, projections)
        scale_gr, shift_gr = (
            self.get_parameter("norm_scale")[projections],
            self.get_parameter("norm_shift")[projections],
        )
        return latent_crossing(*latents, width, epsilon, crossed_gTr, scale_gr, shift_gr, self.epsilon, activation)

    def _gate(self, z_gTr: torch.Tensor, projections: slice) -> torch.Tensor:
        if self.gate == "identity":
            return z_gTr
        if self.gate == "dense":
            return z_gTr @ self.get_parameter("gate_matrix")[projections]
        z_gTab = z_gTr.reshape(*z_gTr.shape[:-1], *self.factors)
        left, right = self.get_parameter("gate_a")[projections], self.get_parameter("gate_b")[projections]
        return torch.einsum("gax,gTab,gby->gTxy", left, z_gTab, right).flatten(-2)
