"""LaX's latent crossing: h ← LN_r(h + G(z of the block before)); z = act(h) (arXiv 2505.21732).

Each projection crosses to the same projection of the next block. Shape suffixes: T tokens, g projections of one
input, r rank; a·b = r for the tensor gate.
"""

import math

import torch
from torch.nn.functional import layer_norm, silu

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

    def forward(self, h_Tgr: torch.Tensor, carried_Tgr: torch.Tensor | None, activation: bool) -> torch.Tensor:
        """Latents ``[T, g, r]`` with what the block before carried over, through norm and activation."""
        if carried_Tgr is not None:
            crossed_Tgr = layer_norm(h_Tgr + self._gate(carried_Tgr), h_Tgr.shape[-1:], eps=self.epsilon)
            h_Tgr = crossed_Tgr * self.get_parameter("norm_scale") + self.get_parameter("norm_shift")
        return silu(h_Tgr) if activation else h_Tgr

    def _gate(self, z_Tgr: torch.Tensor) -> torch.Tensor:
        if self.gate == "identity":
            return z_Tgr
        if self.gate == "dense":
            return torch.einsum("Tgr,grs->Tgs", z_Tgr, self.get_parameter("gate_matrix"))
        z_Tgab = z_Tgr.reshape(*z_Tgr.shape[:-1], *self.factors)
        left, right = self.get_parameter("gate_a"), self.get_parameter("gate_b")
        return torch.einsum("gax,Tgab,gby->Tgxy", left, z_Tgab, right).flatten(-2)
