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

from boost_core.config import ModelConfig
from boost_core.kernels.gated_product import gated_product
from boost_core.kernels.residual_add import Residual
from boost_core.nn.attention import Rotation, causal_attention
from boost_core.nn.bottleneck import Bottleneck, BottleneckConfig
from boost_core.nn.crossing import Crossing
from boost_core.nn.overlap import RecomputePolicy, Segments, no_recompute, run_together
from boost_core.nn.strategy import Latents, LowRankStrategy

Whole = list[Latents]  # what the exchanges of one bottleneck take and give
Crossed = list[torch.Tensor]  # latents of one bottleneck for the next block
Into = Crossed | None  # those that cross into it
# The latents that a block hands on: of query-key-value, output, gate-up and down.
Carried = tuple[Crossed, Crossed, Crossed, Crossed]


class LowRankBlock(nn.Module):
    """x ← x + O(attention(Q, K, V of norm(x))); x ← x + D(gate(G(norm(x))) ∘ U(norm(x))).

    Args:
        model: The model's shape.
        strategy: How bottlenecks are split.
        grouped: Whether projections of one input share a matrix product and an exchange.
        crosses: Whether latents of the block before cross into this one.
        recompute: How to call what lies between two exchanges; may apply activation checkpointing.
    """

    def __init__(
        self,
        model: ModelConfig,
        strategy: LowRankStrategy,
        grouped: bool,
        crosses: bool,
        recompute: RecomputePolicy = no_recompute,
    ) -> None:
        super().__init__()
        self.recompute, self.strategy = recompute, strategy
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
        self, residual: Residual, rotation: Rotation, carried: Carried | None
    ) -> tuple[Residual, Carried | None]:
        """The residual stream through the block, and the latents that cross into the next block."""
        return run_together([self.segments(residual, rotation, carried)])[0]

    def segments(
        self, residual: Residual, rotation: Rotation, carried: Carried | None
    ) -> Segments[tuple[Residual, Carried | None]]:
        """``forward`` in segments. Each ``yield`` is an exchange in flight; each ``run`` is local work between two."""
        run = self.recompute
        of_qkv, of_output, of_gate_up, of_down = carried or (None,) * 4
        wait = self.query_key_value.start(run(self.query_key_value.down_project, residual.inputs, residual.squares))
        yield
        partial, of_qkv = run(self._attend, wait(), of_qkv, rotation)
        wait = self.output.start(partial)
        yield
        partial, of_output, residual = run(self._add_attended, wait(), of_output, residual.stream)
        wait = self.gate_up.start(partial)
        yield
        partial, of_gate_up = run(self._gate, wait(), of_gate_up)
        wait = self.down.start(partial)
        yield
        residual, of_down = run(self._add_mlp, wait(), of_down, residual.stream)
        return residual, (of_qkv, of_output, of_gate_up, of_down) if self.carries else None

    def crossed_shapes(self, tokens: int) -> list[list[tuple[int, int, int]]]:
        """Shapes of what a block of this kind hands on, as ``Carried`` holds it."""
        bottlenecks = (self.query_key_value, self.output, self.gate_up, self.down)
        return [
            [(piece.count, tokens, bottleneck.config.rank) for piece in bottleneck.pieces] for bottleneck in bottlenecks
        ]

    def _attend(self, latents: Whole, carried: Into, rotation: Rotation) -> tuple[Whole, Crossed]:
        projected, crossed = self.query_key_value.up_project(latents, carried)
        return self.output.down_project(causal_attention(projected, rotation, self.head_size)), crossed

    def _add_attended(self, latents: Whole, carried: Into, stream_Td: torch.Tensor) -> tuple[Whole, Crossed, Residual]:
        (attended_1Td,), crossed = self.output.up_project(latents, carried)
        residual = self.strategy.add(stream_Td, attended_1Td.squeeze(0))
        return self.gate_up.down_project(residual.inputs, residual.squares), crossed, residual

    def _gate(self, latents: Whole, carried: Into) -> tuple[Whole, Crossed]:
        projected, crossed = self.gate_up.up_project(latents, carried)
        return self.down.down_project(gated_product(projected, self.gated_by_silu)), crossed

    def _add_mlp(self, latents: Whole, carried: Into, stream_Td: torch.Tensor) -> tuple[Residual, Crossed]:
        (mlp_1Td,), crossed = self.down.up_project(latents, carried)
        return self.strategy.add(stream_Td, mlp_1Td.squeeze(0)), crossed
