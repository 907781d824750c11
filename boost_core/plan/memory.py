"""Memory of the rank that needs most in a layout.

``state_memory`` has the persistent state, ``activations`` the cost per token, ``in_flight`` the number of micro-batches
in flight. This module adds:

=========  ==========================================================================================================
head       ``parallel.vocabulary``: logits of a chunk of 2²⁶/(V/tp) tokens, twice where there are several chunks; and
           backward the gradients of the hidden vectors, c·T·d, and of the head, in fp32 and rounded or as a summand
pipeline   torch's stages have a buffer for each micro-batch of a step that a neighbour sends, forward and backward; its
           schedules of several stages keep what they have sent until the end of the step
batch      32 bytes per token of a replica's step: ids as the host sends them, 64-bit ids and targets, the loss mask,
           and weights
rotary     24 bytes per position and pair of a head's elements: angles in fp64 and fp32
context    attention on a context parallel rank, which has its share of a micro-batch's tokens: see ``_context``
tasks      as in ``moved_memory``: what moved tasks take in a block, and, as latents, what blocks keep of them
documents  where they are separate, or with a sliding window, if attention takes each by itself, as on a CPU: a second
           copy of each block's output, and the masks of windows, in the compute type and in bytes
sparse     as in ``sparse_memory``: the indexes of all blocks, and the temporaries of one document's head
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
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from itertools import accumulate
from math import ceil, isqrt
from operator import ge
from typing import NamedTuple

from boost_core.config.job import JobSpec
from boost_core.config.model import BLOCK, LAST_QUERIES, RUN_SCORES, SAMPLED_QUERIES, ModelConfig, SparseAttentionConfig
from boost_core.config.parallelism import TRAITS, Layout, ModeRuns, ParallelismConfig, RecomputeMode, chunk_tokens
from boost_core.context.selection import STAGES, attention_layer, head_groups, most_moved, moved_as, sent_between_nodes
from boost_core.hardware import BYTES
from boost_core.plan.activations import PRECISE, BlockSplit, activations
from boost_core.plan.machine import Machine, attends_in_one, attends_on_device, captures_steps, machine_for
from boost_core.plan.state_memory import GroupBytes, largest_weight, staging_bytes, starting_peak, state_bytes
from boost_core.plan.work import Stage, cut, dealt_tokens, rank_tokens

# Micro-batches that a pipeline rank has in flight, by the schedules of ``torch.distributed.pipelining``.
#
# The schedule's warm-up forward passes come first: under 1f1b one per stage from this one to the last; with v = 2
# stages
# per rank, (v − 1)·p and two more (one under zero_bubble) for each rank after this one. Then forward and backward
# passes
# alternate. Under zero_bubble the weight gradients of rank r's first r backward passes are deferred, and from then on
# always those of r passes (arXiv 2104.04473, 2401.10241).

_ROUNDS = 4  # of p micro-batches; by then the pattern repeats

# Micro-batches kept by a rank's first and second stage, and how many of each still owe their weight gradients.
InHand = tuple[tuple[int, int], tuple[int, int]]


def in_hand(parallelism: ParallelismConfig, rank: int, micro_batches: int) -> frozenset[InHand]:
    """Return a rank's in-flight counts at the moments of a step; moments midway between two others are left out.

    Args:
        parallelism: The pipeline.
        rank: The pipeline rank.
        micro_batches: Micro-batches of a step.
    """
    size = parallelism.pipeline_parallel_size
    if parallelism.pipeline_schedule == "1f1b":
        return frozenset({((min(micro_batches, size - rank), 0), (0, 0))})
    late = parallelism.pipeline_schedule == "zero_bubble"
    return _of_two_stages(size, rank, min(micro_batches, _ROUNDS * size), late)


@lru_cache(maxsize=4096)
def _of_two_stages(size: int, rank: int, micro_batches: int, late: bool) -> frozenset[InHand]:
    passes = 2 * micro_batches
    warm_up = min(size + (1 if late else 2) * (size - 1 - rank), passes)
    forward = [(step // size) % 2 for step in range(passes)]
    backward = [1 - stage for stage in forward]
    changes = _changes(forward, backward, warm_up, rank if late else None)
    return frozenset(map(_counts, _corners(list(accumulate(changes, initial=0)))))


# While walking through a step, four counts are digits of one number: kept by either stage, owed by either stage.
_DIGIT_BITS = 24
_KEPT = (1, 1 << _DIGIT_BITS)
_OWED = (1 << 2 * _DIGIT_BITS, 1 << 3 * _DIGIT_BITS)


def _changes(forward: Sequence[int], backward: Sequence[int], warm_up: int, delay: int | None) -> list[int]:
    changes, paid = [], 0
    for step in range(len(forward) + warm_up):
        if step < len(forward):
            changes.append(_KEPT[forward[step]])
        if step < warm_up:
            continue
        done = step - warm_up
        changes.append((0 if delay is None else _OWED[backward[done]]) - _KEPT[backward[done]])
        if delay is not None and done >= delay:
            changes.append(-_OWED[backward[paid]])
            paid += 1
    return changes


def _corners(moments: Sequence[int]) -> set[int]:
    """All moments except those midway between two others: what grows with the counts never peaks there alone."""
    between = {
        moment
        for stride in (1, 2, 3)  # forward, backward and weight gradients take turns
        for before, moment, after in zip(moments, moments[stride:], moments[2 * stride :], strict=False)
        if before + after == 2 * moment and before != moment
    }
    return set(moments) - between


def _counts(moment: int) -> InHand:
    digits = [moment >> number * _DIGIT_BITS & (1 << _DIGIT_BITS) - 1 for number in range(4)]
    return (digits[0], digits[1]), (digits[2], digits[3])


# Upper bounds, in bytes, on the memory of a rank that moved tasks of attention take.
#
# Most tokens that may move at a time are assumed to, both ways. As queries and outputs: three tensors as wide as
# queries
# are sent and received, and log-sum-exps, and what is received is received again in parts; gradients are computed in
# fp32, sent back and received. As latents: shares of latents, sent and received; latents as gathered, in order, with
# gradients and their sum; queries before and after rotation, with gradients, and those of the output; and gradients of
# two weights. Outputs, log-sum-exps and shares of latents are then kept until the backward pass, in each block whose
# attention is not recomputed.

_FP32 = BYTES["fp32"]


def moved_as_latents(job: JobSpec) -> bool:
    """Whether tasks may move, and their queries and outputs travel as latents."""
    if not _move(job):
        return False
    return moved_as(job, machine_for(job.resources, job.training.precision).cluster) == "latents"


def moved_tokens(job: JobSpec) -> list[int]:
    """Most tokens whose attention a rank computes for others, of each part that is dealt by itself."""
    if not _move(job):
        return [0]
    size = chunk_tokens(job.training.sequence_length, job.parallelism.context_parallel_size)
    return [most_moved(tokens // size) * size for tokens in dealt_tokens(job)]


def task_bytes(job: JobSpec, kernels: bool) -> int:
    """What the backward pass of a block takes for them; without kernels, references keep more steps."""
    layer, tokens = attention_layer(job), max(moved_tokens(job))
    query = layer.query_bytes
    of_gradients = query // layer.element_bytes * _FP32
    if not tokens or not moved_as_latents(job):
        return tokens * (3 * layer.asking_bytes(backward=True) + of_gradients + 4 * query)
    share, whole = layer.share_bytes, layer.share_bytes * layer.tensor_parallel_size
    a_token = 6 * share + 6 * whole + (4 if kernels else 6) * query + of_gradients
    weights = 2 * (layer.rank or 0) * query  # in the compute type: a rank of columns as wide as queries
    return tokens * a_token + rank_tokens(job) * (share + whole) + weights


def kept_bytes(job: JobSpec) -> int:
    """What a block keeps of other ranks' tasks until the backward pass, if its attention is not recomputed."""
    return sum(moved_tokens(job)) * attention_layer(job).foreign_bytes if moved_as_latents(job) else 0


def _move(job: JobSpec) -> bool:
    return job.parallelism.context.pool == "tasks" and job.parallelism.context_parallel_size > 1


# Upper bounds, in bytes, on the memory of a rank that sparse attention takes in addition to dense attention.
#
# The index of m tokens: with a budget of p there is room for at most √p·m + 2·64 verticals and √p·m/64 + 1 slashes,
# since
# even the last of a document, which add the fewest pairs, add more the more there are; and for what is always seen.
# Each
# is a 64-bit number. They are kept for each block from its forward pass to its backward pass.
#
# One head of one document at a time: keys, values, queries, the output's gradient and three gradients in fp32; and for
# a
# run of queries its scores, what is computed from them, and the keys and values that it gathers. While lines are
# chosen:
# scores of the last queries and of the sampled ones, and which of these are kept; and what sorting takes per key. All
# context parallel ranks have the whole index and a head's keys of a whole document, but only the queries of their own
# tokens. For the transfer of keys: the source of each key, whether it is sent, and a list of those that are.

_PLACE, _FP32_BYTES = 8, BYTES["fp32"]
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
    return tokens // shortest * heads * _PLACE * sum(_most_lines(attention, 0)) + heads * _PLACE * sum(
        _budgeted(attention, tokens)
    )


def head_bytes(job: JobSpec) -> int:
    """What one head of the longest document takes at a time."""
    attention, length, size = job.training.attention, job.training.sequence_length, job.model.head_size
    if attention is None:
        return 0
    own = -(-length // job.parallelism.context_parallel_size)
    slashes, verticals = _most_lines(attention, length)
    keys = BLOCK * min(slashes, -(-length // BLOCK)) + min(verticals, length)
    run = min(max(RUN_SCORES, BLOCK * keys), keys * max(BLOCK, own // 8))
    blocks = (4 * (length + BLOCK) + 3 * (own + BLOCK)) * size
    product = _FP32_BYTES * (blocks + 4 * verticals * size + 5 * run + 4 * run * size // BLOCK)
    chosen = own * (3 * _FP32_BYTES * LAST_QUERIES + 2 * _FP32_BYTES * size) + length * _SORTED
    return max(product, chosen, length * SAMPLED_QUERIES * _SAMPLED)


def active_bytes(job: JobSpec, key_heads: int) -> int:
    """Which keys of a number of heads context parallel ranks send each other for a micro-batch."""
    training = job.training
    if training.attention is None or job.parallelism.context_parallel_size == 1:
        return 0
    return training.micro_batch_size * training.sequence_length * key_heads * _ACTIVE


def _most_lines(attention: SparseAttentionConfig, tokens: int) -> tuple[int, int]:
    """Slashes and verticals of a document."""
    slashes, verticals = _budgeted(attention, tokens)
    return slashes + attention.near_blocks + 1, verticals + attention.sink + 2 * BLOCK


def _budgeted(attention: SparseAttentionConfig, tokens: int) -> tuple[int, int]:
    verticals = isqrt(int(attention.budget * (tokens + 1) ** 2)) + 1
    return verticals // BLOCK + 1, verticals


_CHUNK_ELEMENTS = 1 << 26  # ``parallel.vocabulary.CHUNK_ELEMENTS``
_BATCH_BYTES = 32
_TOKEN_BYTES = 8
_OWN_COPIES = 2  # for recovery: one stays valid until all ranks have the next
_GRAM_MATRICES, _MOST_PROJECTIONS = 7, 3  # in ``optim.muon`` at a time; with a common input


@dataclass(frozen=True)
class RankMemory:
    """Peak memory of a rank, in bytes.

    Attributes:
        weights: Weights in the compute type.
        gradients: Gradient accumulators, and gradients being sent.
        optimizer: Masters, moments and rounded copies, and the staging buffers for those kept on the host.
        activations: Activations kept for the backward pass, and the temporaries of a block's backward pass.
        logits: Memory of the head and the loss.
        total: Peak at any moment; not all of the above exists at once.
        host: Masters, moments and what blocks keep in the host's memory, not in ``total``.
        copies: Copies of masters and moments in the host's memory, not in ``total``: one for checkpoints; with copies
            for recovery, the rank's own of two steps and those of another rank.
    """

    weights: int
    gradients: int
    optimizer: int
    activations: int
    logits: int
    total: int
    host: int
    copies: int


def rank_memory(spec: JobSpec, layout: Layout) -> RankMemory:
    """Return the memory of the rank that needs most in a layout; for host memory, the most of any rank.

    Args:
        spec: The job.
        layout: One of ``spec.layouts()``.
    """
    job = spec.at(layout)
    by_stage = isinstance(job.parallelism.recompute, tuple)
    ranks = pipeline_ranks(job, layout, range(layout.pp)) if by_stage else _fullest(job, layout)
    return _most_of([rank.memory() for rank in ranks])


def memory_by_mode(spec: JobSpec, layout: Layout, modes: Iterable[RecomputeMode]) -> dict[RecomputeMode, RankMemory]:
    """Return the same with all blocks in each of several modes, which takes less time than one by one."""
    ranks = _fullest(spec.at(layout), layout)
    return {mode: _most_of([rank.in_one_mode(mode).memory() for rank in ranks]) for mode in modes}


def _fullest(job: JobSpec, layout: Layout) -> "list[PipelineRank]":
    """The ranks that may need most if all blocks have one mode."""
    return pipeline_ranks(job, layout, _extremes(job.model, _stages(job), layout.pp))


def _most_of(found: Sequence[RankMemory]) -> RankMemory:
    fullest = max(found, key=lambda memory: memory.total)
    return replace(fullest, host=max(each.host for each in found), copies=max(each.copies for each in found))


def pipeline_rank_memory(spec: JobSpec, layout: Layout, rank: int) -> RankMemory:
    """Return the memory of one pipeline rank.

    Args:
        spec: The job.
        layout: One of ``spec.layouts()``.
        rank: The pipeline rank, from 0.
    """
    (place,) = pipeline_ranks(spec.at(layout), layout, [rank])
    return place.memory()


def pipeline_ranks(job: JobSpec, layout: Layout, ranks: Sequence[int]) -> "list[PipelineRank]":
    """Return some pipeline ranks of a job at its layout."""
    stages = _stages(job)
    return [PipelineRank(job, rank, stages[rank :: layout.pp]) for rank in ranks]


def _stages(job: JobSpec) -> Sequence[Stage]:
    return cut(job.model, job.parallelism, job.training.sequence_length)


@lru_cache(1024)  # the same for each number of replicas
def _extremes(model: ModelConfig, stages: Sequence[Stage], pipeline: int) -> Sequence[int]:
    """Return the pipeline ranks that may need most.

    From one rank to the next, fewer micro-batches are in flight, and under zero_bubble more gradients are owed, each by
    the same number. So no rank needs more than both an earlier and a later rank whose loads are at least as large in
    everything that a stage's memory grows with.
    """
    loads = [
        tuple(number for stage in stages[rank::pipeline] for number in _load(model, stage)) for rank in range(pipeline)
    ]
    first: dict[tuple[int, ...], int] = {}
    last: dict[tuple[int, ...], int] = {}
    for rank, load in enumerate(loads):
        first.setdefault(load, rank)
        last[load] = rank

    def needs_less(rank: int) -> bool:
        heavier = [load for load in first if load != loads[rank] and all(map(ge, load, loads[rank]))]
        earlier = any(first[load] < rank for load in heavier) or first[loads[rank]] < rank
        return earlier and (any(last[load] > rank for load in heavier) or last[loads[rank]] > rank)

    return [rank for rank in sorted({*first.values(), *last.values()}) if not needs_less(rank)]


def _load(model: ModelConfig, stage: Stage) -> tuple[int, ...]:
    """What a stage's memory grows with; stages at an end of the model only compare with each other."""
    crosses = model.crosses_into
    crossed = sum(map(crosses, stage.layers))
    ends = crosses(stage.layers.start), crosses(stage.layers.stop)
    return len(stage.layers), crossed, *ends, stage.first, -stage.first, stage.last, -stage.last


class _Fixed(NamedTuple):
    """Bytes of a rank that do not depend on what its blocks keep.

    Attributes:
        weights: As in ``RankMemory``.
        gradients: Gradient accumulators.
        optimizer: As in ``RankMemory``.
        under_way: Gradients being sent during the backward pass.
        ahead: What is sent ahead of it.
        held: Buffers, the batch and rotary angles.
        beside_block: As ``_beside_block`` returns it.
        embedding: The embedding's gradient.
        head: Memory of the head and the loss.
        head_norm: Backward pass through the final norm.
        update: What LORO's or Muon's update takes.
        starting: Peak at the start.
        host: State in the host's memory.
        copies: As in ``RankMemory``.
    """

    weights: int
    gradients: int
    optimizer: int
    under_way: int
    ahead: int
    held: int
    beside_block: int
    embedding: int
    head: int
    head_norm: int
    update: int
    starting: int
    host: int
    copies: int


class PipelineRank:
    """One pipeline rank.

    Args:
        job: The job at its layout.
        rank: The pipeline rank.
        stages: Its stages.
    """

    def __init__(self, job: JobSpec, rank: int, stages: Sequence[Stage]) -> None:
        self._job, self._rank, self._stages = job, rank, stages
        self._runs = tuple(job.parallelism.modes(stage.index, len(stage.layers)) for stage in stages)
        self._element = BYTES[job.training.precision]
        split = BlockSplit.of(job.parallelism)
        self._each = activations(job.model, split, self._element, job.resources.gpus_per_worker > 0)
        self._tokens = rank_tokens(job)
        self._micro_batches = job.training.micro_batches(job.parallelism.data_parallel_size)

    @property
    def sizes(self) -> Sequence[int]:
        """Number of blocks of each stage; the first has more micro-batches in flight."""
        return [len(stage.layers) for stage in self._stages]

    @property
    def ends(self) -> bool:
        """Whether it has the model's last stage."""
        return self._stages[-1].last

    def keeping(self, modes: Sequence[ModeRuns]) -> "PipelineRank":
        """Return the rank with its stages' blocks in these modes; what does not depend on them is computed once."""
        _ = self._fixed, self._moments, self._owed_by_stages, self._stage_bytes, self._may_capture
        other = copy(self)
        other._runs = tuple(modes)
        return other

    def in_one_mode(self, mode: RecomputeMode) -> "PipelineRank":
        """Return the rank with all blocks in one mode."""
        return self.keeping([((mode, size),) for size in self.sizes])

    def memory(self) -> RankMemory:
        """Return the rank's peak memory."""
        fixed = self._fixed
        state = fixed.weights + fixed.gradients + fixed.optimizer
        block = self._tokens * max(map(self._blocks_backward, self._stages, self._runs))
        kept, backward = self._kept(), max(block + fixed.beside_block, fixed.embedding, fixed.head_norm)
        step = state + kept + max(backward + fixed.under_way, fixed.head + fixed.ahead)
        if self._captures:
            step += max(fixed.update, self._evaluation())
        total = max(step, fixed.starting, state + fixed.update)
        return RankMemory(
            fixed.weights, fixed.gradients + fixed.under_way, fixed.optimizer, kept + backward, fixed.head, total,
            fixed.host + self._on_host(), fixed.copies,
        )  # fmt: skip

    @property
    def _captures(self) -> bool:
        """Whether steps are captured; the only rank of a pipeline has all modes."""
        return self._may_capture and not _on_host(self._runs)

    @cached_property
    def _may_capture(self) -> bool:
        return captures_steps(self._job)

    @cached_property
    def _fixed(self) -> "_Fixed":
        groups = self._state
        weights = sum(each.weights for each in groups)
        return _Fixed(
            weights=weights,
            gradients=sum(each.gradients for each in groups),
            optimizer=sum(each.optimizer for each in groups) + staging_bytes(groups),
            under_way=sum(each.under_way for each in groups),
            ahead=sum(each.ahead for each in groups),
            held=self._buffers() + self._batch() + self._rotary(),
            beside_block=self._beside_block(),
            embedding=self._embedding_gradient(),
            head=self._head(),
            head_norm=self._head_norm(),
            update=self._update(weights // self._element),
            starting=starting_peak(groups) + self._rotary(),
            host=sum(each.host for each in groups),
            copies=self._copies(),
        )

    def _copies(self) -> int:
        number = 1
        if self._job.fault_tolerance.memory_copy_every_steps:
            number = _OWN_COPIES if self._job.parallelism.world_size == 1 else 2 * _OWN_COPIES
        return number * sum(each.copy for each in self._state)

    @cached_property
    def _largest_weight(self) -> int:
        return largest_weight(self._job, self._stages)

    @cached_property
    def _state(self) -> Sequence[GroupBytes]:
        return state_bytes(self._job, self._stages, self._element)

    def _evaluation(self) -> int:
        """Peak of a forward pass: a block's activations, and the head's."""
        crossed = given = self._job.model.crosses_into(self._stages[-1].layers[-1])
        block = self._tokens * (self._each.block(crossed, given, "none") + self._each.residual * self._element)
        return block + self._by_itself(self._runs[0]) + self._tokens * self._each.head() + self._logits()

    def _kept(self) -> int:
        """Activations once the last of the micro-batches in flight has gone through."""
        of_stages = list(map(self._of_stage, self._stages, self._runs, self._stage_bytes))
        most = max(_bytes(moment, of_stages, self._owed_by_stages) for moment in self._moments)
        return most + max(map(self._leaving, self._stages, self._runs)) + self._fixed.held

    def _on_host(self) -> int:
        """Bytes on the host for all micro-batches in flight: ``parallel.host_memory``."""
        if not _on_host(self._runs):
            return 0
        stages = zip(self._stages, self._runs, strict=True)
        of_stages = [self._tokens * self._of_blocks(stage, modes, on_host=True) for stage, modes in stages]
        return max(_bytes(moment, of_stages, (0,) * len(of_stages)) for moment in self._moments)

    def _leaving(self, stage: Stage, modes: ModeRuns) -> int:
        """Bytes in transit to the host at a time: those of a stage's last block that offloads."""
        begin, a_token = stage.layers.start, 0
        for mode, count in modes:
            if TRAITS[mode].on_host:
                last = begin + count - 1
                crossed = given = self._job.model.crosses_into(last)
                a_token = self._each.on_host(crossed, given, mode)
                a_token -= self._begins(stage) if last == stage.layers.start else 0
            begin += count
        return self._tokens * a_token

    def _begins(self, stage: Stage) -> int:
        """Bytes per token that a stage keeps of its input, whatever its first block keeps."""
        return self._each.stream_start() if stage.first else self._each.residual * self._element

    @cached_property
    def _owed_by_stages(self) -> list[int]:
        late = self._job.parallelism.pipeline_schedule == "zero_bubble"
        return [self._owed(stage) if late else 0 for stage in self._stages]

    @cached_property
    def _moments(self) -> frozenset[InHand]:
        if self._job.parallelism.pipeline_parallel_size == 1:
            return frozenset({((1, 0), (0, 0))})
        return in_hand(self._job.parallelism, self._rank, self._micro_batches)

    def _of_stage(self, stage: Stage, modes: ModeRuns, besides: int) -> int:
        """Bytes that a stage keeps of a micro-batch, without the head; ``besides`` its blocks."""
        a_token = self._of_blocks(stage, modes)
        if TRAITS[modes[0][0]].on_host:
            a_token += self._begins(stage)
        keep_attention = sum(count for mode, count in modes if TRAITS[mode].again != "all")
        return a_token * self._tokens + self._by_itself(modes) + keep_attention * self._foreign_tasks + besides

    @cached_property
    def _stage_bytes(self) -> list[int]:
        """Bytes that each stage keeps of a micro-batch besides its blocks."""
        return list(map(self._besides_blocks, self._stages))

    def _besides_blocks(self, stage: Stage) -> int:
        each = self._each
        a_token = each.embedding() if stage.first else -each.residual * self._element  # its input is in a buffer
        if not stage.last and self._job.parallelism.pipeline_schedule == "1f1b":  # otherwise among what was sent
            a_token += each.residual * self._element + self._crossing(stage.layers.stop)
        return a_token * self._tokens + len(stage.layers) * index_bytes(self._job, self._heads)

    @cached_property
    def _foreign_tasks(self) -> int:
        return kept_bytes(self._job)

    def _crossing(self, layer: int) -> int:
        """Bytes per token that LaX sends to the stage that begins with block ``layer``."""
        return self._each.carried if self._job.model.crosses_into(layer) else 0

    def _by_itself(self, modes: ModeRuns) -> int:
        """Extra bytes kept by attention that takes one document or one window at a time."""
        job = self._job
        some_sparsely = job.training.attention is not None and job.data.documents_apart
        if not some_sparsely and (
            attends_in_one(job)
            or job.parallelism.context_parallel_size > 1
            or (self._each.kernels and attends_on_device(job))
        ):
            return 0
        window, length = job.model.sliding_window, job.training.sequence_length
        seen = 0 if window is None or window >= length else 2 * window
        at_once = max(1, sum(count for mode, count in modes if mode == "none"))
        return self._tokens * at_once * (self._each.query * self._element + seen * (self._element + 1))

    def _owed(self, stage: Stage) -> int:
        """Bytes per micro-batch for deferred weight gradients: inputs and output gradients of all products.

        About what a block keeps without recomputation.
        """
        return self._tokens * self._of_blocks(stage, (("none", len(stage.layers)),))

    def _of_blocks(self, stage: Stage, modes: ModeRuns, on_host: bool = False) -> int:
        """Bytes per token that a stage's blocks keep, on the device or on the host; many blocks are alike."""
        alike = _alike(self._job.model, stage.layers, modes)
        of_block = self._each.on_host if on_host else self._each.block
        return sum(of_block(*block) * count for block, count in alike)

    def _of_run(self, layers: range, mode: RecomputeMode) -> int:
        alike = _alike(self._job.model, layers, ((mode, len(layers)),))
        return sum(self._each.block(*block) * count for block, count in alike)

    def _buffers(self) -> int:
        """Buffers of torch's pipeline stages for what neighbours send."""
        width = self._each.residual * self._element
        a_token = 0
        for stage in self._stages:
            a_token += 0 if stage.first else width + self._crossing(stage.layers.start)
            a_token += 0 if stage.last else width + self._crossing(stage.layers.stop)
        # The schedules of several stages wait for what they have sent at the end of a step, and keep it until then.
        sent_too = 1 if self._job.parallelism.pipeline_schedule == "1f1b" else 2
        return a_token * self._tokens * self._micro_batches * sent_too

    def _batch(self) -> int:
        training = self._job.training  # context parallel ranks read all of a sequence
        sequences = training.micro_batch_size * self._micro_batches  # each with the token that follows it
        return (_BATCH_BYTES * training.sequence_length + _TOKEN_BYTES) * sequences

    def _rotary(self) -> int:
        training, model = self._job.training, self._job.model
        # Context parallel ranks have separate angles for their tokens, and for the keys and queries that they compute
        # from latents.
        ranks = self._job.parallelism.context_parallel_size
        own = 0 if ranks == 1 else self._tokens * (ranks if self._sends_latents else 1)
        own += sum(moved_tokens(self._job)) if moved_as_latents(self._job) else 0
        if self._job.parallelism.pipeline_parallel_size > 1 and self._job.data.documents_apart:
            own *= self._micro_batches  # each is then dealt differently, and all at once
        return 24 * (training.sequence_length + own) * model.head_size // 2

    def _context(self) -> int:
        """Extra bytes of attention's backward pass where other ranks' keys arrive in stages.

        Gradients of queries and of own keys in fp32. Six times a stage's keys: as they arrived and in order; the next
        stage's as they arrive, and what is sent for it; gradients going back and coming back; and twice gradients in
        fp32. Halves of a split micro-batch receive all stages at once, and send what is needed for it, while the other
        half's last gradients go back and come back. This is sized for a single document; separate documents need less.
        On a GPU a call of flash attention has its own keys and their gradients. With sparse attention also the lists of
        keys sent and received. Where latents may be sent: the latents, with the gradients of a stage's, and of the
        weights that keys are computed with. Where tasks may move, as in ``moved_memory``.
        """
        ranks = self._job.parallelism.context_parallel_size
        if ranks == 1:
            return 0
        keys, element, stage = 2 * self._each.key_value, self._element, self._stage_tokens
        own = self._tokens * (PRECISE + element) * (self._each.query + keys)
        in_calls = max(self._dealt_tokens, stage) * 2 * keys * element if self._each.kernels else 0
        active = active_bytes(self._job, keys // (2 * self._job.model.head_size))
        of_keys = stage * keys * (self._stage_buffers * element + 2 * PRECISE)
        return own + of_keys + in_calls + active + self._key_latents() + task_bytes(self._job, self._each.kernels)

    @property
    def _dealt_tokens(self) -> int:
        """Most tokens that a context parallel rank is dealt at a time."""
        return max(dealt_tokens(self._job))

    @property
    def _stage_buffers(self) -> int:
        """Buffers of a stage's size in the compute type; see ``_context``."""
        return 2 * STAGES + 5 if self._job.parallelism.split_micro_batch else 6

    @cached_property
    def _stage_tokens(self) -> int:
        """Most tokens whose keys arrive in a stage; with sparse attention, a group of heads' keys of all tokens."""
        ranks = self._job.parallelism.context_parallel_size
        chunk = chunk_tokens(self._job.training.sequence_length, ranks)
        of_all = -(-self._dealt_tokens * (ranks - 1) // (chunk * STAGES)) * chunk
        if self._job.training.attention is None:
            return of_all
        key_heads = self._each.key_value // self._job.model.head_size
        together = max(map(len, head_groups(key_heads)))
        return max(of_all, -(-self._tokens * ranks * together // key_heads))

    @cached_property
    def _sends_latents(self) -> bool:
        """Whether context parallel ranks may send latents; which of them share a node is only known at run time."""
        job = self._job
        if job.parallelism.context_parallel_size == 1:
            return False
        cluster = machine_for(job.resources, job.training.precision).cluster
        return sent_between_nodes(job, cluster) == "latents"

    def _key_latents(self) -> int:
        job = self._job
        if not self._sends_latents:
            return 0
        rank, tensor = job.model.bottleneck_rank, job.parallelism.tensor_parallel_size
        stage, keys = self._stage_tokens, 2 * self._each.key_value
        shares = (
            self._stage_buffers * stage * 2 * rank // tensor
        )  # arriving now and next, sent, and gradients going and coming back
        # Of a stage: latents as gathered, in order, and their gradients twice; keys before rotation, in fp32 on a CPU,
        # and gradients.
        whole = 4 * 2 * rank + (3 if self._each.kernels else 5) * keys
        own = self._tokens * 2 * rank * (1 + PRECISE // self._element)
        return self._element * (shares + stage * whole + own) + 2 * PRECISE * 2 * rank * self._each.key_value

    def _beside_block(self) -> int:
        """Bytes of a block's backward pass besides activations: of context parallelism, and a weight's gradient."""
        largest, besides = self._largest_weight, self._context() + head_bytes(self._job)
        if self._job.training.precision == "fp8" and self._each.kernels:  # 8-bit operands, for one product at a time
            besides += self._tokens * self._each.fp8_operand() + largest
        return besides + (2 * self._element + PRECISE) * largest

    def _embedding_gradient(self) -> int:
        return (self._element + self._copied()) * self._table() if self._stages[0].first else 0

    @property
    def _heads(self) -> int:
        """Number of query heads on this rank."""
        return self._each.query // self._job.model.head_size

    def _blocks_backward(self, stage: Stage, modes: ModeRuns) -> int:
        """Bytes per token in the fullest of a stage's blocks, less what later blocks have already freed."""
        gone, most, end = 0, 0, stage.layers.stop
        # zero_bubble keeps it until the weight gradients are computed.
        lets_go = self._job.parallelism.pipeline_schedule != "zero_bubble"
        beside = self._fetches_beside(stage, modes)
        for mode, count in reversed(modes):
            crossed = given = self._job.model.crosses_into(end - 1)
            block = self._each.block_backward(crossed, given, mode)
            block += beside * self._each.segment_fetched(crossed, mode)
            most = max(most, block - gone)
            begin = end - count
            if lets_go and begin > stage.layers.start:
                gone += self._of_run(range(begin, end), mode)
            end = begin
        return most

    def _fetches_beside(self, stage: Stage, modes: ModeRuns) -> bool:
        """Whether a backward pass has another segment on the device, beside the blocks fetched ahead and in transit.

        Not where it follows its own forward pass: then the block in transit is the one that it begins with.
        """
        parallelism = self._job.parallelism
        if parallelism.stages == 1 or (stage.last and parallelism.pipeline_schedule == "1f1b"):
            return False
        return sum(count for mode, count in modes if TRAITS[mode].slices) > self._each.blocks_ahead

    def _head(self) -> int:
        if not self._stages[-1].last:
            return 0
        element = self._element
        tied = element if self._job.model.tie_embeddings and self._each.sharding.residual else 0
        gradients = (PRECISE + max(element + tied, element + self._copied())) * self._table()
        return self._tokens * self._each.head() + self._logits() + gradients

    def _logits(self) -> int:
        """A chunk's logits and the hidden vectors that they are computed from, with both gradients."""
        job, element = self._job, self._element
        vocabulary = job.model.vocab_size // job.parallelism.tensor_parallel_size
        chunk = min(self._tokens, max(1, _CHUNK_ELEMENTS // vocabulary))
        logits = chunk * vocabulary * element * (1 if chunk == self._tokens else 2)
        if not self._each.kernels:
            # Their gradient is not computed in place, and bf16 logits are copied.
            logits += chunk * vocabulary * PRECISE * (1 if element == PRECISE else 2)
        hidden = (self._tokens + chunk) * job.model.hidden_size * element
        return logits + hidden

    def _head_norm(self) -> int:
        return self._tokens * self._each.head_norm_backward() if self._stages[-1].last else 0

    def _copied(self) -> int:
        """Bytes per element of the copy that a CPU makes of a bf16 gradient to add it to an fp32 sum."""
        return PRECISE if not self._each.kernels and self._element < PRECISE else 0

    def _table(self) -> int:
        return self._job.model.vocab_size * self._job.model.hidden_size // self._job.parallelism.tensor_parallel_size

    def _update(self, weights: int) -> int:
        """LORO holds all factors' directions at once; Muon one factor's and its Gram matrices, also in float64."""
        if self._job.optimizer.loro is not None:
            return PRECISE * weights
        if self._job.optimizer.muon is None:
            return 0
        grams = _GRAM_MATRICES * self._job.model.bottleneck_rank**2 * _MOST_PROJECTIONS
        return 5 * PRECISE * self._largest_weight + 2 * PRECISE * grams


def _alike(
    model: ModelConfig, layers: range, modes: ModeRuns
) -> Sequence[tuple[tuple[bool, bool, RecomputeMode], int]]:
    """Count a stage's blocks by whether latents cross into them, whether they receive any, and mode."""
    if model.lax is None:
        return [((False, False, mode), count) for mode, count in modes if count]
    return _alike_with_lax(model, layers, modes)


@lru_cache(4096)
def _alike_with_lax(
    model: ModelConfig, layers: range, modes: ModeRuns
) -> Sequence[tuple[tuple[bool, bool, RecomputeMode], int]]:
    counts: Counter[tuple[bool, bool, RecomputeMode]] = Counter()
    begin = layers.start
    for mode, count in modes:
        run = range(begin, begin + count)
        crossed = sum(map(model.crosses_into, run))
        # The first of a stage only receives latents that cross into it.
        first = layers.start in run and not model.crosses_into(layers.start)
        given = count - crossed - first
        counts.update({(True, True, mode): crossed, (False, True, mode): given})
        counts[False, False, mode] += count - crossed - given
        begin += count
    return tuple(entry for entry in counts.items() if entry[1])


def _on_host(runs: Iterable[ModeRuns]) -> bool:
    return any(TRAITS[mode].on_host for modes in runs for mode, _ in modes)


def _bytes(moment: InHand, kept: Sequence[int], owed: Sequence[int]) -> int:
    (first, second), (owes_first, owes_second) = moment
    of_first = first * kept[0] + owes_first * owed[0]
    return of_first if len(kept) == 1 else of_first + second * kept[1] + owes_second * owed[1]


# Host memory that a node's ranks need, and whether nodes have it.
#
# It holds the masters and moments that ``parallelism.optimizer_offload`` puts there, what blocks with ``recompute:
# offload`` keep for their backward pass, and copies of the state for checkpoints and recovery. Other memory of workers
# and their data is not counted. The need is compared with the memory that Ray reserves for workers on a node, which is
# less than the node has.


def node_bytes(memory: RankMemory, layout: Layout, machine: Machine) -> int:
    """Return the most host memory that a node's ranks need.

    Args:
        memory: Memory of one rank.
        layout: The gang's layout.
        machine: What it runs on.
    """
    return _ranks_of_a_node(layout, machine) * (memory.host + memory.copies)


def room_of_a_rank(copies: int, machine: Machine) -> float:
    """Return the bytes of a host's memory that a rank is given for what blocks keep; none if unknown.

    They are the share of its GPU: the others may be those of other jobs, of whose memory this one's plan knows nothing.

    Args:
        copies: Bytes of a rank's copies of the state.
        machine: What it runs on.
    """
    if machine.node_memory_bytes is None:
        return 0
    return machine.node_memory_bytes // machine.cluster.levels[0].fan_out - copies


def _ranks_of_a_node(layout: Layout, machine: Machine) -> int:
    return min(layout.world_size, machine.cluster.levels[0].fan_out)


def lacking(needed: int, machine: Machine) -> int:
    """Return the bytes that a node is short of; 0 if it has enough or if its memory is unknown."""
    return 0 if machine.node_memory_bytes is None else max(0, needed - machine.node_memory_bytes)


def lack_in_words(needed: int, machine: Machine) -> str:
    """Describe a lack of host memory."""
    has = machine.node_memory_bytes or 0
    lacks = ceil((needed - has) / 1e8) / 10
    return f"lacks {lacks:.1f} GB of host memory: a node has {has / 1e9:.1f} GB for workers"


def host_contents(spec: JobSpec) -> str:
    """Describe what a job's ranks keep in the host's memory."""
    parts = ["state"] * (spec.parallelism.optimizer_offload > 0) + ["activations"] * spec.parallelism.keeps_on_host
    return " and ".join([*parts, "copies of the state"])


def host_remedies(spec: JobSpec, layout: Layout) -> list[str]:
    """List changes that would reduce a layout's host memory and are not made yet."""
    parallelism, found = spec.parallelism, []
    if spec.fault_tolerance.memory_copy_every_steps is not None:
        fewer = "a quarter" if layout.world_size > 1 else "half"
        found.append(f"set fault_tolerance.memory_copy_every_steps=null, which leaves {fewer} of the copies")
    if parallelism.optimizer_offload:
        found.append(f"lower parallelism.optimizer_offload={parallelism.optimizer_offload:g}")
    if parallelism.keeps_on_host:
        elsewhere = spec.leaves_layouts or len({each.pp for each in spec.layouts()}) > 1  # where lists are not legal
        found.append(
            "set parallelism.recompute=auto" if elsewhere else "have fewer blocks with parallelism.recompute=offload"
        )
    if parallelism.zero_stage == 0 and layout.same_weights > 1:
        found.append("set parallelism.zero_stage=1")
    larger = "larger ones, or ones on which Ray starts with a smaller --object-store-memory or with --memory"
    return [*found, f"submit or clone it for other nodes: {larger}"]
