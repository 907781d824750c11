"""Memory of the rank that needs most in a layout.

``state_bytes`` has the persistent state, ``Activations`` the cost per token, ``replay`` the number of
micro-batches in flight. Besides there are:

=========  ==========================================================================================================
head       ``parallel.vocabulary``: logits of a chunk of 2²⁶/(V/tp) tokens, twice where there are several chunks; and
           backward the gradients of the hidden vectors, c·T·d, and of the head, in fp32 and rounded or as a summand
pipeline   torch's stages have a buffer for each micro-batch of a step that a neighbour sends, forward and backward; its
           schedules of several stages keep what they have sent until the end of the step
batch      32 bytes per token of a replica's step: ids as the host sends them, 64-bit ids and targets, the loss mask,
           and weights
rotary     24 bytes per position and pair of a head's elements: angles in fp64 and fp32
context    attention on a context parallel rank, which has its share of a micro-batch's tokens: see ``_context``
tasks      as in ``task_bytes``: what moved attention tasks take in a block, and, as latents, what blocks save of them
documents  where they are separate, or with a sliding window, if attention takes each by itself, as on a CPU: a second
           copy of each block's output, and the masks of windows, in the compute type and in bytes
sparse     as in ``index_bytes`` and ``head_bytes``: the indexes of all blocks, and the temporaries of one document's
           head
offload    what ``recompute: offload`` has in transit to the host: what one block keeps
graph      a captured step keeps its memory between steps, so LORO's or Muon's update and evaluation come on top
=========  ==========================================================================================================

A step peaks either as the loss's backward pass begins, with all activations and the head's, or later in the final norm
or the block before it, with gradients of activations and recomputed activations. ``total`` is the larger of the two, or
the peak at the start or in LORO's or Muon's update if that is larger; so it can be less than the sum of its parts. It
does not include CUDA's context, what the driver keeps for a graph's launches, NCCL's buffers, the scratch memory of a
CPU's matrix products, or the allocator's fragmentation.
``tests/numerics/test_memory_plan.py`` compares it with what torch's allocator hands out.
"""

from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field
from functools import lru_cache
from math import ceil, isqrt, prod
from operator import ge, mul
from typing import NamedTuple

from pydantic import Field

from boost_core import architecture
from boost_core.architecture import ParamKind, Stage, WeightSpec, block_weights, cut, embedding_weights
from boost_core.config.base import Frozen
from boost_core.config.job import JobSpec, rank_tokens, tokens_by_part
from boost_core.config.model import BLOCK, LAST_QUERIES, RUN_SCORES, SAMPLED_QUERIES, Activation, ModelConfig
from boost_core.config.parallelism import TRAITS, Layout, ModeRuns, ParallelismConfig, RecomputeMode, chunk_tokens
from boost_core.config.training import OptimizerConfig
from boost_core.context.selection import STAGES, attention_layer, head_groups, most_moved, moved_as, sent_between_nodes
from boost_core.hardware import BYTES
from boost_core.plan.machine import Machine, attends_in_one, attends_on_device, captures_steps, machine_for
from boost_core.plan.replay import InHand, in_hand

PRECISE = BYTES["fp32"]  # bytes of statistics, sums and masters

# Activations: bytes per token that a block and the head keep on one rank for the backward pass.
#
# Widths are per rank: w of the residual, q of the queries, k of the keys, m of the MLP, r of a latent; h heads. Under
# btp w = d/p, q = d/p, k = d_kv/p, m = f/p, and r is whole; under vanilla all are whole except the latent, r/p; under
# fullrank they are as under btp, w as the mean of whole vectors of 1/p of the tokens (``architecture.Sharding``).
# Without recomputation a block keeps, in the compute type,
#
# ==================  ===================================  =========================================================
# what                elements per token                   kept by
# ==================  ===================================  =========================================================
# residual            2w                                   the products that follow it: its input, and after attention
# latents             7r, and 7r again where the epilogue  ``latent_epilogue`` its input, ``deferred.product`` its
#                     makes new ones: after a norm of a    output
#                     sharded residual, or with a SiLU
# attention           q + 2k, q, and h in fp32             torch's: its inputs, its output, and log-sum-exps
# MLP                 2m, m                                ``gated_product`` its inputs, ``deferred.product`` its output
# norms               one for each product after a norm,   ``exchange``: their statistics; for whole residual vectors
#                     or w for whole residual vectors      ``rms_norm``'s output
# QK-norm             q + k, and one per head in fp32      torch's norm: its inputs, and their statistics
# LaX                 0, 7r or 21r depending on the gate   ``crossing``: the gate's output and intermediate results
# ==================  ===================================  =========================================================
#
# With ``recompute: latent`` a block keeps 7r + 2w, the statistics, and the sum of squares it began with; context
# parallel ranks also keep attention's output (q), and its log-sum-exps (h in fp32). ``shared`` keeps 7r/p in place of
# 7r; ``full`` keeps w and that sum. LaX's carried latents add 7r, or under ``shared`` 7r/p and only where they cross.
# With ``offload`` the host holds what ``shared`` keeps, on one rank with p = 1, and the device only attention's output
# on context parallel ranks. On a CPU the kernels' references run, which keep more.
# ``tests/numerics/test_memory_plan.py`` measures both storage by storage. In bf16 on a CPU, with a norm other than the
# fused one, this overestimates by up to one fp32 residual per block; and by 2r for a recomputed block that receives
# latents from an svd block into which none cross.

_REMEMBERED = 1 << 15  # results; a search asks for the same ones for thousands of layouts, which ``activations`` share

# Fields that do not affect how a block is split.
_OF_OTHERS = {
    "pipeline_parallel_size", "data_parallel_size", "pipeline_schedule", "pipeline_layers_per_stage", "zero_stage",
    "optimizer_offload", "recompute",
}  # fmt: skip


class Activations:
    """Activations of one model on one rank.

    Args:
        model: The model.
        parallelism: How it is split; legal for the model.
        element_bytes: Bytes per element of the compute type.
        kernels: Whether Triton's kernels run, as on a GPU, or their references.

    Attributes:
        sharding: How the tensor parallel strategy splits the model.
        residual: Width w.
        latent: Width r; 0 without bottlenecks.
        query: Width q.
        key_value: Width k.
        carried: Bytes per token of the latents that LaX hands from block to block.
        blocks_ahead: Blocks of which what the host has is fetched ahead: one more where it is then gathered, too.
        embedding: Bytes kept by the embedding: with a split vocabulary, the token's index and whether it is in the
            shard.
        stream_start: Bytes kept of the residual stream's start for its sums of squares, where the first block's is on
            the host. A reference keeps a copy in fp32, which ``head`` counts.
        fp8_operand: Most bytes of a product's operand in 8 bits: for gate and up together, their gradients.
    """

    def __init__(self, model: ModelConfig, parallelism: ParallelismConfig, element_bytes: int, kernels: bool) -> None:
        self.model, self.parallelism, self.element_bytes, self.kernels = model, parallelism, element_bytes, kernels
        self.sharding = architecture.chosen_sharding(model, parallelism)
        self._size = parallelism.tensor_parallel_size
        self._split = self._size if self.sharding.wide else 1  # parts into which heads and MLP are split
        self.residual = model.hidden_size // (1 if self.sharding.whole else self._size)
        self._rows = self._size if self.sharding.sequence else 1  # parts into which the tokens of norms are split
        self.latent = (model.rank or 0) // (self._size if self.sharding.latents else 1)
        self.query, self.key_value = model.hidden_size // self._split, model.key_value_size // self._split
        self._mlp, self._heads = model.intermediate_size // self._split, model.num_attention_heads // self._split
        self.blocks_ahead = 2 if self._size > 1 else 1

        groups = architecture.grouped_projections(model)
        normed = [group for group in groups if group.norm]
        self._projections = sum(len(group.wide_outs) for group in groups)
        self._projections_together = max(len(group.wide_outs) for group in groups)  # with a common input
        self._normed = sum(len(group.wide_outs) for group in normed)  # projections after a norm
        # Whether projections with a common input share a product; dense ones always do.
        self._grouped = parallelism.group_projections or model.rank is None
        self._products = sum(len(group.products(self._grouped)) for group in normed)  # after a norm
        # Pieces of equal width (``model.low_rank``) into which their latents are divided.
        self._normed_pieces = sum(len(group.pieces(self._grouped)) for group in normed)
        self._norms = len(normed)
        # Whether latents are scaled by a norm's statistic after their exchange.
        self._scaled = self.sharding.residual and parallelism.norm != "sync"
        self.carried = 0 if model.lax is None else self._projections * self.latent * element_bytes

        # Statistics are sent with the latents in their type, or in separate collectives; on one rank nothing is sent,
        # and norms read the residual's own.
        sent_bytes = element_bytes if parallelism.norm == "fused" else PRECISE
        self._sent_statistics = self._products * sent_bytes
        own_bytes = sent_bytes if self._size > 1 else PRECISE
        self._first_squares = own_bytes if self.sharding.residual else 0
        self._block_statistics = self._first_squares + self._sent_statistics if self._size > 1 else 2 * PRECISE

        # Queries and keys rotated out of place, where the values next to them keep their inputs alive. Context parallel
        # ranks copy values.
        rotated = 2 * self.query if self.query == self.key_value else self.key_value
        self._rotated = rotated if self._grouped and parallelism.context_parallel_size == 1 else 0
        # Torch's norm of whole rows where it has no kernel: an element's copy in fp32, and both of these, the row in
        # fp32 and the normed row before scaling. The residual itself is freed where such norms keep a copy of it.
        self._fp32_copy = PRECISE if element_bytes < PRECISE else 0
        self._composite_norm = PRECISE + self._fp32_copy
        self._freed = element_bytes if element_bytes < PRECISE else 0

        self.embedding = 0 if self.sharding.residual else 8 + element_bytes
        itself = kernels or element_bytes == PRECISE or not self.sharding.residual
        self.stream_start = self.residual * element_bytes if itself else 0
        widest = max(2 * self._mlp, self.query + 2 * self.key_value, self._projections_together * self.latent)
        self.fp8_operand = widest + PRECISE * self._projections_together

    @lru_cache(_REMEMBERED)  # noqa: B019
    def block(self, crossed: bool, receives: bool, mode: RecomputeMode) -> int:
        """Bytes that a block keeps.

        Args:
            crossed: Whether the previous block's latents cross into it.
            receives: Whether it receives latents; a recomputed block keeps them in any case, unless they are shared.
            mode: What it keeps.
        """
        traits = TRAITS[mode]
        if traits.again == "nothing":
            return self._whole_block(crossed)
        if traits.again == "all":
            return self.residual * self.element_bytes + self._first_squares + receives * self.carried
        # Context parallel ranks keep attention's output and log-sum-exps, so that no keys are sent again.
        alone = self.parallelism.context_parallel_size == 1
        attended = 0 if alone else self._heads * PRECISE + self.query * self.element_bytes
        return attended + (0 if traits.on_host else self._segments(crossed, receives, mode))

    def on_host(self, crossed: bool, receives: bool, mode: RecomputeMode) -> int:
        """Bytes that a block keeps in the host's memory. Arguments as in ``block``."""
        return self._segments(crossed, receives, mode) if TRAITS[mode].on_host else 0

    def segment_fetched(self, crossed: bool, mode: RecomputeMode) -> int:
        """Bytes on the device of the segment that is recomputed, beside the blocks fetched ahead of it.

        Either a block's first, with the latents of queries, keys and values, or its last, while the residual of the
        next block's first has not been released. Arguments as in ``block``.
        """
        if not TRAITS[mode].on_host:
            return 0
        latent = (2 if crossed else 1) * self.latent // self._size
        widest = max(self.residual + self._projections_together * latent, 2 * self.residual + latent)
        return widest * self.element_bytes + self._block_statistics

    @lru_cache(_REMEMBERED)  # noqa: B019
    def _segments(self, crossed: bool, receives: bool, mode: RecomputeMode) -> int:
        """Inputs of the segments of a block that is recomputed between its exchanges."""
        saved = 2 * self.residual * self.element_bytes + self._block_statistics
        if TRAITS[mode].slices and (self._size > 1 or TRAITS[mode].on_host):
            # This rank's slice of a block's latents, and of those that cross into it.
            latents = sum(architecture.saved_latents(self.model, self.parallelism, crossed)) // self._size
            return saved + latents * self.element_bytes
        return saved + self._projections * self.latent * self.element_bytes + receives * self.carried

    @lru_cache(_REMEMBERED)  # noqa: B019
    def block_backward(self, crossed: bool, receives: bool, mode: RecomputeMode) -> int:
        """Extra bytes of the backward pass through a block: recomputed activations, and gradients of activations.

        Approximate: the residual's gradient and those around it, and the MLP's three or attention's. Arguments as in
        ``block``.
        """
        widths = 3 * self.residual + max(3 * self._mlp, 2 * (self.query + self.key_value))
        if self.sharding.sequence and self._size > 1:
            widths += 2 * self.model.hidden_size  # the rows that were gathered again, and the gradient to be scattered
        if self.model.lax is not None:
            # Of latents received and handed on; and a reference makes those of three at a time step by step.
            widths += (2 * self._projections + (0 if self.kernels else 12)) * self.latent
        gradients = widths * self.element_bytes if self.kernels else (widths + 2 * self.query) * PRECISE
        traits = TRAITS[mode]
        if traits.again == "nothing":
            return gradients
        gradients += self.blocks_ahead * self.on_host(crossed, receives, mode)
        if traits.slices and self._size > 1:
            # Gathered latents: of a block and one more segment, while the slices still exist.
            gathered = (2 if crossed else 1) * (self._projections + self._projections_together) * self.latent
            gradients += gathered * self.element_bytes
        segments = traits.again == "segments"
        again = self._whole_block(crossed) - self.block(crossed, receives, "latent" if segments else mode)
        if segments and self.kernels:
            # One segment at a time, between two exchanges.
            attention = (3 if self.model.qk_norm else 2) * (self.query + self.key_value) + 3 * self.latent
            mlp = 3 * self._mlp + 2 * self.latent
            again = min(again, self.element_bytes * max(attention, mlp) + PRECISE * self._heads)
        return gradients + again

    def head(self) -> int:
        """Bytes kept by the final norm and the loss, including the last residual."""
        hidden, element = self.model.hidden_size, self.element_bytes
        loss = 8 + PRECISE + PRECISE // self._rows  # the target's index, the log-sum-exp, and the norm's statistic
        norm = (self.residual + hidden) * element
        if self.sharding.residual:  # its normed shard, too, before it is scaled by γ
            return norm + loss + self.residual * max(element, 0 if self.kernels else 2 * self._fp32_copy)
        return norm + loss + (0 if self.kernels else self.residual * (self._composite_norm - self._freed))

    def _whole_block(self, crossed: bool) -> int:
        element, width = self.element_bytes, self.residual
        activation = self.model.bottleneck_activation is not Activation.LINEAR
        saved = (2 * width + 2 * self.query + 2 * self.key_value + 3 * self._mlp) * element + self._heads * PRECISE

        # Statistics, and what a norm that is a separate pass keeps.
        if not self.sharding.residual:
            saved += self._products * (width * element + PRECISE // self._rows)
        else:
            statistics = self._sent_statistics if self._size > 1 else 2 * PRECISE
            if self.parallelism.norm != "sync":
                saved += statistics
            if self.parallelism.norm != "fused":
                saved += self._products * (2 * width * element + PRECISE + width * self._fp32_copy)
            if self.parallelism.norm == "online_paper":
                saved += self._normed * self.latent * PRECISE

        # Latents, or those that cross: the gate's output and intermediate results.
        if crossed:
            gate = (0, 1, 3)[len(architecture.gate_matrices(self.model))]
            saved += (2 + gate) * self._projections * self.latent * element
            if self.kernels:  # mean and deviation of each
                saved += 2 * self._projections * PRECISE
        else:
            latents = self._normed * (2 if self._scaled or activation else 1)
            latents += (self._projections - self._normed) * (2 if activation else 1)
            saved += latents * self.latent * element

        if self.model.qk_norm:
            width = self.query + self.key_value
            statistics = PRECISE * width // self.model.head_size
            if self.kernels:
                saved += width * element + statistics
            else:
                # Composed of torch's operations: an input in fp32, which is the projections' output unless that is
                # narrower; the references already count what the values next to them keep of it.
                own = (width - self._rotated) * element if element == PRECISE else 0
                saved += width * self._composite_norm + statistics + own
        if self.kernels:
            return saved

        # What the kernels' references keep beyond the kernels: each of torch's operations keeps its own inputs.
        copies = element < PRECISE
        more = self._mlp * element if self.model.mlp_activation is not Activation.LINEAR else 0
        if self.sharding.residual:
            more += 2 * self.residual * self._fp32_copy
            if self._scaled:  # reciprocal roots, in place of the residual's sums on one rank
                more += PRECISE * (self._normed_pieces - (self._norms if self._size == 1 else 0))
                if copies and self._size > 1 and self.parallelism.norm == "fused":  # of statistics, too
                    more -= self._sent_statistics
        else:
            more += self.residual * (self._products * self._composite_norm - 2 * self._freed)
        more += self._rotated * element
        if crossed:
            steps = PRECISE * self._projections * (3 if activation else 2)
            arrived = PRECISE * self._normed if self._scaled else 0
            gate = -self._projections * element if architecture.gate_matrices(self.model) else 0
            # The kernel's latents as they arrived are already counted.
            latents = (steps + arrived + gate - element * self._projections) * self.latent
            ones = self._projections - self._normed + (0 if self._scaled else self._normed_pieces)
            return saved + more + latents + PRECISE * 2 * self._projections + element * ones
        latents = (PRECISE - element) * (self._projections if activation else self._normed if self._scaled else 0)
        latents += PRECISE * self._normed if activation and self._scaled else 0
        return saved + more + latents * self.latent


@dataclass(frozen=True)
class BlockSplit:
    """How a block is split, regardless of stages and replicas; two that split it alike are equal."""

    parts: tuple[Hashable, ...]
    parallelism: ParallelismConfig = field(compare=False)

    @classmethod
    def of(cls, parallelism: ParallelismConfig) -> "BlockSplit":
        """Return the split of a job's parallelism."""
        parts = tuple(value for name, value in vars(parallelism).items() if name not in _OF_OTHERS)
        return cls(parts, parallelism)


@lru_cache(1024)
def activations(model: ModelConfig, split: BlockSplit, element_bytes: int, kernels: bool) -> Activations:
    """Return ``Activations``, shared by layouts that split a block alike."""
    return Activations(model, split.parallelism, element_bytes, kernels)


# Bytes of a rank's weights, gradients and optimizer state, as ``optim.zero`` lays them out.
#
# n weights of a group, padded so that each begins at a multiple of 64 and the group divides among the replicas that
# share its state (``FlatLayout``); c bytes per element of the compute type; under ZeRO the bytes are those of one
# replica's share (arXiv 1910.02054):
#
# ---------  -----------------------------------------------------------------------------------------------------------
# weights    c·n
# gradients  4n, and 4n/dp for the reduced part where the state is shared. Under ZeRO stage 2 all sums also exist during
#            the first step (in which ``optim.zero`` learns how often each arrives), so they count
# under way  under that stage, the arriving part of up to three buckets being sent; and the buckets themselves if those
#            of the step's next micro-batch arrive meanwhile; gloo, on CPUs, sends a copy
# optimizer  moments 8n/dp; the master 4n/dp, unless it is the weight itself (fp32, not shared); its rounded copy c·n/dp
#            if bf16 and shared
# ---------  -----------------------------------------------------------------------------------------------------------
#
# LORO's and Muon's factors are whole on each replica (``ParamKind.custom_update``); Muon's have one moment, 4n. A
# checkpoint's copy is in the host's memory, and so is the share of masters and moments set by
# ``parallelism.optimizer_offload``, except masters that are the weights themselves. In its place there are two buffers
# through which it is updated, each for a chunk or for two quantities of the largest factor.

_BLOCK = 64  # elements; ``optim.zero.BLOCK``
STAGED_CHUNK = 1 << 22  # elements of each quantity; 48 MiB of masters and moments
_STAGED_AT_ONCE, _BUFFERS = 2, 2  # quantities of a factor; chunks
_UNDER_WAY = 3 << 25  # elements of the buckets that ``optim.zero`` has in flight at a time


class GroupBytes(NamedTuple):
    """One group's.

    Attributes:
        weights: Weights that the model computes with.
        gradients: Sums of their gradients.
        optimizer: Masters, moments, and rounded copies, without what is counted as weights.
        temporary: What also exists while the group is created: everything in fp32, and then its gradients.
        source: The fp32 weights from which it is created, which are then freed.
        under_way: Gradients being sent, in addition to those that have arrived since.
        ahead: Bytes by which these exceed all gradients before any has arrived since.
        host: Masters and moments in the host's memory.
        staged: The buffers in which they are updated, if no group needs larger ones.
        passing: Bytes that cross the bus for an update, both ways; LORO's and Muon's masters once more, to be rounded.
        copy: A copy of all masters and moments, for a checkpoint or for recovery.
    """

    weights: int
    gradients: int
    optimizer: int
    temporary: int
    source: int
    under_way: int
    ahead: int
    host: int
    staged: int
    passing: int
    copy: int


def state_bytes(spec: JobSpec, stages: Sequence[Stage], element_bytes: int) -> list[GroupBytes]:
    """Return the bytes of a rank's groups, in the order in which they are created.

    Args:
        spec: The job in its layout.
        stages: The rank's.
        element_bytes: Of the compute type.
    """
    split = BlockSplit.of(spec.parallelism)
    layers = [layer for stage in stages for layer in stage.layers]
    crossed = sum(map(spec.model.crosses_into, layers)) if spec.model.lax else 0
    last = any(stage.last for stage in stages)
    embedding = any(stage.first for stage in stages) or (last and spec.model.tie_embeddings)
    tied = embedding and spec.model.tie_embeddings and spec.parallelism.pipeline_parallel_size > 1
    counts = len(layers) - crossed, crossed, embedding and not tied, tied, last
    layout, zero_stage, rounded = Layout.of(spec.parallelism), spec.parallelism.zero_stage, element_bytes < PRECISE
    ranks, groups = layout.same_weights, []
    early = zero_stage == 2 and ranks > 1  # gradients are reduced in each micro-batch
    for kind, parts in _weights(spec.model, split, spec.optimizer):
        padded, elements = (sum(map(mul, counts, sizes)) for sizes in zip(*parts, strict=True))
        if not padded:
            continue
        shared = zero_stage > 0 and not kind.custom_update and ranks > 1
        parts_of_state = ranks if shared else 1
        length = _rounded_up(padded, _BLOCK * parts_of_state)
        own = length // parts_of_state
        gradients = PRECISE * length + (PRECISE * own if shared or early else 0)
        under_way = 0
        if early:
            sent = PRECISE * min(length, _UNDER_WAY)
            under_way = sent // parts_of_state if shared else 0
            under_way += sent if spec.training.micro_batches(layout.dp) > 1 else 0
            if shared and not spec.resources.gpus_per_worker:
                under_way += sent  # gloo's copy
        offloaded = offloaded_elements(own, spec.parallelism.optimizer_offload)
        quantities = kind.moments + (rounded or shared)
        host = quantities * PRECISE * offloaded
        optimizer = quantities * PRECISE * own - host + (element_bytes * own if rounded and shared else 0)
        staged = 0
        if offloaded:
            factors = (_largest_weight(spec.model, split, spec.optimizer, each, factors=True) for each in (False, True))
            staged = staged_elements(kind, offloaded, quantities, max(factors))
        groups.append(
            GroupBytes(
                weights=element_bytes * length,
                gradients=gradients,
                optimizer=optimizer,
                # Everything in fp32 is the master itself, or the weights, unless both are something else.
                temporary=PRECISE * length if rounded and (shared or offloaded) else 0,
                source=PRECISE * elements,
                under_way=under_way,
                ahead=max(0, under_way - PRECISE * length),
                host=host,
                staged=_BUFFERS * PRECISE * staged,
                passing=2 * host + (PRECISE * offloaded if kind.custom_update and rounded else 0),
                copy=(1 + kind.moments) * PRECISE * own,
            )
        )
    return groups


def starting_peak(groups: Sequence[GroupBytes]) -> int:
    """Return the peak while the groups are created, one after the other."""
    waiting, created, peak = sum(group.source for group in groups), 0, 0
    for group in groups:
        peak = max(peak, created + waiting + group.temporary + group.weights)
        waiting -= group.source
        created += group.weights + group.gradients + group.optimizer
        peak = max(peak, created + waiting + group.temporary)
    return peak


def offloaded_elements(elements: int, share: float) -> int:
    """Return the number of elements of a replica's part of a group's state that are in the host's memory."""
    return int(elements * share) // _BLOCK * _BLOCK


def staged_elements(kind: ParamKind, offloaded: int, quantities: int, largest: int) -> int:
    """Return the elements of each of the two buffers in which the host's part of a group is updated.

    Args:
        kind: The group's.
        offloaded: Elements of each quantity that the host has.
        quantities: How many of the masters and moments these are.
        largest: Elements of the group's largest weight, which a custom update needs whole.
    """
    if kind.custom_update:
        return min(quantities, _STAGED_AT_ONCE) * _rounded_up(largest, _BLOCK)
    return quantities * min(STAGED_CHUNK, offloaded)


def largest_weight(spec: JobSpec, stages: Sequence[Stage]) -> int:
    """Return the elements of the largest weight of a rank's blocks."""
    split = BlockSplit.of(spec.parallelism)
    return max(
        _largest_weight(spec.model, split, spec.optimizer, crossed)
        for crossed in {spec.model.crosses_into(layer) for stage in stages for layer in stage.layers}
    )


@lru_cache(1024)  # the ranks of a pipeline ask for the same, and so do layouts that split weights alike
def _weights(
    model: ModelConfig, split: BlockSplit, optimizer: OptimizerConfig
) -> Sequence[tuple[ParamKind, Sequence[tuple[int, int]]]]:
    """Return the elements of parts of a model by kind, in the order of groups: with padding to ``_BLOCK``, and without.

    The parts are a block into which no latents cross, one into which some do, the embedding, an embedding tied to a
    head on another rank, and the head.
    """
    parts = [
        *(_shards(block_weights(model, crossed), model, split.parallelism, optimizer) for crossed in (False, True)),
        *(_shards(embedding_weights(model), model, split.parallelism, optimizer, tied) for tied in (False, True)),
        _shards(architecture.head_weights(model), model, split.parallelism, optimizer),
    ]
    kinds = sorted(dict.fromkeys(kind for part in parts for kind, _ in part), key=lambda kind: kind.order)
    weights = []
    for kind in kinds:
        sizes = [[size for each, size in part if each == kind] for part in parts]
        weights.append((kind, [(sum(_rounded_up(size, _BLOCK) for size in of), sum(of)) for of in sizes]))
    return weights


@lru_cache(1024)
def _largest_weight(
    model: ModelConfig, split: BlockSplit, optimizer: OptimizerConfig, crossed: bool, factors: bool = False
) -> int:
    """Return the elements of a block's largest weight, or of those that an optimizer updates by its own rule."""
    weights = _shards(block_weights(model, crossed), model, split.parallelism, optimizer)
    return max((size for kind, size in weights if kind.custom_update or not factors), default=0)


def _shards(
    weights: Mapping[str, WeightSpec], model: ModelConfig, parallelism: ParallelismConfig, optimizer: OptimizerConfig,
    tied: bool = False,
) -> list[tuple[ParamKind, int]]:  # fmt: skip
    """Return kind and elements of a rank's part of each weight."""
    sharding, size, shards = architecture.chosen_sharding(model, parallelism), parallelism.tensor_parallel_size, []
    for weight in weights.values():
        kind = ParamKind.of(weight, sharding, optimizer, tied)
        shards.append((kind, prod(weight.shape) // (size if kind.split else 1)))
    return shards


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


# A rank's peak.

_CHUNK_ELEMENTS = 1 << 26  # ``parallel.vocabulary.CHUNK_ELEMENTS``
_BATCH_BYTES = 32
_TOKEN_BYTES = 8
_OWN_COPIES = 2  # for recovery: one stays valid until all ranks have the next
_GRAM_MATRICES, _MOST_PROJECTIONS = 7, 3  # in ``optim.loro_muon`` at a time; with a common input


class Memory(Frozen):
    """Memory in bytes of the rank that needs most."""

    weights: int = Field(description="Weights in the compute type.")
    gradients: int = Field(description="Gradient accumulators, fp32.")  # and gradients being sent
    # With the staging buffers for those kept on the host.
    optimizer: int = Field(description="Master weights, moments and rounded copies.")
    activations: int = Field(description="Activations kept for the backward pass, and a block's temporaries.")
    logits: int = Field(description="Memory of the head and the loss.")
    total: int = Field(description="Peak at any moment; not all of the above exists at once.")
    host: int = Field(
        0,
        description="Master weights, moments and what blocks keep for their backward pass in the host's memory, not "
        "included in total.",
    )
    # One for checkpoints; with copies for recovery, the rank's own of two steps and those of another rank.
    copies: int = Field(
        0, description="Copies of the state in the host's memory, for checkpoints and recovery, not included in total."
    )


def rank_memory(spec: JobSpec, layout: Layout) -> Memory:
    """Return the memory of the rank that needs most in a layout; for host memory, the most of any rank.

    Args:
        spec: The job.
        layout: One of ``spec.layouts()``.
    """
    job = spec.at(layout)
    ranks = pipeline_ranks(job, layout, range(layout.pp) if isinstance(job.parallelism.recompute, tuple) else None)
    return most_of([rank.memory() for rank in ranks])


def pipeline_rank_memory(spec: JobSpec, layout: Layout, rank: int) -> Memory:
    """Return the memory of one pipeline rank.

    Args:
        spec: The job.
        layout: One of ``spec.layouts()``.
        rank: The pipeline rank, from 0.
    """
    return pipeline_ranks(spec.at(layout), layout, [rank])[0].memory()


def most_of(ranks: Sequence[Memory]) -> Memory:
    """Return the memory of the fullest of some ranks; for host memory, the most of any."""
    fullest = max(ranks, key=lambda memory: memory.total)
    most = {"host": max(each.host for each in ranks), "copies": max(each.copies for each in ranks)}
    return fullest.model_copy(update=most)


def pipeline_ranks(job: JobSpec, layout: Layout, ranks: Sequence[int] | None = None) -> "list[PipelineRank]":
    """Return some pipeline ranks of a job at its layout; by default those that may need most if all have one mode."""
    stages = cut(job.model, job.parallelism, job.training.sequence_length)
    if ranks is None:
        ranks = _extremes(job.model, stages, layout.pp)
    return [PipelineRank(job, rank, stages[rank :: layout.pp]) for rank in ranks]


@lru_cache(1024)  # the same for each number of replicas
def _extremes(model: ModelConfig, stages: Sequence[Stage], pipeline: int) -> Sequence[int]:
    """Return the pipeline ranks that may need most.

    From one rank to the next, fewer micro-batches are in flight, and under zero_bubble more gradients are owed, each by
    the same number. So no rank needs more than both an earlier and a later rank whose loads are at least as large in
    everything that a stage's memory grows with.
    """
    loads: list[tuple[int, ...]] = []
    for rank in range(pipeline):
        load: tuple[int, ...] = ()
        for stage in stages[rank::pipeline]:
            crossed = sum(map(model.crosses_into, stage.layers))
            crosses = model.crosses_into(stage.layers.start), model.crosses_into(stage.layers.stop)
            # Stages at an end of the model only compare with each other.
            load += len(stage.layers), crossed, *crosses, stage.first, -stage.first, stage.last, -stage.last
        loads.append(load)
    last = {load: rank for rank, load in enumerate(loads)}
    first = {load: loads.index(load) for load in last}
    extremes = []
    for rank in sorted({*first.values(), *last.values()}):
        as_large = [load for load in first if all(map(ge, load, loads[rank]))]
        if not (any(first[load] < rank for load in as_large) and any(last[load] > rank for load in as_large)):
            extremes.append(rank)
    return extremes


class PipelineRank:
    """One pipeline rank.

    Args:
        job: The job at its layout.
        rank: The pipeline rank.
        stages: Its stages.

    Attributes:
        sizes: Number of blocks of each stage; the first has more micro-batches in flight.
        ends: Whether it has the model's last stage.
    """

    def __init__(self, job: JobSpec, rank: int, stages: Sequence[Stage]) -> None:
        model, parallelism, training = job.model, job.parallelism, job.training
        self._job, self._stages = job, stages
        self.sizes, self.ends = [len(stage.layers) for stage in stages], stages[-1].last
        self._runs = tuple(parallelism.modes(stage.index, len(stage.layers)) for stage in stages)
        self._element = element = BYTES[training.precision]
        self._each = each = activations(model, BlockSplit.of(parallelism), element, job.resources.gpus_per_worker > 0)
        self._tokens = tokens = rank_tokens(job)

        # What does not depend on what blocks keep; bytes unless something else is said.
        micro_batches = training.micro_batches(parallelism.data_parallel_size)
        one_stage, late = parallelism.pipeline_schedule == "1f1b", parallelism.pipeline_schedule == "zero_bubble"
        groups, largest = state_bytes(job, stages, element), largest_weight(job, stages)
        self._weights = sum(group.weights for group in groups)

        # What neighbours send: the input of each micro-batch in flight, and the gradient of the output for a backward
        # pass. The schedules of several stages post a transfer of each ahead, and wait for what they have sent at the
        # end of a step, and keep it until then.
        width = each.residual * element
        received_ahead, sent_before = (0, 0) if one_stage else (1, micro_batches)
        buffers, index = 0, index_bytes(job, each.query // model.head_size)
        self._besides_blocks = list[int]()  # what each stage keeps of a micro-batch besides its blocks
        for stage in stages:
            # Bytes per token that come into a stage and leave it, with the latents of LaX.
            ends = stage.layers.start, stage.layers.stop
            received, sent = (width + each.carried * model.crosses_into(layer) for layer in ends)
            received, returned = (0 if stage.first else received), (0 if stage.last else sent)
            buffers += tokens * (returned + (received_ahead + sent_before) * (received + returned))
            a_token = each.embedding if stage.first else received - width  # latents of LaX besides the stream
            if not stage.last and one_stage:  # otherwise among what was sent
                a_token += sent
            self._besides_blocks.append(a_token * tokens + len(stage.layers) * index)

        # The batch: context parallel ranks read all of a sequence, each with the token that follows it.
        batch = (_BATCH_BYTES * training.sequence_length + _TOKEN_BYTES) * training.micro_batch_size * micro_batches

        # Context parallel ranks have separate rotary angles for their tokens, and for the keys and queries that they
        # compute from latents.
        ranks = parallelism.context_parallel_size
        # Whether they may send latents; which of them share a node is only known at run time.
        self._sends_latents, moved = False, 0  # the latter: tokens of tasks that may move as latents
        if ranks > 1:
            cluster = machine_for(job.resources, training.precision).cluster
            self._sends_latents = sent_between_nodes(job, cluster) == "latents"
            if most := sum(moved_tokens(job)):
                moved = most if moved_as(job, cluster) == "latents" else 0
        own = 0 if ranks == 1 else tokens * (ranks if self._sends_latents else 1)
        own += moved
        if parallelism.pipeline_parallel_size > 1 and job.data.documents_apart:
            own *= micro_batches  # each then has a partition of its own, and all are made at once
        rotary = 24 * (training.sequence_length + own) * model.head_size // 2

        # A block's backward pass; fp8 has 8-bit operands, for one product at a time.
        self._beside_block = self._context() + head_bytes(job)
        if training.precision == "fp8" and each.kernels:
            self._beside_block += tokens * each.fp8_operand + largest
        self._beside_block += (2 * element + PRECISE) * largest

        # A CPU makes a copy of a bf16 gradient to add it to an fp32 sum.
        copied = PRECISE if not each.kernels and element < PRECISE else 0
        table = model.vocab_size * model.hidden_size // parallelism.tensor_parallel_size
        vocabulary = model.vocab_size // parallelism.tensor_parallel_size
        chunk = min(tokens, max(1, _CHUNK_ELEMENTS // vocabulary))
        self._logits = chunk * vocabulary * element * (1 if chunk == tokens else 2)
        if not each.kernels:
            # Their gradient is not computed in place, and bf16 logits are copied.
            self._logits += chunk * vocabulary * PRECISE * (1 if element == PRECISE else 2)
        self._logits += (tokens + chunk) * model.hidden_size * element
        self._head = self._head_norm = 0  # the latter in the backward pass through the final norm
        if self.ends:
            tied = PRECISE + element + max(copied, element if each.sharding.residual else 0)
            gradients = tied if model.tie_embeddings else element + copied  # else added to the gradient's sum
            self._head = tokens * each.head() + self._logits + gradients * table
            # Gradients of the norm's output and input; composed of torch's operations, each summand is separate.
            of_norm = 2 * element if each.kernels else 5 * PRECISE
            self._head_norm = tokens * (each.head() + of_norm * each.residual)

        # LORO holds all factors' directions at once; Muon one factor's and its Gram matrices, also in float64.
        self._update = 0
        if job.optimizer.loro is not None:
            self._update = PRECISE * (self._weights // element)
        elif job.optimizer.muon is not None:
            grams = _GRAM_MATRICES * model.bottleneck_rank**2 * _MOST_PROJECTIONS
            self._update = 5 * PRECISE * largest + 2 * PRECISE * grams

        # Deferred weight gradients need inputs and output gradients of all products: about what a block keeps without
        # recomputation.
        self._owed = [
            tokens * self._of_blocks(stage.layers, (("none", len(stage.layers)),)) if late else 0 for stage in stages
        ]
        self._gradients = sum(group.gradients for group in groups)
        self._optimizer = sum(group.optimizer for group in groups) + max((group.staged for group in groups), default=0)
        self._under_way = sum(group.under_way for group in groups)  # gradients sent during the backward pass
        self._ahead = sum(group.ahead for group in groups)  # what is sent ahead of it
        self._buffers = buffers + batch + rotary
        self._embedding = (element + copied) * table if stages[0].first else 0  # its gradient
        self._starting = starting_peak(groups) + rotary  # peak at the start
        self._host = sum(group.host for group in groups)  # state there
        self._copies = state_copies(job) * sum(group.copy for group in groups)
        # What a block saves of other ranks' tasks until the backward pass, if its attention is not recomputed.
        self._remote_tasks = moved * attention_layer(job).remote_bytes if moved else 0
        alone = parallelism.pipeline_parallel_size == 1
        self._moments = frozenset({((1, 0), (0, 0))}) if alone else in_hand(parallelism, rank, micro_batches)
        self._may_capture = captures_steps(job)  # if no block is on the host

    def keeping(self, modes: Sequence[ModeRuns]) -> "PipelineRank":
        """Return the rank with its stages' blocks in these modes; what does not depend on them is computed once."""
        other = copy(self)
        other._runs = tuple(modes)
        return other

    def memory(self) -> Memory:
        """Return the rank's peak memory."""
        each, tokens = self._each, self._tokens
        state = self._weights + self._gradients + self._optimizer
        on_host = any(TRAITS[mode].on_host for modes in self._runs for mode, _ in modes)

        # Activations once the last of the micro-batches in flight has gone through, and what is in transit to the host.
        saved, in_transit = [], []
        for stage, modes, besides in zip(self._stages, self._runs, self._besides_blocks, strict=True):
            # A stage keeps its input on the device, whatever its first block keeps.
            begins = each.stream_start if stage.first else each.residual * self._element
            a_token = self._of_blocks(stage.layers, modes) + (begins if TRAITS[modes[0][0]].on_host else 0)
            keep_attention = sum(count for mode, count in modes if TRAITS[mode].again != "all")
            saved.append(a_token * tokens + self._by_itself(modes) + keep_attention * self._remote_tasks + besides)
            begin, a_token = stage.layers.start, 0  # of the stage's last block that offloads
            for mode, count in modes:
                if TRAITS[mode].on_host:
                    last = begin + count - 1
                    crossed = receives = self._job.model.crosses_into(last)
                    a_token = each.on_host(crossed, receives, mode)
                    a_token -= begins if last == stage.layers.start else 0
                begin += count
            in_transit.append(tokens * a_token)
        most = max(_in_flight_bytes(moment, saved, self._owed) for moment in self._moments)
        saved_bytes = most + max(in_transit) + self._buffers

        # Bytes per token in the fullest block, less what later blocks of its stage have already freed.
        parallelism, fullest = self._job.parallelism, 0
        for stage, modes in zip(self._stages, self._runs, strict=True):
            freed, end = 0, stage.layers.stop
            # A backward pass has another segment on the device, beside the blocks fetched ahead and in transit. Not
            # where it follows its own forward pass: then the block in transit is the one that it begins with.
            apart = parallelism.stages > 1 and not (stage.last and parallelism.pipeline_schedule == "1f1b")
            slices = sum(count for mode, count in modes if TRAITS[mode].slices)
            fetches_beside = apart and slices > each.blocks_ahead
            for mode, count in reversed(modes):
                crossed = receives = self._job.model.crosses_into(end - 1)
                block = each.block_backward(crossed, receives, mode)
                block += fetches_beside * each.segment_fetched(crossed, mode)
                fullest = max(fullest, block - freed)
                begin = end - count
                # zero_bubble keeps it until the weight gradients are computed.
                if parallelism.pipeline_schedule != "zero_bubble" and begin > stage.layers.start:
                    freed += self._of_blocks(range(begin, end), ((mode, count),))
                end = begin
        backward = max(tokens * fullest + self._beside_block, self._embedding, self._head_norm)
        step = state + saved_bytes + max(backward + self._under_way, self._head + self._ahead)
        if self._may_capture and not on_host:  # the only rank of a pipeline has all modes
            # An evaluation peaks with a block's activations, and the head's.
            crossed = receives = self._job.model.crosses_into(self._stages[-1].layers[-1])
            block = tokens * (each.block(crossed, receives, "none") + each.residual * self._element)
            step += max(self._update, block + self._by_itself(self._runs[0]) + tokens * each.head() + self._logits)
        total = max(step, self._starting, state + self._update)

        host = self._host
        if on_host:  # all micro-batches in flight: ``parallel.activation_offload``
            of_stages = [
                tokens * self._of_blocks(stage.layers, modes, on_host=True)
                for stage, modes in zip(self._stages, self._runs, strict=True)
            ]
            host += max(_in_flight_bytes(moment, of_stages, (0,) * len(of_stages)) for moment in self._moments)
        return Memory(
            weights=self._weights, gradients=self._gradients + self._under_way, optimizer=self._optimizer,
            activations=saved_bytes + backward, logits=self._head, total=total, host=host, copies=self._copies,
        )  # fmt: skip

    def _by_itself(self, modes: ModeRuns) -> int:
        """Extra bytes kept by attention that takes one document or one window at a time."""
        job = self._job
        together = attends_in_one(job) or job.parallelism.context_parallel_size > 1
        together = together or (self._each.kernels and attends_on_device(job))
        if together and (job.training.attention is None or not job.data.documents_apart):
            return 0
        window, length = job.model.sliding_window, job.training.sequence_length
        seen = 0 if window is None or window >= length else 2 * window
        at_once = max(1, sum(count for mode, count in modes if mode == "none"))
        return self._tokens * at_once * (self._each.query * self._element + seen * (self._element + 1))

    def _of_blocks(self, layers: range, modes: ModeRuns, on_host: bool = False) -> int:
        """Bytes per token that consecutive blocks keep, on the device or on the host; many blocks are alike."""
        of_block = self._each.on_host if on_host else self._each.block
        if self._job.model.lax is None:
            return sum(of_block(False, False, mode) * count for mode, count in modes if count)
        return sum(of_block(*block) * count for block, count in _alike_with_lax(self._job.model, layers, modes).items())

    def _context(self) -> int:
        """Extra bytes of attention's backward pass where other ranks' keys arrive in stages.

        Gradients of queries and of local keys in fp32. Six times a stage's keys: as they arrived and in order; the next
        stage's as they arrive, and what is sent for it; gradients going back and coming back; and twice gradients in
        fp32. Halves of a split micro-batch receive all stages at once, and send what is needed for it, while the other
        half's last gradients go back and come back. This is sized for a single document; separate documents need less.
        On a GPU a call of flash attention has its own keys and their gradients. With sparse attention also the lists of
        keys sent and received. Where latents may be sent: the latents, with the gradients of a stage's, and of the
        weights that keys are computed with. Where tasks may move, as in ``task_bytes``.
        """
        job, each, tokens, element = self._job, self._each, self._tokens, self._element
        ranks = job.parallelism.context_parallel_size
        if ranks == 1:
            return 0
        # Most tokens whose keys arrive in a stage; with sparse attention, a group of heads' keys of all tokens.
        part = max(tokens_by_part(job))
        chunk = chunk_tokens(job.training.sequence_length, ranks)
        stage = -(-part * (ranks - 1) // (chunk * STAGES)) * chunk
        keys, key_heads = 2 * each.key_value, each.key_value // job.model.head_size
        active = 0
        if job.training.attention is not None:
            stage = max(stage, -(-tokens * ranks * max(map(len, head_groups(key_heads))) // key_heads))
            sequences = job.training.micro_batch_size * job.training.sequence_length
            active = sequences * (keys // (2 * job.model.head_size)) * _ACTIVE

        buffers = 2 * STAGES + 5 if job.parallelism.split_micro_batch else 6
        local = tokens * (PRECISE + element) * (each.query + keys)
        of_keys = stage * keys * (buffers * element + 2 * PRECISE)
        in_calls = max(part, stage) * 2 * keys * element if each.kernels else 0
        needed = local + of_keys + in_calls + active + task_bytes(job, each.kernels)
        if self._sends_latents:
            rank = job.model.bottleneck_rank
            # Arriving now and next, sent, and gradients going and coming back.
            shares = buffers * stage * 2 * rank // job.parallelism.tensor_parallel_size
            # Of a stage: latents as gathered, in order, and their gradients twice; keys before rotation, in fp32 on a
            # CPU, and gradients.
            whole = 4 * 2 * rank + (3 if each.kernels else 5) * keys
            own = tokens * 2 * rank * (1 + PRECISE // element)
            needed += element * (shares + stage * whole + own) + 2 * PRECISE * 2 * rank * each.key_value
        return needed


@lru_cache(4096)
def _alike_with_lax(model: ModelConfig, layers: range, modes: ModeRuns) -> Counter[tuple[bool, bool, RecomputeMode]]:
    """Count a stage's blocks by whether latents cross into them, whether they receive any, and mode."""
    counts: Counter[tuple[bool, bool, RecomputeMode]] = Counter()
    begin = layers.start
    for mode, count in modes:
        run = range(begin, begin + count)
        crossed = sum(map(model.crosses_into, run))
        # The first of a stage only receives latents that cross into it.
        first = layers.start in run and not model.crosses_into(layers.start)
        receives = count - crossed - first
        counts.update({(True, True, mode): crossed, (False, True, mode): receives})
        counts[False, False, mode] += count - crossed - receives
        begin += count
    return +counts  # without those of which there are none


def _in_flight_bytes(moment: InHand, saved: Sequence[int], owed: Sequence[int]) -> int:
    """Bytes of all micro-batches in flight, by what each stage has saved of one and what it owes."""
    (first, second), (owes_first, owes_second) = moment
    of_first = first * saved[0] + owes_first * owed[0]
    return of_first if len(saved) == 1 else of_first + second * saved[1] + owes_second * owed[1]


# Upper bounds, in bytes, on the memory of a rank that moved attention tasks take.
#
# Most tokens that may move at a time are assumed to, both ways. As queries and outputs: three tensors as wide as
# queries are sent and received, and log-sum-exps, and what is received is received again in parts; gradients are
# computed in fp32, sent back and received. As latents: shares of latents, sent and received; latents as gathered, in
# order, with gradients and their sum; queries before and after rotation, with gradients, and those of the output; and
# gradients of two weights. Outputs, log-sum-exps and shares of latents are then saved until the backward pass, in each
# block whose attention is not recomputed.


def moved_tokens(job: JobSpec) -> list[int]:
    """Most tokens whose attention a rank computes for others, of each part that has a partition of its own."""
    if job.parallelism.context.pool != "tasks" or job.parallelism.context_parallel_size == 1:
        return [0]
    size = chunk_tokens(job.training.sequence_length, job.parallelism.context_parallel_size)
    return [most_moved(tokens // size) * size for tokens in tokens_by_part(job)]


def task_bytes(job: JobSpec, kernels: bool) -> int:
    """What the backward pass of a block takes for them; without kernels, references keep more steps."""
    layer, tokens = attention_layer(job), max(moved_tokens(job))
    query = layer.query_bytes
    of_gradients = query // layer.element_bytes * PRECISE
    if not tokens or moved_as(job, machine_for(job.resources, job.training.precision).cluster) != "latents":
        return tokens * (3 * layer.moved_bytes(backward=True)[0] + of_gradients + 4 * query)
    share, whole = layer.share_bytes, layer.share_bytes * layer.tensor_parallel_size
    a_token = 6 * share + 6 * whole + (4 if kernels else 6) * query + of_gradients
    weights = 2 * (layer.rank or 0) * query  # in the compute type: a rank of columns as wide as queries
    return tokens * a_token + rank_tokens(job) * (share + whole) + weights


# Upper bounds, in bytes, on the memory of a rank that sparse attention takes in addition to dense attention.
#
# The index of m tokens: with a budget of p there is room for at most √p·m + 2·64 verticals and √p·m/64 + 1 slashes,
# since even the last of a document, which add the fewest pairs, add more the more there are; and for what is always
# seen. Each is a 64-bit number. They are kept for each block from its forward pass to its backward pass.
#
# One head of one document at a time: keys, values, queries, the output's gradient and three gradients in fp32; and for
# a run of queries its scores, what is computed from them, and the keys and values that it gathers. While lines are
# chosen: scores of the last queries and of the sampled ones, and which of these are kept; and what sorting takes per
# key. All context parallel ranks have the whole index and a head's keys of a whole document, but only the queries of
# their own tokens. For the transfer of keys: the source of each key, whether it is sent, and a list of those that are.

_POSITION = 8
_SORTED = 100  # for a key: what it is worth, adds and keeps, sums of these, and its rank in the order
_ACTIVE = 64  # for a key of a head: its source, whether it is sent and seen, its position when sent and received
_SAMPLED = 32  # for a key and sampled query: attention, the distance of their blocks, and whether it is kept


def index_bytes(job: JobSpec, heads: int) -> int:
    """The index of a block for a micro-batch, for a number of heads."""
    attention, training = job.training.attention, job.training
    if attention is None:
        return 0
    shortest = attention.from_length if job.data.documents_apart else training.sequence_length
    tokens = training.micro_batch_size * training.sequence_length
    in_each = sum(_most_lines(attention.budget, 0)) + attention.near_blocks + 1 + attention.sink + 2 * BLOCK
    return heads * _POSITION * (tokens // shortest * in_each + sum(_most_lines(attention.budget, tokens)))


def head_bytes(job: JobSpec) -> int:
    """What one head of the longest document takes at a time."""
    attention, length, size = job.training.attention, job.training.sequence_length, job.model.head_size
    if attention is None:
        return 0
    own = -(-length // job.parallelism.context_parallel_size)
    slashes, verticals = _most_lines(attention.budget, length)
    slashes, verticals = slashes + attention.near_blocks + 1, verticals + attention.sink + 2 * BLOCK
    keys = BLOCK * min(slashes, -(-length // BLOCK)) + min(verticals, length)
    run = min(max(RUN_SCORES, BLOCK * keys), keys * max(BLOCK, own // 8))
    blocks = (4 * (length + BLOCK) + 3 * (own + BLOCK)) * size
    product = PRECISE * (blocks + 4 * verticals * size + 5 * run + 4 * run * size // BLOCK)
    chosen = own * (3 * PRECISE * LAST_QUERIES + 2 * PRECISE * size) + length * _SORTED
    return max(product, chosen, length * SAMPLED_QUERIES * _SAMPLED)


def _most_lines(budget: float, tokens: int) -> tuple[int, int]:
    """Slashes and verticals of a document by the budget, without those that are always seen."""
    verticals = isqrt(int(budget * (tokens + 1) ** 2)) + 1
    return verticals // BLOCK + 1, verticals


# Host memory that a node's ranks need, and whether nodes have it.
#
# It holds the masters and moments that ``parallelism.optimizer_offload`` puts there, what blocks with ``recompute:
# offload`` keep for their backward pass, and copies of the state for checkpoints and recovery. Other memory of workers
# and their data is not counted. The need is compared with the memory that Ray reserves for workers on a node, which is
# less than the node has.


def node_bytes(memory: Memory, layout: Layout, machine: Machine) -> int:
    """Return the most host memory that a node's ranks need.

    Args:
        memory: Memory of one rank.
        layout: The gang's layout.
        machine: What it runs on.
    """
    return min(layout.world_size, machine.cluster.levels[0].fan_out) * (memory.host + memory.copies)


def state_copies(spec: JobSpec) -> int:
    """Return how many copies of a rank's masters and moments its host's memory holds: ``Memory.copies``.

    Args:
        spec: The job in its layout.
    """
    if not spec.fault_tolerance.memory_copy_every_steps:
        return 1
    return _OWN_COPIES if spec.parallelism.world_size == 1 else 2 * _OWN_COPIES


def room_of_a_rank(copies: int, machine: Machine) -> float:
    """Return the bytes of a host's memory that a rank is receives for what blocks keep; none if unknown.

    They are the share of its GPU: the others may be those of other jobs, of whose memory this one's plan knows nothing.

    Args:
        copies: Bytes of a rank's copies of the state.
        machine: What it runs on.
    """
    if machine.node_memory_bytes is None:
        return 0
    return machine.node_memory_bytes // machine.cluster.levels[0].fan_out - copies


GIB = 1 << 30  # as memory is shown to people


def lacking(needed: int, machine: Machine) -> int:
    """Return the bytes that a node is short of; 0 if it has enough or if its memory is unknown."""
    return 0 if machine.node_memory_bytes is None else max(0, needed - machine.node_memory_bytes)


def lack_in_words(needed: int, machine: Machine) -> str:
    """Describe a lack of host memory."""
    has = machine.node_memory_bytes or 0
    lacks = ceil((needed - has) / GIB * 10) / 10
    return f"lacks {lacks:.1f} GiB of host memory: a node has {has / GIB:.1f} GiB for workers"


def on_hosts(spec: JobSpec) -> str:
    """Describe what a job's ranks keep in the host's memory."""
    parts = ["state"] * (spec.parallelism.optimizer_offload > 0) + ["activations"] * spec.parallelism.keeps_on_host
    return " and ".join([*parts, "copies of the state"])


def host_remedies(spec: JobSpec, layout: Layout) -> list[str]:
    """List changes that would reduce a layout's host memory and are not made yet."""
    parallelism, remedies = spec.parallelism, []
    if spec.fault_tolerance.memory_copy_every_steps is not None:
        fewer = "a quarter" if layout.world_size > 1 else "half"
        remedies.append(f"set fault_tolerance.memory_copy_every_steps=null, which leaves {fewer} of the copies")
    if parallelism.optimizer_offload:
        remedies.append(f"lower parallelism.optimizer_offload={parallelism.optimizer_offload:g}")
    if parallelism.keeps_on_host:
        elsewhere = spec.leaves_layouts or len({each.pp for each in spec.layouts()}) > 1  # where lists are not legal
        fewer = "have fewer blocks with parallelism.recompute=offload"
        remedies.append("set parallelism.recompute=auto" if elsewhere else fewer)
    if parallelism.zero_stage == 0 and layout.same_weights > 1:
        remedies.append("set parallelism.zero_stage=1")
    larger = "larger ones, or ones on which Ray starts with a smaller --object-store-memory or with --memory"
    return [*remedies, f"submit or clone it for other nodes: {larger}"]
