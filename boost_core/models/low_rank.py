"""A LLaMA block whose seven projections are bottlenecks: SVD-style, CoLA and LaX.

=====  ========================  =================================================
svd    z = x A                   an ordinary LLaMA in low-rank form
cola   z = silu(x A)             the gate keeps its own SiLU at 60M and 130M only (arXiv 2502.10940)
lax    z = act(LN(x A + G(z′)))  z′ is the same projection's latent one block before (arXiv 2505.21732)
=====  ========================  =================================================

Shape suffixes: T tokens, d hidden, f MLP.
"""

import torch
from torch import nn
from torch.nn.functional import silu

from boost_core.config import ModelConfig
from boost_core.nn.attention import Rotation, causal_attention
from boost_core.nn.bottleneck import Bottleneck, BottleneckConfig
from boost_core.nn.crossing import Crossing
from boost_core.nn.strategy import LowRankStrategy

# The latents of a block's four exchanges: query-key-value, output, gate-up, down.
Latents = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class LowRankBlock(nn.Module):
    """x ← x + O(attention(Q, K, V of norm(x))); x ← x + D(gate(G(norm(x))) ∘ U(norm(x))).

    Args:
        model: The model's shape.
        strategy: How bottlenecks are split.
        grouped: Whether projections of one input share a matrix product and an exchange.
        crosses: Whether latents of the block before cross into this one.
    """

    def __init__(self, model: ModelConfig, strategy: LowRankStrategy, grouped: bool, crosses: bool) -> None:
        super().__init__()
        hidden, mlp, key_value = model.hidden_size, model.intermediate_size, model.key_value_size
        self.head_size, self.gated_by_silu, self.carries = model.head_size, model.gated_by_silu, model.lax is not None
        config = BottleneckConfig(model.bottleneck_rank, model.latent_activation, grouped, strategy)

        def project(wide_in: int, *wide_outs: int, norm: bool) -> Bottleneck:
            crossing = None
            if crosses and model.lax is not None:
                crossing = Crossing(len(wide_outs), model.bottleneck_rank, model.lax.gate, model.norm_epsilon)
            return Bottleneck(config, wide_in, wide_outs, model.norm_epsilon if norm else None, crossing)

        self.query_key_value = project(hidden, hidden, key_value, key_value, norm=True)
        self.output = project(hidden, hidden, norm=False)
        self.gate_up = project(hidden, mlp, mlp, norm=True)
        self.down = project(mlp, hidden, norm=False)

    def forward(
        self, x_Td: torch.Tensor, rotation: Rotation, carried: Latents | None
    ) -> tuple[torch.Tensor, Latents | None]:
        """The block's ``[T, d]`` to ``[T, d]``, and the latents that cross into the next block."""
        of_qkv, of_output, of_gate_up, of_down = carried or (None,) * 4
        (query_Td, key_Td, value_Td), of_qkv = self.query_key_value(x_Td, of_qkv)
        attended_Td = causal_attention(query_Td, key_Td, value_Td, rotation, self.head_size)
        (attended_Td,), of_output = self.output(attended_Td, of_output)
        x_Td = x_Td + attended_Td
        (gate_Tf, up_Tf), of_gate_up = self.gate_up(x_Td, of_gate_up)
        gate_Tf = silu(gate_Tf) if self.gated_by_silu else gate_Tf
        (mlp_Td,), of_down = self.down(gate_Tf * up_Tf, of_down)
        latents = (of_qkv, of_output, of_gate_up, of_down) if self.carries else None
        return x_Td + mlp_Td, latents
