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
from boost_core.nn.stages import Local, Stages, plainly, run_together
from boost_core.nn.strategy import Latents, LowRankStrategy

Whole = list[Latents]  # what the exchanges of one bottleneck take and give
Into = torch.Tensor | None  # latents that cross into a bottleneck
# The latents that a block hands on: of query-key-value, output, gate-up and down.
Carried = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


class LowRankBlock(nn.Module):
    """x ← x + O(attention(Q, K, V of norm(x))); x ← x + D(gate(G(norm(x))) ∘ U(norm(x))).

    Args:
        model: The model's shape.
        strategy: How bottlenecks are split.
        grouped: Whether projections of one input share a matrix product and an exchange.
        crosses: Whether latents of the block before cross into this one.
        local: Calls what lies between two exchanges; it may forget what that computes and compute it again.
    """

    def __init__(
        self, model: ModelConfig, strategy: LowRankStrategy, grouped: bool, crosses: bool, local: Local = plainly
    ) -> None:
        super().__init__()
        self.local = local
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
        self, x_Td: torch.Tensor, rotation: Rotation, carried: Carried | None
    ) -> tuple[torch.Tensor, Carried | None]:
        """The block's ``[T, d]`` to ``[T, d]``, and the latents that cross into the next block."""
        return run_together([self.stages(x_Td, rotation, carried)])[0]

    def stages(
        self, x_Td: torch.Tensor, rotation: Rotation, carried: Carried | None
    ) -> Stages[tuple[torch.Tensor, Carried | None]]:
        """``forward`` in stages. Each ``yield`` is an exchange under way; each ``local`` is work between two."""
        local = self.local
        of_qkv, of_output, of_gate_up, of_down = carried or (None,) * 4
        receive = self.query_key_value.send(local(self.query_key_value.open, x_Td))
        yield
        partial, of_qkv = local(self._attend, receive(), of_qkv, rotation)
        receive = self.output.send(partial)
        yield
        partial, of_output, x_Td = local(self._add_attended, receive(), of_output, x_Td)
        receive = self.gate_up.send(partial)
        yield
        partial, of_gate_up = local(self._gate, receive(), of_gate_up)
        receive = self.down.send(partial)
        yield
        x_Td, of_down = local(self._add_mlp, receive(), of_down, x_Td)
        return x_Td, (of_qkv, of_output, of_gate_up, of_down) if self.carries else None

    def _attend(self, latents: Whole, carried: Into, rotation: Rotation) -> tuple[Whole, torch.Tensor]:
        (query_Td, key_Td, value_Td), carried = self.query_key_value.close(latents, carried)
        attended_Td = causal_attention(query_Td, key_Td, value_Td, rotation, self.head_size)
        return self.output.open(attended_Td), carried

    def _add_attended(
        self, latents: Whole, carried: Into, x_Td: torch.Tensor
    ) -> tuple[Whole, torch.Tensor, torch.Tensor]:
        (attended_Td,), carried = self.output.close(latents, carried)
        x_Td = x_Td + attended_Td
        return self.gate_up.open(x_Td), carried, x_Td

    def _gate(self, latents: Whole, carried: Into) -> tuple[Whole, torch.Tensor]:
        (gate_Tf, up_Tf), carried = self.gate_up.close(latents, carried)
        gate_Tf = silu(gate_Tf) if self.gated_by_silu else gate_Tf
        return self.down.open(gate_Tf * up_Tf), carried

    def _add_mlp(self, latents: Whole, carried: Into, x_Td: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        (mlp_Td,), carried = self.down.close(latents, carried)
        return x_Td + mlp_Td, carried
