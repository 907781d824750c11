"""How much memory a job needs on a rank in a layout: on the one that needs most.

``state_memory`` has what is there all the time, ``activations`` what a token costs, ``in_flight`` how many
micro-batches are there at once. On top of those here:

=========  ==========================================================================================================
head       ``parallel.vocabulary``: logits of a chunk of 2²⁶/(V/tp) tokens, twice where there are several chunks; and
           backward the gradients of the hidden vectors, c·T·d, and of the head, in fp32 and rounded or as a summand
pipeline   torch's stages have a buffer for each micro-batch of a step that a neighbour sends, forward and backward; its
           schedules of several stages keep what they have sent until the step's end
batch      32 bytes a token of a replica's step: ids as the host sends them, ids and targets in 64 bits, what counts,
           and weights
rotary     24 bytes for each position and pair of a head's elements: angles in fp64 and fp32
context    what ``_context`` says of a context parallel rank, which has its part of a micro-batch's tokens
documents  where they are apart, or a window slides, and attention takes each by itself, as on a CPU: in each block its
           output once more, and the masks of windows, of the compute type and in bytes
sparse     what ``sparse_memory`` says: the indexes of all blocks, and what one document's head takes at a time
graph      what a captured step takes is its own between steps, too: LORO's or Muon's update and evaluation come on top
=========  ==========================================================================================================

A step is fullest either as the loss's backward pass begins, with all activations and the head's, or after that in the
final norm or the block before it, with gradients of activations and what is computed again. ``total`` is the fuller of
the two, or what the start or LORO's or Muon's update takes if that is more; so it can be less than the sum of its
parts. CUDA's context, what the driver keeps of a graph's launches, NCCL's buffers, the scratch memory of a CPU's matrix
products and the allocator's gaps are not in it.
``tests/numerics/test_memory_plan.py`` compares with what torch's allocator gives out.
"""

from collections import Counter
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from operator import ge

from boost_core.config.chunks import chunk_tokens
from boost_core.config.job import JobSpec
from boost_core.config.layout import Layout
from boost_core.config.model import ModelConfig
from boost_core.config.parallelism import ModeRuns, RecomputeMode
from boost_core.hardware import BYTES
from boost_core.plan.activations import PRECISE, BlockSplit, activations
from boost_core.plan.context.between import sent_between_nodes
from boost_core.plan.context.dealt import STAGES, head_groups
from boost_core.plan.in_flight import InHand, in_hand
from boost_core.plan.machine import attends_in_one, attends_on_device, captures_steps, machine_for
from boost_core.plan.sparse_memory import active_bytes, head_bytes, index_bytes
from boost_core.plan.stages import Stage, cut
from boost_core.plan.state_memory import GroupBytes, largest_weight, staging_bytes, starting_peak, state_bytes
from boost_core.plan.work import rank_tokens

_CHUNK_ELEMENTS = 1 << 26  # ``parallel.vocabulary.CHUNK_ELEMENTS``
_BATCH_BYTES = 32
_TOKEN_BYTES = 8
_OWN_COPIES = 2  # for recovery: one stays as it is until all ranks have the next
_GRAM_MATRICES, _MOST_PROJECTIONS = 7, 3  # of ``optim.muon`` at a time; of one input


@dataclass(frozen=True)
class RankMemory:
    """The most that a rank holds, in bytes.

    Attributes:
        weights: What the model computes with.
        gradients: Sums of gradients, and those that are being sent.
        optimizer: Masters, moments and rounded copies; and the buffers for what the host has of them.
        activations: What is kept for the backward pass, and what that takes in a block.
        logits: What head and loss take.
        total: The most at any moment; not all of the above is there at once.
        host: Masters and moments in the host's memory, which are not in ``total``, as the copies are not.
        copies: Copies of masters and moments in the host's memory: one for checkpoints; where there are copies for
            recovery, of every two steps its own, and those of another rank.
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
    """What the rank that needs most of a gang of one layout needs; of the host's memory, what any needs there.

    Args:
        spec: The job.
        layout: One of ``spec.layouts()``.
    """
    job = spec.at(layout)
    by_stage = isinstance(job.parallelism.recompute, tuple)
    ranks = range(layout.pp) if by_stage else _extremes(job.model, _stages(job), layout.pp)
    found = [rank.memory() for rank in pipeline_ranks(job, layout, ranks)]
    fullest = max(found, key=lambda memory: memory.total)
    return replace(fullest, host=max(each.host for each in found), copies=max(each.copies for each in found))


def pipeline_rank_memory(spec: JobSpec, layout: Layout, rank: int) -> RankMemory:
    """What the ranks of one place in the pipeline need.

    Args:
        spec: The job.
        layout: One of ``spec.layouts()``.
        rank: The place, from 0.
    """
    (place,) = pipeline_ranks(spec.at(layout), layout, [rank])
    return place.memory()


def pipeline_ranks(job: JobSpec, layout: Layout, ranks: Sequence[int]) -> "list[PipelineRank]":
    """Some places in the pipeline of a job at its layout."""
    stages = _stages(job)
    return [PipelineRank(job, rank, stages[rank :: layout.pp]) for rank in ranks]


def _stages(job: JobSpec) -> Sequence[Stage]:
    return cut(job.model, job.parallelism, job.training.sequence_length)


@lru_cache(1024)  # a scheduler asks the same for each number of replicas
def _extremes(model: ModelConfig, stages: Sequence[Stage], pipeline: int) -> Sequence[int]:
    """The pipeline ranks that may need most.

    From one rank to the next, fewer micro-batches are in flight, and under zero_bubble more gradients are owed; each by
    the same number. So none needs more than both of two others, one before and one after it, that have as much of all
    that a stage's memory grows with.
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
    """What a stage's memory grows with; and stages at one end of the model compare with none but such."""
    crosses = model.crosses_into
    crossed = sum(map(crosses, stage.layers))
    ends = crosses(stage.layers.start), crosses(stage.layers.stop)
    return len(stage.layers), crossed, *ends, stage.first, -stage.first, stage.last, -stage.last


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
        """Blocks of each of its stages, of which the first has more micro-batches in hand."""
        return [len(stage.layers) for stage in self._stages]

    def keeping(self, modes: Sequence[ModeRuns]) -> "PipelineRank":
        """The same rank whose stages' blocks keep this; what does not depend on it is worked out once for all."""
        _ = self._state, self._starting, self._moments, self._owed_by_stages, self._largest_weight
        other = copy(self)
        other._runs = tuple(modes)
        return other

    def memory(self) -> RankMemory:
        """What it holds at most."""
        groups = self._state
        weights, gradients, optimizer = (
            sum(sizes)
            for sizes in zip(*((each.weights, each.gradients, each.optimizer) for each in groups), strict=True)
        )
        optimizer += staging_bytes(groups)
        kept, backward, head = self._kept(), max(self._backward(), self._head_norm()), self._head()
        under_way, ahead = sum(each.under_way for each in groups), sum(each.ahead for each in groups)
        step = weights + gradients + optimizer + kept + max(backward + under_way, head + ahead)
        update = self._update(weights // self._element)
        if captures_steps(self._job):
            step += max(update, self._evaluation())
        update += weights + gradients + optimizer
        total = max(step, self._starting, update)
        host = sum(each.host for each in groups)
        return RankMemory(weights, gradients + under_way, optimizer, kept + backward, head, total, host, self._copies())

    def _copies(self) -> int:
        number = 1
        if self._job.fault_tolerance.memory_copy_every_steps:
            number = _OWN_COPIES if self._job.parallelism.world_size == 1 else 2 * _OWN_COPIES
        return number * sum(each.copy for each in self._state)

    @cached_property
    def _starting(self) -> int:
        return starting_peak(self._state) + self._rotary()

    @cached_property
    def _largest_weight(self) -> int:
        return largest_weight(self._job, self._stages)

    @cached_property
    def _state(self) -> Sequence[GroupBytes]:
        return state_bytes(self._job, self._stages, self._element)

    def _evaluation(self) -> int:
        """What a forward pass takes at most: a block's activations, and the head's."""
        crossed = given = self._job.model.crosses_into(self._stages[-1].layers[-1])
        block = self._tokens * (self._each.block(crossed, given, "none") + self._each.residual * self._element)
        return block + self._by_itself(self._stages[0]) + self._tokens * self._each.head() + self._logits()

    def _kept(self) -> int:
        """Activations as the last of the micro-batches in hand has gone through."""
        of_stages = [self._of_stage(stage) for stage in self._stages]
        most = max(_bytes(moment, of_stages, self._owed_by_stages) for moment in self._moments)
        return most + self._buffers() + self._batch() + self._rotary()

    @cached_property
    def _owed_by_stages(self) -> list[int]:
        late = self._job.parallelism.pipeline_schedule == "zero_bubble"
        return [self._owed(stage) if late else 0 for stage in self._stages]

    @cached_property
    def _moments(self) -> frozenset[InHand]:
        if self._job.parallelism.pipeline_parallel_size == 1:
            return frozenset({((1, 0), (0, 0))})
        return in_hand(self._job.parallelism, self._rank, self._micro_batches)

    def _of_stage(self, stage: Stage) -> int:
        """What a stage keeps of a micro-batch, the head left out."""
        each = self._each
        a_token = self._of_blocks(stage, self._modes(stage))
        if stage.first:
            a_token += each.embedding()
        else:
            a_token -= each.residual * self._element  # its input is in a buffer
        if not stage.last and self._job.parallelism.pipeline_schedule == "1f1b":  # else it is among what was sent
            a_token += each.residual * self._element + self._crossing(stage.layers.stop)
        indexes = len(stage.layers) * index_bytes(self._job, self._heads)
        return a_token * self._tokens + self._by_itself(stage) + indexes

    def _crossing(self, layer: int) -> int:
        """Bytes a token that LaX sends to the stage that begins with a block."""
        return self._each.carried if self._job.model.crosses_into(layer) else 0

    def _by_itself(self, stage: Stage) -> int:
        """What attention to one document at a time, or to one window, keeps besides what attention in one does."""
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
        at_once = max(1, sum(count for mode, count in self._modes(stage) if mode == "none"))
        return self._tokens * at_once * (self._each.query * self._element + seen * (self._element + 1))

    def _owed(self, stage: Stage) -> int:
        """What weight gradients that wait need of a micro-batch: inputs and output gradients of all products.

        About what a block keeps without recomputation.
        """
        return self._tokens * self._of_blocks(stage, (("none", len(stage.layers)),))

    def _modes(self, stage: Stage) -> ModeRuns:
        return self._runs[self._stages.index(stage)]

    def _of_blocks(self, stage: Stage, modes: ModeRuns) -> int:
        """What a stage's blocks keep of each token; many are alike."""
        alike = _alike(self._job.model, stage.layers, modes)
        return sum(self._each.block(*block) * count for block, count in alike)

    def _of_run(self, layers: range, mode: RecomputeMode) -> int:
        alike = _alike(self._job.model, layers, ((mode, len(layers)),))
        return sum(self._each.block(*block) * count for block, count in alike)

    def _buffers(self) -> int:
        """Of torch's pipeline stages, for what neighbours send."""
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
        # Context parallel ranks turn their tokens by angles of their own, and the keys that they make of latents.
        ranks = self._job.parallelism.context_parallel_size
        own = 0 if ranks == 1 else self._tokens * (ranks if self._sends_latents else 1)
        if self._job.parallelism.pipeline_parallel_size > 1 and self._job.data.documents_apart:
            own *= self._micro_batches  # which then are dealt each in its way, and all at once
        return 24 * (training.sequence_length + own) * model.head_size // 2

    def _context(self) -> int:
        """What attention's backward pass takes besides where other ranks' keys come in stages.

        Gradients of queries and of own keys in fp32. Of a stage's keys six: as they came and in order; the next stage's
        as they come, and what is sent for it; gradients that go back and come back; and two of gradients in fp32. There
        are as many as one document needs, and documents that are apart need less. On a GPU a call of flash attention
        has keys of its own, and their gradients. Of sparse attention also which keys go and come. Where latents may
        come: these, with the gradients of a stage's, and of the weights that keys are made by.
        """
        ranks = self._job.parallelism.context_parallel_size
        if ranks == 1:
            return 0
        keys, element, stage = 2 * self._each.key_value, self._element, self._stage_tokens
        own = self._tokens * (PRECISE + element) * (self._each.query + keys)
        in_calls = max(self._tokens, stage) * 2 * keys * element if self._each.kernels else 0
        active = active_bytes(self._job, keys // (2 * self._job.model.head_size))
        return own + stage * keys * (6 * element + 2 * PRECISE) + in_calls + active + self._key_latents()

    @cached_property
    def _stage_tokens(self) -> int:
        """Tokens whose keys come in a stage, at most; of sparse attention the same room has some heads' of all."""
        ranks = self._job.parallelism.context_parallel_size
        chunk = chunk_tokens(self._job.training.sequence_length, ranks)
        of_all = -(-self._tokens * (ranks - 1) // (chunk * STAGES)) * chunk
        if self._job.training.attention is None:
            return of_all
        key_heads = self._each.key_value // self._job.model.head_size
        together = max(map(len, head_groups(key_heads)))
        return max(of_all, -(-self._tokens * ranks * together // key_heads))

    @cached_property
    def _sends_latents(self) -> bool:
        """Whether context parallel ranks may; which of them share a node is known when they run."""
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
        shares = 6 * stage * 2 * rank // tensor  # that come and come next, are sent, and go back and come back
        # Of a stage: latents as they were gathered, in order, and their gradients twice; keys before they are turned,
        # in fp32 on a CPU, and gradients.
        whole = 4 * 2 * rank + (3 if self._each.kernels else 5) * keys
        own = self._tokens * 2 * rank * (1 + PRECISE // self._element)
        return self._element * (shares + stage * whole + own) + 2 * PRECISE * 2 * rank * self._each.key_value

    def _backward(self) -> int:
        """What a block's backward pass takes, with a weight's gradient; or the embedding's gradient."""
        block = self._tokens * max(map(self._blocks_backward, self._stages))
        largest = self._largest_weight
        gradient = (2 * self._element + PRECISE) * largest
        if self._job.training.precision == "fp8" and self._each.kernels:  # factors in 8 bits, for one product at a time
            block += self._tokens * self._each.fp8_operand() + largest
        embedding = (
            (self._element + self._copied()) * self._table() if any(stage.first for stage in self._stages) else 0
        )
        block += self._context() + head_bytes(self._job)
        return max(block + gradient, embedding)

    @property
    def _heads(self) -> int:
        """Heads of queries of this rank."""
        return self._each.query // self._job.model.head_size

    def _blocks_backward(self, stage: Stage) -> int:
        """What it takes of each token in the fullest of a stage's blocks, less what those behind it keep no more."""
        gone, most, end = 0, 0, stage.layers.stop
        # Which zero_bubble keeps till weights' gradients are taken.
        lets_go = self._job.parallelism.pipeline_schedule != "zero_bubble"
        for mode, count in reversed(self._modes(stage)):
            crossed = given = self._job.model.crosses_into(end - 1)
            most = max(most, self._each.block_backward(crossed, given, mode) - gone)
            begin = end - count
            if lets_go and begin > stage.layers.start:
                gone += self._of_run(range(begin, end), mode)
            end = begin
        return most

    def _head(self) -> int:
        if not self._stages[-1].last:
            return 0
        element = self._element
        tied = element if self._job.model.tie_embeddings and self._each.sharding.residual else 0
        gradients = (PRECISE + max(element + tied, element + self._copied())) * self._table()
        return self._tokens * self._each.head() + self._logits() + gradients

    def _logits(self) -> int:
        """Those of a chunk, and the hidden vectors that they are made of, with both gradients."""
        job, element = self._job, self._element
        vocabulary = job.model.vocab_size // job.parallelism.tensor_parallel_size
        chunk = min(self._tokens, max(1, _CHUNK_ELEMENTS // vocabulary))
        logits = chunk * vocabulary * element * (1 if chunk == self._tokens else 2)
        if not self._each.kernels:
            # Their gradient is not made in their memory, and of bf16 there is a copy.
            logits += chunk * vocabulary * PRECISE * (1 if element == PRECISE else 2)
        hidden = (self._tokens + chunk) * job.model.hidden_size * element
        return logits + hidden

    def _head_norm(self) -> int:
        return self._tokens * self._each.head_norm_backward() if self._stages[-1].last else 0

    def _copied(self) -> int:
        """Bytes an element of the copy that a CPU makes of a bf16 gradient to add it to a sum in fp32."""
        return PRECISE if not self._each.kernels and self._element < PRECISE else 0

    def _table(self) -> int:
        return self._job.model.vocab_size * self._job.model.hidden_size // self._job.parallelism.tensor_parallel_size

    def _update(self, weights: int) -> int:
        """LORO has the directions of all factors at once; Muon one factor's, and its Gram matrices, also in float64."""
        if self._job.optimizer.loro is not None:
            return PRECISE * weights
        if self._job.optimizer.muon is None:
            return 0
        grams = _GRAM_MATRICES * self._job.model.bottleneck_rank**2 * _MOST_PROJECTIONS
        return 5 * PRECISE * self._largest_weight + 2 * PRECISE * grams


def _alike(
    model: ModelConfig, layers: range, modes: ModeRuns
) -> Sequence[tuple[tuple[bool, bool, RecomputeMode], int]]:
    """Whether latents cross into blocks of a stage, whether they are given some, their mode, and how many are so."""
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
        # The first of a stage is given none but those that cross into it.
        first = layers.start in run and not model.crosses_into(layers.start)
        given = count - crossed - first
        counts.update({(True, True, mode): crossed, (False, True, mode): given})
        counts[False, False, mode] += count - crossed - given
        begin += count
    return tuple(entry for entry in counts.items() if entry[1])


def _bytes(moment: InHand, kept: Sequence[int], owed: Sequence[int]) -> int:
    counts = zip(moment, (kept, owed), strict=True)
    return sum(count * size for pair, sizes in counts for count, size in zip(pair, sizes, strict=False))
