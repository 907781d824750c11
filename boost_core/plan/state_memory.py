"""Bytes of a rank's weights, gradients and optimizer state, as ``optim.group`` lays them out.

n weights of a group, padded so that each begins at a multiple of 64 and the group divides among the replicas that share
its state (``FlatLayout``); c bytes per element of the compute type; under ZeRO the bytes are those of one replica's
share (arXiv 1910.02054):

=========  =============================================================================================================
weights    c·n
gradients  4n, and 4n/dp for the reduced part where the state is shared. Under ZeRO stage 2 all sums also exist during
           the first step (in which ``optim.gradients`` learns how often each arrives), so they count
under way  under that stage, the arriving part of up to three buckets being sent; and the buckets themselves if those of
           the step's next micro-batch arrive meanwhile; gloo, on CPUs, sends a copy
optimizer  moments 8n/dp; the master 4n/dp, unless it is the weight itself (fp32, not shared); its rounded copy c·n/dp
           (bf16, shared)
=========  =============================================================================================================

LORO's and Muon's factors are whole on each replica (``ParamKind.custom_update``); Muon's have one moment, 4n. A
checkpoint's copy is in the host's memory, and so is the share of masters and moments set by
``parallelism.optimizer_offload``, except masters that are the weights themselves. In its place there are two buffers
through which it is updated, each for a chunk or for two quantities of the largest factor.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import NamedTuple

from boost_core.architecture import (
    ParamKind,
    WeightSpec,
    block_weights,
    chosen_sharding,
    embedding_weights,
    head_weights,
)
from boost_core.config.job import JobSpec
from boost_core.config.model import ModelConfig
from boost_core.config.parallelism import Layout, ParallelismConfig
from boost_core.config.training import OptimizerConfig
from boost_core.plan.activations import PRECISE, BlockSplit
from boost_core.plan.work import Stage

_BLOCK = 64  # elements; ``optim.group.BLOCK``
STAGED_CHUNK = 1 << 22  # elements of each quantity; 48 MiB of masters and moments
_STAGED_AT_ONCE, _BUFFERS = 2, 2  # quantities of a factor; chunks
_UNDER_WAY = 3 << 25  # elements of the buckets that ``optim.gradients`` has in flight at a time


@dataclass(frozen=True)
class GroupBytes:
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

    @property
    def state(self) -> int:
        """Everything that persists."""
        return self.weights + self.gradients + self.optimizer


def state_bytes(spec: JobSpec, stages: Sequence[Stage], element_bytes: int) -> list[GroupBytes]:
    """Return the bytes of a rank's groups, in the order in which they are created.

    Args:
        spec: The job in its layout.
        stages: The rank's.
        element_bytes: Of the compute type.
    """
    weights = _weights(spec.model, BlockSplit.of(spec.parallelism), spec.optimizer)
    layers = [layer for stage in stages for layer in stage.layers]
    crossed = sum(map(spec.model.crosses_into, layers)) if spec.model.lax else 0
    last = any(stage.last for stage in stages)
    embedding = any(stage.first for stage in stages) or (last and spec.model.tie_embeddings)
    tied = embedding and spec.model.tie_embeddings and spec.parallelism.pipeline_parallel_size > 1
    counts = len(layers) - crossed, crossed, embedding and not tied, tied, last
    layout, zero_stage, rounded = Layout.of(spec.parallelism), spec.parallelism.zero_stage, element_bytes < PRECISE
    split = BlockSplit.of(spec.parallelism)
    ranks, groups = layout.same_weights, []
    for kind, parts in weights:
        padded = sum(number * part.padded for number, part in zip(counts, parts, strict=True))
        elements = sum(number * part.elements for number, part in zip(counts, parts, strict=True))
        if not padded:
            continue
        shared = zero_stage > 0 and not kind.custom_update and ranks > 1
        parts_of_state = ranks if shared else 1
        length = _rounded_up(padded, _BLOCK * parts_of_state)
        own = length // parts_of_state
        gradients = PRECISE * length
        if shared or (zero_stage == 2 and ranks > 1):
            gradients += PRECISE * own
        under_way = 0
        if zero_stage == 2 and ranks > 1:
            sent = PRECISE * min(length, _UNDER_WAY)
            under_way = sent // parts_of_state if shared else 0
            under_way += sent if spec.training.micro_batches(layout.dp) > 1 else 0
            if shared and not spec.resources.gpus_per_worker:
                under_way += sent  # gloo's copy
        offloaded = offloaded_elements(own, spec.parallelism.optimizer_offload)
        quantities = kind.moments + (rounded or shared)
        host = quantities * PRECISE * offloaded
        optimizer = quantities * PRECISE * own - host
        if rounded and shared:
            optimizer += element_bytes * own
        factor = _largest_factor(spec.model, split, spec.optimizer) if offloaded else 0
        staged = staged_elements(kind, offloaded, quantities, factor) if offloaded else 0
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


def starting_peak(groups: Iterable[GroupBytes]) -> int:
    """Return the peak while the groups are created, one after the other."""
    groups = list(groups)
    waiting, created, peak = sum(group.source for group in groups), 0, 0
    for group in groups:
        peak = max(peak, created + waiting + group.temporary + group.weights)
        waiting -= group.source
        created += group.state
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


def staging_bytes(groups: Iterable[GroupBytes]) -> int:
    """Return the bytes of the buffers in which the host's part is updated; all groups share them."""
    return max((group.staged for group in groups), default=0)


def largest_weight(spec: JobSpec, stages: Sequence[Stage]) -> int:
    """Return the elements of the largest weight of a rank's blocks."""
    split = BlockSplit.of(spec.parallelism)
    return max(
        _largest_weight(spec.model, split, spec.optimizer, crossed)
        for crossed in {spec.model.crosses_into(stage.layers[0]) for stage in stages}
    )


class _Elements(NamedTuple):
    """Elements of some weights of one group on a rank.

    Attributes:
        padded: With the padding that makes each begin at a multiple of ``_BLOCK``.
        elements: Without padding.
    """

    padded: int
    elements: int


@lru_cache(1024)  # the ranks of a pipeline ask for the same, and so do layouts that split weights alike
def _weights(
    model: ModelConfig, split: BlockSplit, optimizer: OptimizerConfig
) -> Sequence[tuple[ParamKind, Sequence[_Elements]]]:
    """Return the elements of parts of a model by kind, in the order of groups.

    The parts are a block into which no latents cross, one into which some do, the embedding, an embedding tied to a
    head on another rank, and the head.
    """
    parts = [
        *(_block_weights(model, split, optimizer, crossed) for crossed in (False, True)),
        *(list(_shards(embedding_weights(model), model, split.parallelism, optimizer, tied)) for tied in (False, True)),
        list(_shards(head_weights(model), model, split.parallelism, optimizer)),
    ]
    kinds = sorted(dict.fromkeys(kind for part in parts for kind, _ in part), key=lambda kind: kind.order)
    weights = []
    for kind in kinds:
        sizes = [[size for each, size in part if each == kind] for part in parts]
        weights.append((kind, [_Elements(sum(_rounded_up(size, _BLOCK) for size in of), sum(of)) for of in sizes]))
    return weights


@lru_cache(1024)
def _largest_weight(model: ModelConfig, split: BlockSplit, optimizer: OptimizerConfig, crossed: bool) -> int:
    return max(elements for _, elements in _block_weights(model, split, optimizer, crossed))


@lru_cache(1024)
def _largest_factor(model: ModelConfig, split: BlockSplit, optimizer: OptimizerConfig) -> int:
    """Return the elements of the largest weight that an optimizer updates by its own rule; 0 if there are none."""
    blocks = (_block_weights(model, split, optimizer, crossed) for crossed in (False, True))
    return max((size for block in blocks for kind, size in block if kind.custom_update), default=0)


def _block_weights(
    model: ModelConfig, split: BlockSplit, optimizer: OptimizerConfig, crossed: bool
) -> Sequence[tuple[ParamKind, int]]:
    """Return kind and elements of every weight of a block, into which latents cross or do not."""
    return list(_shards(block_weights(model, crossed), model, split.parallelism, optimizer))


def _shards(
    weights: Mapping[str, WeightSpec], model: ModelConfig, parallelism: ParallelismConfig, optimizer: OptimizerConfig,
    tied: bool = False,
) -> Iterator[tuple[ParamKind, int]]:  # fmt: skip
    """Return kind and elements of a rank's part of each weight."""
    axes = chosen_sharding(model, parallelism).axes
    for weight in weights.values():
        split = axes[weight.role] is not None
        ranks = parallelism.tensor_parallel_size if split else 1
        yield ParamKind.of(weight, split, optimizer, tied), prod(weight.shape) // ranks


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
