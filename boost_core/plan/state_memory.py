"""Bytes of a rank's weights, gradients and optimizer state, as ``optim.group`` lays them out.

n weights of a group, padded so that each begins at a multiple of 64 and the group divides among the replicas that share
its state (``FlatLayout``); c bytes an element of the compute type; ZeRO's share is 1 replica's (arXiv 1910.02054):

=========  =============================================================================================================
weights    c·n
gradients  4n, and 4n/dp for the reduced part where the state is shared. Under ZeRO's second stage the sums of all are
           there in the first step, too (``optim.gradients`` learns in it how often each comes), and so they count
under way  under that stage, of up to three buckets that are being sent the part that arrives; and the buckets
           themselves where those of the step's next micro-batch come meanwhile; gloo, on CPUs, sends a copy
optimizer  moments 8n/dp; the master 4n/dp, unless it is the weight itself (fp32, not shared); its rounded copy c·n/dp
           (bf16, shared)
=========  =============================================================================================================

LORO's and Muon's factors are whole on each replica (``ParamKind.custom_update``); Muon's have one moment, 4n. A
checkpoint's copy is in the host's memory.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

from boost_core.architecture.families import block_weights, embedding_weights, head_weights
from boost_core.architecture.roles import ParamKind, WeightSpec
from boost_core.architecture.sharding import chosen_sharding
from boost_core.config.job import JobSpec
from boost_core.config.layout import Layout
from boost_core.config.model import ModelConfig
from boost_core.config.parallelism import ParallelismConfig
from boost_core.config.training import OptimizerConfig
from boost_core.plan.activations import PRECISE
from boost_core.plan.stages import Stage

_BLOCK = 64  # elements; ``optim.flat.BLOCK``
_UNDER_WAY = 3 << 25  # elements of the buckets that ``optim.gradients`` has under way at a time


@dataclass(frozen=True)
class GroupBytes:
    """One group's.

    Attributes:
        weights: What the model computes with.
        gradients: Their sums.
        optimizer: Masters, moments, and rounded copies, without what is counted as weights.
        temporary: What there is besides while the group is made: everything in fp32, and then its gradients.
        given: The fp32 weights that it is made from, which are let go.
        under_way: Gradients that are being sent, beside those that have come since.
        ahead: By how much those are more than all gradients, before any has come since.
    """

    weights: int
    gradients: int
    optimizer: int
    temporary: int
    given: int
    under_way: int
    ahead: int

    @property
    def state(self) -> int:
        """All that stays."""
        return self.weights + self.gradients + self.optimizer


def state_bytes(spec: JobSpec, stages: Sequence[Stage], element_bytes: int) -> list[GroupBytes]:
    """Those of a rank's groups, in the order in which they are made.

    Args:
        spec: The job in its layout.
        stages: The rank's.
        element_bytes: Of the compute type.
    """
    sizes: dict[ParamKind, Counter[int]] = defaultdict(Counter)
    for kind, elements, count in _weights(spec, stages):
        sizes[kind][elements] += count
    kinds = sorted(sizes, key=lambda kind: kind.order)
    return [_group(spec, kind, sizes[kind], element_bytes) for kind in kinds]


def starting_peak(groups: Iterable[GroupBytes]) -> int:
    """The most that there is at a time while the groups are made, one after the other."""
    groups = list(groups)
    waiting, held, peak = sum(group.given for group in groups), 0, 0
    for group in groups:
        peak = max(peak, held + waiting + group.temporary + group.weights)
        waiting -= group.given
        held += group.state
        peak = max(peak, held + waiting + group.temporary)
    return peak


def largest_weight(spec: JobSpec, stages: Sequence[Stage]) -> int:
    """Elements of the largest weight of a rank's blocks."""
    return max(
        elements
        for crossed in {spec.model.crosses_into(stage.layers[0]) for stage in stages}
        for _, elements in _block_weights(spec.model, spec.parallelism, spec.optimizer, crossed)
    )


def _group(spec: JobSpec, kind: ParamKind, sizes: Mapping[int, int], element_bytes: int) -> GroupBytes:
    """One group's bytes, by how many weights it has of each number of elements."""
    layout, zero_stage = Layout.of(spec.parallelism), spec.parallelism.zero_stage
    ranks = layout.same_weights
    shared = zero_stage > 0 and not kind.custom_update and ranks > 1
    parts = ranks if shared else 1
    length = _rounded_up(sum(_rounded_up(size, _BLOCK) * count for size, count in sizes.items()), _BLOCK * parts)
    own, rounded = length // parts, element_bytes < PRECISE
    gradients = PRECISE * length
    if shared or (zero_stage == 2 and ranks > 1):
        gradients += PRECISE * own
    under_way = 0
    if zero_stage == 2 and ranks > 1:
        sent = PRECISE * min(length, _UNDER_WAY)
        under_way = (sent // parts if shared else 0) + (sent if spec.training.micro_batches(layout.dp) > 1 else 0)
        if shared and not spec.resources.gpus_per_worker:
            under_way += sent  # gloo's copy
    optimizer = kind.moments * PRECISE * own
    if rounded or shared:
        optimizer += PRECISE * own
    if rounded and shared:
        optimizer += element_bytes * own
    # Everything in fp32 is the master itself, or the weights, unless both are something else.
    given = sum(size * count for size, count in sizes.items())
    temporary = PRECISE * length if rounded and shared else 0
    ahead = max(0, under_way - PRECISE * length)
    return GroupBytes(element_bytes * length, gradients, optimizer, temporary, PRECISE * given, under_way, ahead)


def _weights(spec: JobSpec, stages: Sequence[Stage]) -> Iterator[tuple[ParamKind, int, int]]:
    """Kind and elements of the weights that a rank has, and how many there are of each."""
    model, parallelism, optimizer = spec.model, spec.parallelism, spec.optimizer
    for crossed, blocks in Counter(model.crosses_into(layer) for stage in stages for layer in stage.layers).items():
        yield from ((*shard, blocks) for shard in _block_weights(model, parallelism, optimizer, crossed))
    last = any(stage.last for stage in stages)
    if any(stage.first for stage in stages) or (last and model.tie_embeddings):
        tied = model.tie_embeddings and parallelism.pipeline_parallel_size > 1
        yield from ((*shard, 1) for shard in _shards(embedding_weights(model), model, parallelism, optimizer, tied))
    if last:
        yield from ((*shard, 1) for shard in _shards(head_weights(model), model, parallelism, optimizer))


@lru_cache(1024)  # the ranks of a pipeline ask for the same
def _block_weights(
    model: ModelConfig, parallelism: ParallelismConfig, optimizer: OptimizerConfig, crossed: bool
) -> Sequence[tuple[ParamKind, int]]:
    """Kind and elements of every weight of a block into which latents cross, or do not."""
    return list(_shards(block_weights(model, crossed), model, parallelism, optimizer))


def _shards(
    weights: Mapping[str, WeightSpec], model: ModelConfig, parallelism: ParallelismConfig, optimizer: OptimizerConfig,
    tied: bool = False,
) -> Iterator[tuple[ParamKind, int]]:  # fmt: skip
    """Kind and elements of a rank's part of each weight."""
    axes = chosen_sharding(model, parallelism).axes
    for weight in weights.values():
        split = axes[weight.role] is not None
        ranks = parallelism.tensor_parallel_size if split else 1
        yield ParamKind.of(weight, split, optimizer, tied), prod(weight.shape) // ranks


def _rounded_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
