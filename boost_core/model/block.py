"""A LLaMA block, the same for all families, which differ in its seven projections.

Shape suffixes: T tokens, n any tokens, d hidden, r latent, f MLP, e head size.
"""

from functools import partial
from typing import cast

import torch
from torch import nn

from boost_core.architecture import ProjectionGroup, projection_groups
from boost_core.config import ModelConfig, ParallelismConfig, RecomputeMode
from boost_core.config.parallelism import TRAITS
from boost_core.kernels.gated_product import gated_product
from boost_core.kernels.residual_add import Residual
from boost_core.model.attention import Rotation, with_normed_heads
from boost_core.model.low_rank import (
    Bottleneck,
    Dense,
    DenseStrategy,
    Exchanged,
    LowRankStrategy,
    PartialLatents,
    Strategy,
)
from boost_core.parallel.btp import BottleneckTensorParallel
from boost_core.parallel.overlap import run_in_turns
from boost_core.parallel.recompute import Crossing, Lookahead, Segments, recomputed

Latents = list[torch.Tensor]  # of one group of projections, for the next block
# The latents that a block hands on: of query-key-value, output, gate-up and down.
Carried = tuple[Latents, Latents, Latents, Latents]


class Block(nn.Module):
    """x ← x + O(attention(Q, K, V of norm(x))); x ← x + D(gate(G(norm(x))) ∘ U(norm(x))).

    Args:
        model: The model's shape.
        parallelism: Says whether projections are grouped.
        strategy: The tensor parallel strategy for the model's family.
        crosses: Whether latents of the previous block cross into this one.
        mode: What the block saves for its backward pass.
    """

    def __init__(
        self, model: ModelConfig, parallelism: ParallelismConfig, strategy: Strategy, crosses: bool, mode: RecomputeMode
    ) -> None:
        super().__init__()

        def project(group: ProjectionGroup) -> Bottleneck | Dense:
            # Strategies are chosen by the family (``architecture.chosen_sharding``).
            if model.rank is None:
                return Dense(model, group, cast(DenseStrategy, strategy))
            return Bottleneck(model, group, cast(LowRankStrategy, strategy), parallelism.group_projections, crosses)

        self.query_key_value, self.output, self.gate_up, self.down = map(project, projection_groups(model))
        self.strategy, self.sinks, self.crosses, self.traits = strategy, strategy.sinks, crosses, TRAITS[mode]
        self.qk_norm = model.qk_norm
        self.head_size, self.activation, self.carries = model.head_size, model.mlp_activation, model.lax is not None

    def forward(
        self, residual: Residual, rotation: Rotation, carried: Carried | None, lookahead: Lookahead | None = None
    ) -> tuple[Residual, Carried | None]:
        """The residual stream through the block, and the latents that cross into the next block.

        Args:
            residual: The residual stream.
            rotation: The rotation of its tokens.
            carried: Latents of the previous block; ``None`` if none cross.
            lookahead: The lookahead of this pass through several blocks.
        """
        if self.traits.again == "all":
            return recomputed(self._alone, residual, rotation, carried, lookahead)
        return self._alone(residual, rotation, carried, lookahead)

    def _alone(
        self, residual: Residual, rotation: Rotation, carried: Carried | None, lookahead: Lookahead | None
    ) -> tuple[Residual, Carried | None]:
        return run_in_turns([self.compute(residual, rotation, carried, lookahead or Lookahead())])[0]

    async def compute(
        self, residual: Residual, rotation: Rotation, carried: Carried | None, lookahead: Lookahead
    ) -> tuple[Residual, Carried | None]:
        """``forward``, which awaits each exchange of latents: another computation may go on there (``overlap``)."""
        saver = None
        if self.traits.slices and torch.is_grad_enabled():  # legal with no other strategy
            saver = partial(
                cast(BottleneckTensorParallel, self.strategy).save_in_slices, lookahead, self.traits.on_host
            )
        recomputes, keys = self.traits.again == "segments", rotation.attention.exchanges_keys
        segments = Segments(recomputes, saver, self.crosses, lookahead.overlapped, keys)
        into_qkv, into_output, into_gate_up, into_down = carried or (None,) * 4

        partials = segments.first(self.query_key_value.down_project, residual.inputs, residual.squares)
        latents = await segments.exchange(self.query_key_value, partials)
        partials, of_qkv, ends = await rotation.attention(self, segments, latents, into_qkv, rotation)
        latents = await segments.exchange(self.output, partials)
        partials, of_output, residual = segments(self._add_attended, latents, into_output, residual.stream)

        latents = await segments.exchange(self.gate_up, partials)
        partials, of_gate_up = segments(self._gate, latents, into_gate_up)
        latents = await segments.exchange(self.down, partials)
        residual, of_down = segments(self._add_mlp, latents, into_down, residual.stream)

        ends(residual.inputs)
        return residual, (of_qkv, of_output, of_gate_up, of_down) if self.carries else None

    def heads(self, latents: list[Exchanged], carried: Crossing) -> tuple[list[torch.Tensor], Latents]:
        """Queries, keys and values, not rotated yet (``causal_attention``), and their latents."""
        projected, of_qkv = self.query_key_value.up_project(latents, carried)
        if self.qk_norm:
            of = self.query_key_value
            query_scale_e, key_scale_e = of.declared("query_scale"), of.declared("key_scale")
            projected = with_normed_heads(projected, query_scale_e, key_scale_e, of.norm_epsilon)
        return projected, of_qkv

    def _add_attended(
        self, latents: list[Exchanged], carried: Crossing, stream_Td: torch.Tensor
    ) -> tuple[list[PartialLatents], Latents, Residual]:
        (attended_1Td,), of_output = self.output.up_project(latents, carried)
        residual = self.strategy.add(stream_Td, attended_1Td.squeeze(0))
        return self.gate_up.down_project(residual.inputs, residual.squares), of_output, residual

    def _gate(self, latents: list[Exchanged], carried: Crossing) -> tuple[list[PartialLatents], Latents]:
        projected, of_gate_up = self.gate_up.up_project(latents, carried)
        return self.down.down_project(gated_product(projected, self.activation, self.strategy.fp8)), of_gate_up

    def _add_mlp(
        self, latents: list[Exchanged], carried: Crossing, stream_Td: torch.Tensor
    ) -> tuple[Residual, Latents]:  # fmt: skip
        (mlp_1Td,), of_down = self.down.up_project(latents, carried)
        return self.strategy.add(stream_Td, mlp_1Td.squeeze(0)), of_down
