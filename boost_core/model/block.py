"""A LLaMA block, the same for all families, which differ in its seven projections.

Shape suffixes: T tokens, n any tokens, d hidden, r latent, f MLP, e head size.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from boost_core.architecture import ProjectionGroup, projection_groups
from boost_core.config import ModelConfig, ParallelismConfig, RecomputeMode
from boost_core.config.parallelism import TRAITS
from boost_core.kernels.gated_product import gated_product
from boost_core.kernels.residual_add import Residual
from boost_core.kernels.rotary import rotary
from boost_core.model.attention import (
    DealtAttention,
    KeyLatents,
    KeyMaker,
    QueryLatents,
    Rotation,
    TaskMaker,
    causal_attention,
    normed_heads,
    start_dealt_attention,
    with_normed_heads,
)
from boost_core.model.low_rank import Bottleneck, Dense
from boost_core.model.strategy import Held, Latents, SharedLatents, Strategy
from boost_core.parallel.recompute import (
    Lookahead,
    Segments,
    checkpoint_block,
    checkpoint_segment,
    no_recompute,
    run_together,
)

Whole = list[Latents]  # inputs and outputs of one projection group's exchanges
Partial = tuple[Whole, Sequence[torch.Tensor]]  # what is exchanged, and what a group's outputs depend on besides
Crossed = list[torch.Tensor]  # one group's latents for the next block
Into = Crossed | None  # latents that cross into the group
# The latents that a block hands on: of query-key-value, output, gate-up and down.
Carried = tuple[Crossed, Crossed, Crossed, Crossed]


class Block(nn.Module):
    """x ← x + O(attention(Q, K, V of norm(x))); x ← x + D(gate(G(norm(x))) ∘ U(norm(x))).

    Args:
        model: The model's shape.
        parallelism: Says whether projections are grouped.
        strategy: The tensor parallel strategy for the model's family.
        crosses: Whether latents of the previous block cross into this one.
        mode: What the block keeps for its backward pass.
    """

    def __init__(
        self, model: ModelConfig, parallelism: ParallelismConfig, strategy: Any, crosses: bool, mode: RecomputeMode
    ) -> None:
        super().__init__()

        def project(group: ProjectionGroup) -> Bottleneck | Dense:
            if model.rank is None:
                return Dense(model, group, strategy)
            return Bottleneck(model, group, strategy, parallelism.group_projections, crosses)

        self.query_key_value, self.output, self.gate_up, self.down = map(project, projection_groups(model))
        self.traits = TRAITS[mode]
        self._run = checkpoint_segment if self.traits.again == "segments" else no_recompute
        self._share: Callable[[Lookahead, bool], SharedLatents | None] | None = (
            strategy.share if self.traits.slices else None
        )
        self._crosses = crosses
        self.strategy: Strategy = strategy
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
        if self.traits.again != "all":
            return run_together([self.segments(residual, rotation, carried, lookahead)])[0]
        through: tuple[Residual, Carried | None] = checkpoint_block(self._whole, residual, rotation, carried, lookahead)
        return through

    def _whole(self, *arguments: Any) -> tuple[Residual, Carried | None]:
        return run_together([self.segments(*arguments)])[0]

    def segments(
        self, residual: Residual, rotation: Rotation, carried: Carried | None, lookahead: Lookahead | None = None
    ) -> Segments[tuple[Residual, Carried | None]]:
        """``forward`` in segments. At each ``yield`` an exchange is in flight; between two of them is local work.

        Where keys are exchanged, only they are yielded for: one half's keys then have a whole block's computation of
        the other half to hide behind, of which each exchange of latents would end a part.
        """
        run, lookahead, dealt = self._run, lookahead or Lookahead(), rotation.dealt
        whole: tuple[None, Callable[..., Any]] = None, run
        shares = run is checkpoint_segment and torch.is_grad_enabled() and self._share is not None
        of_qkv, of_output, of_gate_up, of_down = carried or (None,) * 4
        shared, run = self._sharing(lookahead) if shares else whole
        down_project, first = self.query_key_value.down_project, (residual.inputs, residual.squares)
        made = self._run(down_project, *first) if shared is None else self._from_held(shared, down_project, *first)
        partial, beside = made
        wait = self.query_key_value.start(partial, shared)
        latents = (yield wait) if dealt is None else wait()
        made, of_qkv = run(self._attend, latents, of_qkv, rotation, dealt, *beside)
        if dealt is not None:
            query_The: torch.Tensor = made
            attended_The = yield functools.partial(dealt.finish, query_The)
            made = self.output.down_project(attended_The.flatten(1))
        partial, beside = made
        if dealt is not None and dealt.moves_latents:
            partial = [(dealt.with_returned(query_The, latent_Tr), squares_T) for latent_Tr, squares_T in partial]
        shared, run = self._sharing(lookahead) if shares else whole
        wait = self.output.start(partial, shared)
        latents = (yield wait) if dealt is None else wait()
        (partial, beside), of_output, residual = run(self._add_attended, latents, of_output, residual.stream, *beside)
        shared, run = self._sharing(lookahead) if shares else whole
        wait = self.gate_up.start(partial, shared)
        latents = (yield wait) if dealt is None else wait()
        (partial, beside), of_gate_up = run(self._gate, latents, of_gate_up, *beside)
        shared, run = self._sharing(lookahead) if shares else whole
        wait = self.down.start(partial, shared)
        latents = (yield wait) if dealt is None else wait()
        residual, of_down = run(self._add_mlp, latents, of_down, residual.stream, *beside)
        if dealt is not None:
            dealt.send_ahead_of(query_The, residual.inputs)
        return residual, (of_qkv, of_output, of_gate_up, of_down) if self.carries else None

    def _sharing(self, lookahead: Lookahead) -> tuple[SharedLatents | None, Callable[..., Any]]:
        """What keeps the latents of the next segment, and what runs the segment."""
        shared = self._share(lookahead, self.traits.on_host) if self._share else None
        return shared, self._run if shared is None else functools.partial(self._from_shared, shared)

    def _from_held(self, shared: SharedLatents, work: Callable[..., Any], *arguments: torch.Tensor | None) -> Any:
        """Run what comes before the first exchange, from inputs that are held until it is recomputed."""
        return self._run(_of_held, work, *(each if each is None else shared.hold(each) for each in arguments))

    def _from_shared(
        self, shared: SharedLatents, work: Callable[..., Any], latents: Whole, carried: Into, *arguments: Any
    ) -> Any:
        """Run what lies between two exchanges, from latents that stay shared until it is recomputed."""
        shared.keep(latents, carried if self._crosses else None)
        held = [shared.hold(each) if isinstance(each, torch.Tensor) else each for each in arguments]
        return self._run(_of_shared, work, shared, *held)

    def _attend(
        self, latents: Whole, carried: Into, rotation: Rotation, dealt: DealtAttention | None, *beside: torch.Tensor
    ) -> tuple[Partial | torch.Tensor, Crossed]:
        """The input of the next exchange, or, where keys are exchanged first, the queries that wait for them."""
        projected, crossed = self.query_key_value.up_project(latents, carried, *beside)
        if self.qk_norm:
            of = self.query_key_value
            query_scale_e, key_scale_e = of.declared("query_scale"), of.declared("key_scale")
            projected = with_normed_heads(projected, query_scale_e, key_scale_e, of.norm_epsilon)
        if dealt is not None:
            made_of = self._key_latents(crossed) if dealt.sends_latents else None
            of_queries = self._query_latents(crossed) if dealt.moves_latents else None
            return start_dealt_attention(projected, rotation, dealt, self.head_size, made_of, of_queries), crossed
        attended_Td = causal_attention(projected, rotation, self.head_size)
        return self.output.down_project(attended_Td), crossed

    def _key_latents(self, latents: Crossed) -> KeyLatents:
        _, key_Tr, value_Tr = (z_Tr for z_gTr in latents for z_Tr in z_gTr)
        of: Bottleneck = self.query_key_value  # type: ignore[assignment]
        scale = [of.declared("key_scale")] if self.qk_norm else []
        return KeyLatents(key_Tr, value_Tr, KeyMaker([of.up_of(1), of.up_of(2), *scale], self._keys_of))

    def _keys_of(
        self, latents: Sequence[torch.Tensor], weights: Sequence[torch.Tensor], rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of other ranks' tokens, computed as ``_attend`` computes this rank's own."""
        (key_nr, value_nr), (up_key_rd, up_value_rd, *scale) = latents, weights
        key_nd, value_nd = key_nr @ up_key_rd, value_nr @ up_value_rd
        for scale_e in scale:
            key_nd = normed_heads(key_nd, scale_e, self.query_key_value.norm_epsilon)
        turned = rotary([key_nd.unsqueeze(0), value_nd.unsqueeze(0)], *rotation.angles(key_nd.dtype))
        key_nje, value_nje = (x_nd.view(len(x_nd), -1, self.head_size) for x_nd in turned)
        return key_nje, value_nje

    def _query_latents(self, latents: Crossed) -> QueryLatents:
        query_Tr = latents[0][0]
        of: Bottleneck = self.query_key_value  # type: ignore[assignment]
        scale = [of.declared("query_scale")] if self.qk_norm else []
        down_dr = self.output.declared("down").flatten(1)
        return QueryLatents(query_Tr, TaskMaker([of.up_of(0), *scale], self._queries_of, down_dr))

    def _queries_of(self, latent_nr: torch.Tensor, weights: Sequence[torch.Tensor], rotation: Rotation) -> torch.Tensor:
        """Queries of other ranks' tokens, likewise."""
        up_rd, *scale = weights
        query_nd = latent_nr @ up_rd
        for scale_e in scale:
            query_nd = normed_heads(query_nd, scale_e, self.query_key_value.norm_epsilon)
        no_values_1n0 = query_nd.new_empty(1, len(query_nd), 0)
        query_nd, _ = rotary([query_nd.unsqueeze(0), no_values_1n0], *rotation.angles(query_nd.dtype))
        return query_nd.view(len(query_nd), -1, self.head_size)

    def _add_attended(
        self, latents: Whole, carried: Into, stream_Td: torch.Tensor, *beside: torch.Tensor
    ) -> tuple[Partial, Crossed, Residual]:
        (attended_1Td,), crossed = self.output.up_project(latents, carried, *beside)
        residual = self.strategy.add(stream_Td, attended_1Td.squeeze(0))
        return self.gate_up.down_project(residual.inputs, residual.squares), crossed, residual

    def _gate(self, latents: Whole, carried: Into, *beside: torch.Tensor) -> tuple[Partial, Crossed]:
        projected, crossed = self.gate_up.up_project(latents, carried, *beside)
        return self.down.down_project(gated_product(projected, self.activation, self.strategy.fp8)), crossed

    def _add_mlp(
        self, latents: Whole, carried: Into, stream_Td: torch.Tensor, *beside: torch.Tensor
    ) -> tuple[Residual, Crossed]:
        (mlp_1Td,), crossed = self.down.up_project(latents, carried, *beside)
        return self.strategy.add(stream_Td, mlp_1Td.squeeze(0)), crossed


def _of_shared(work: Callable[..., Any], shared: SharedLatents, *arguments: Any) -> Any:
    latents, carried = shared.give()
    return _of_held(work, latents, carried, *arguments)


def _of_held(work: Callable[..., Any], *arguments: Any) -> Any:
    return work(*[each.give_held() if isinstance(each, Held) else each for each in arguments])
