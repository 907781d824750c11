"""A LLaMA block, the same for all families, which differ in its seven projections.

Shape suffixes: T tokens, n any tokens, d hidden, r latent, f MLP, e head size.
"""

from functools import partial
from typing import cast

import torch
from torch import nn

from boost_core.architecture import grouped_projections
from boost_core.config import ModelConfig, ParallelismConfig, RecomputeMode
from boost_core.config.parallelism import TRAITS
from boost_core.kernels.fp8_product import PrecomputedRows
from boost_core.kernels.gated_product import gated_product
from boost_core.kernels.launch import Part
from boost_core.kernels.residual_add import Residual
from boost_core.model.attention import Rotation, causal_attention, normed_heads
from boost_core.model.low_rank import Bottleneck, Dense, LowRankStrategy, Strategy
from boost_core.parallel.baselines import FullRankTensorParallel
from boost_core.parallel.btp import BottleneckTensorParallel, Exchanged, PartialLatents
from boost_core.parallel.recompute import Crossing, Lookahead, Segments

Latents = list[torch.Tensor]  # of one group of projections, for the next block
# The latents that a block hands on: of query-key-value, output, gate-up and down.
Carried = tuple[Latents, Latents, Latents, Latents]
# The partial latents of the next projections, and latents for the next block.
Projected = tuple[list[PartialLatents], Latents]


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
        # Strategies are chosen by the family (``architecture.chosen_sharding``).
        self.query_key_value, self.output, self.gate_up, self.down = (
            Dense(model, group, cast(FullRankTensorParallel, strategy))
            if model.rank is None
            else Bottleneck(model, group, cast(LowRankStrategy, strategy), parallelism.group_projections, crosses)
            for group in grouped_projections(model)
        )
        self.strategy, self.sinks = strategy, strategy.deferred.sinks
        self.crosses, self.traits, self.qk_norm = crosses, TRAITS[mode], model.qk_norm
        self.head_size, self.activation, self.carries = model.head_size, model.mlp_activation, model.lax is not None

    async def forward(
        self, residual: Residual, rotation: Rotation, carried: Carried | None, lookahead: Lookahead
    ) -> tuple[Residual, Carried | None]:
        """The residual stream through the block, and the latents that cross into the next block.

        It awaits each exchange of latents: another computation may go on there (``recompute.run_in_turns``).

        Args:
            residual: The residual stream.
            rotation: The rotation of its tokens.
            carried: Latents of the previous block; ``None`` if none cross.
            lookahead: The lookahead of this pass through several blocks.
        """
        # What saves slices is legal with no other strategy.
        strategy = cast(BottleneckTensorParallel, self.strategy)
        exchanges_keys = rotation.attention is not None and rotation.attention.exchanges_keys
        segments = Segments(self.traits, strategy, self.crosses, lookahead, exchanges_keys)
        into_qkv, into_output, into_gate_up, into_down = carried or (None,) * 4

        part = lookahead.part
        project = partial(self.query_key_value.down_project, quantised=residual.quantised, part=part)
        partials = segments.first(project, residual.inputs, residual.squares)
        latents = await segments.exchange(self.query_key_value.start, partials)
        ends = None
        if rotation.attention is None:
            partials, of_qkv = segments(partial(self._attend, rotation), latents, into_qkv)
        else:
            partials, of_qkv, ends = await rotation.attention(self, segments, latents, into_qkv, rotation)
        latents = await segments.exchange(self.output.start, partials)
        add_attended = partial(self._add_attended, part)
        partials, of_output, residual = segments(add_attended, latents, into_output, residual.stream)

        latents = await segments.exchange(self.gate_up.start, partials)
        partials, of_gate_up = segments(partial(self._gate, part), latents, into_gate_up)
        latents = await segments.exchange(self.down.start, partials)
        residual, of_down = segments(partial(self._add_mlp, part), latents, into_down, residual.stream)

        if ends is not None:
            ends(residual.inputs)
        return residual, (of_qkv, of_output, of_gate_up, of_down) if self.carries else None

    def heads(
        self, latents: list[Exchanged], carried: Crossing, part: Part | None = None
    ) -> tuple[list[torch.Tensor], Latents]:
        """Queries, keys and values, ``[g, T, f]`` of g of one width, and their latents, ``[g, T, r]``.

        They are not rotated yet; see ``causal_attention``.
        """
        projected, of_qkv, _ = self.query_key_value.up_project(latents, carried, part)
        if not self.qk_norm:
            return projected, of_qkv
        query_Td, key_Td, value_Td = (member_Td for part_gTd in projected for member_Td in part_gTd)
        query_scale_e, key_scale_e = (self.query_key_value.declared(name) for name in ("query_scale", "key_scale"))
        query_Td = normed_heads(query_Td, query_scale_e, self.query_key_value.norm_epsilon)
        key_Td = normed_heads(key_Td, key_scale_e, self.query_key_value.norm_epsilon)
        return [x_Td.unsqueeze(0) for x_Td in (query_Td, key_Td, value_Td)], of_qkv

    def _attend(self, rotation: Rotation, latents: list[Exchanged], carried: Crossing) -> Projected:
        heads, of_qkv = self.heads(latents, carried)
        return self.output.down_project(causal_attention(heads, rotation, self.head_size)), of_qkv

    def _add_attended(
        self, part: Part | None, latents: list[Exchanged], carried: Crossing, stream_Td: torch.Tensor
    ) -> tuple[list[PartialLatents], Latents, Residual]:
        (attended_1Td,), of_output, _ = self.output.up_project(latents, carried, part)
        residual = self.strategy.add(stream_Td, attended_1Td.squeeze(0), part)
        partials = self.gate_up.down_project(residual.inputs, residual.squares, residual.quantised, part)
        return partials, of_output, residual

    def _gate(self, part: Part | None, latents: list[Exchanged], carried: Crossing) -> Projected:
        projected, of_gate_up, of_gradients = self.gate_up.up_project(latents, carried, part)
        quantised = PrecomputedRows() if self.strategy.fp8 else None
        gated_Tf = gated_product(projected, self.activation, quantised, of_gradients, part)
        return self.down.down_project(gated_Tf, None, quantised, part), of_gate_up

    def _add_mlp(
        self, part: Part | None, latents: list[Exchanged], carried: Crossing, stream_Td: torch.Tensor
    ) -> tuple[Residual, Latents]:
        (mlp_1Td,), of_down, _ = self.down.up_project(latents, carried, part)
        return self.strategy.add(stream_Td, mlp_1Td.squeeze(0), part), of_down
