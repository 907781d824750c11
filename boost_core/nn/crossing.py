"""LaX's latent crossing: h ← LN_r(h + G(z of the previous block)); z = act(h) (arXiv 2505.21732).

Each projection crosses to the same projection of the next block. Shape suffixes: T tokens, g projections of a common
input, r rank, c = g·r; a·b = r for the tensor gate.
"""

from collections.abc import Mapping

import torch

from boost_core.architecture.roles import WeightSpec
from boost_core.kernels.latent_crossing import latent_crossing
from boost_core.nn.strategy import Latents
from boost_core.nn.weights import WeightedModule


class Crossing(WeightedModule):
    """The crossing into projections of a common input.

    Args:
        weights: The norm's, and the gate's: none, an r × r matrix, or two, a × a and b × b.
        epsilon: ε of the norm.
    """

    def __init__(self, weights: Mapping[str, WeightSpec], epsilon: float) -> None:
        super().__init__(weights)
        self.epsilon = epsilon

    def forward(
        self,
        latents: Latents,
        width: int,
        epsilon: float,
        carried_gTr: torch.Tensor,
        projections: slice,
        activation: bool,
        fp8: bool,
    ) -> torch.Tensor:
        """Pass latents, plus those carried over from the previous block, through norm and activation, ``[g, T, r]``.

        Args:
            latents: As returned by the exchange, still to be scaled by the norm in front of the projection, if any.
            width: Width of that norm.
            epsilon: ε of that norm.
            carried_gTr: The latents of the previous block.
            projections: Which of this crossing's projections they belong to.
            activation: Whether the bottleneck has a SiLU.
            fp8: Whether the kernel also leaves their rows quantised.
        """
        crossed_gTr = self._gate(carried_gTr, projections)
        scale_gr, shift_gr = (
            self.declared("norm_scale")[projections],
            self.declared("norm_shift")[projections],
        )
        return latent_crossing(*latents, width, epsilon, crossed_gTr, scale_gr, shift_gr, self.epsilon, activation, fp8)

    def _gate(self, z_gTr: torch.Tensor, projections: slice) -> torch.Tensor:
        if "gate_matrix" in self.weight_specs:
            return z_gTr @ self.declared("gate_matrix")[projections]
        if "gate_a" not in self.weight_specs:
            return z_gTr
        left, right = self.declared("gate_a")[projections], self.declared("gate_b")[projections]
        z_gTab = z_gTr.reshape(*z_gTr.shape[:-1], left.shape[-1], right.shape[-1])
        return torch.einsum("gax,gTab,gby->gTxy", left, z_gTab, right).flatten(-2)
