"""Predicts the time of a job's optimizer step in a layout, to rank layouts before any of them runs.

A pipeline rank takes t for a micro-batch, forward and backward; a step is then

    m · max t + idle · (Σ t − max t) + exposed reduction + update

for m micro-batches, where idle is 1 under 1f1b; half of that where a rank has two stages; a third of that half where
weight gradients fill it (arXiv 2104.04473, 2401.10241). t is the sum of

* arithmetic: what the rank computes and moves of its blocks, embedding and head (``Passes``), by its device's rates
  (``machine.Profile``); and of a block's copies to the host, or back, what takes longer than its forward, or backward,
  pass;
* exchange: what ``architecture.Sharding`` says that tensor parallel ranks send in each block, the embedding's vectors,
  and the head's, over the levels that they are spread over (``machine.Cluster``). Backward, weight gradients may be
  computed meanwhile; forward the other half of a micro-batch, if it is split; the profile says which share of that
  costs no time. What dense ranks gather again in the backward pass, gradients of inputs hide like those of weights hide
  reductions. Under ``recompute: shared`` the backward pass of a block hides gathers of the one before it. Between
  context parallel ranks keys and values, while each attends to those that it has, and computes the other half of a
  micro-batch, if it is split: then that does not hide latents;
* sends: a stage's input, and the gradient of its output, at the level at which it and its neighbour are apart.

The reduction is of gradients in fp32 over the ranks with the same weights, under ZeRO's second stage for each
micro-batch, and the gathering of weights; both bucket by bucket. Buckets are sent while the last micro-batch's backward
pass goes on, or each one's: exposed is what outlasts it, and the last bucket. Memory is not looked at.

Corrections (``machine.Fitted``) multiply exchange and reduction by one factor and everything else by another, and idle
time follows.

``Step.replayed`` has the same work played pass by pass instead (``replay``): each rank waits for what it needs, and
reduces its gradients when it is done, whatever the others still do.
``tests/unit/test_published_times.py`` holds the seconds to those that the BOOST paper has measured.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial
from operator import mul
from typing import NamedTuple

from pydantic import Field

from boost_core import architecture
from boost_core.architecture import Role, Stage
from boost_core.config.base import Frozen
from boost_core.config.job import JobSpec, rank_tokens
from boost_core.config.model import LAST_QUERIES, SAMPLED_QUERIES, Activation, ModelConfig
from boost_core.config.parallelism import TRAITS, Layout, ParallelismConfig, RecomputeMode
from boost_core.context.selection import attention_layer, sent_between_nodes, wire
from boost_core.hardware import BYTES, Link
from boost_core.plan.machine import Cluster, Factors, Machine, PredictedCommunication, Row, Work, captures_steps
from boost_core.plan.memory import PRECISE, BlockSplit, activations, state_bytes
from boost_core.plan.replay import StageSeconds, at_least, play

# What a rank computes and moves of a micro-batch: in a block, and in the head.
#
# Widths are this rank's (``memory.Activations``). A product of T × k by k × n takes 2·T·k·n FLOPs and moves the three
# matrices; its backward pass is two products of the same sizes, and reads the weight's gradient to add it to a sum in
# fp32. All blocks are assumed to be ones into which latents cross, and recomputed blocks to recompute their last
# product, too.
#
# ==========  ==========================================================================================================
# attention   4 FLOPs for each pair of positions and element of the queries, and 10 backward, as its kernels compute the
#             scores again (arXiv 2205.14135). A token's pairs are half its sequence, or the part in a window; separate
#             documents are assumed to be as long as a sequence, as their lengths are not known. Sparse attention uses
#             its full budget, and also scores some queries with all keys, for 2 FLOPs each
# passes      elements read and written outside of products, about: residual 6w and 6w backward; a norm with its own
#             pass 4w and 8w, and those of heads 4(q + k) and 8(q + k); rotary embedding 2(q + k) both ways; the MLP's
#             product 3m and 5m; latents that are scaled or activated 2 and 3 of each, three times that where the
#             previous block's latents cross into them
# head        logits, and backward those again, with two passes over them each; gathered hidden vectors
# embedding   rows both ways; and backward a gradient of the whole table, whose bytes do not depend on the tokens
# ==========  ==========================================================================================================


@dataclass(frozen=True)
class Product:
    """A matrix product of a block, forward, with a rank's part of a weight.

    Attributes:
        role: The weight's.
        rows: Rows of the input, for each matrix.
        inner: Columns of the input.
        outer: Columns of the output of each matrix.
        inputs: Number of inputs; an input common to all matrices counts as often as it is read.
        matrices: Number of matrices.
        starts: Number of kernels.
    """

    role: Role
    rows: int
    inner: int
    outer: int
    inputs: int
    matrices: int
    starts: int

    @property
    def weights(self) -> int:
        """Number of elements of the matrices."""
        return self.matrices * self.inner * self.outer

    def passes(self, element: int, fp8: bool = False) -> "Passes":
        """Return the work of the product, and of the gradients of its input and weight, given the bytes per element."""
        read, written = self.rows * self.inputs * self.inner, self.rows * self.matrices * self.outer
        moved, flops = (read + written + self.weights) * element, 2 * self.rows * self.weights
        plain = Work(flops, 0.0, moved, self.starts)
        each = replace(plain, product_flops=0.0, fp8_flops=flops) if fp8 else plain
        return Passes(replace(each, outputs=written), replace(each, outputs=read), replace(plain, outputs=self.weights))


class Passes(NamedTuple):
    """Work of a micro-batch.

    Attributes:
        forward: Forward pass, once.
        backward: Gradients of inputs, with recomputation.
        weight_gradients: Counted separately, as exchanges may be in flight meanwhile.
    """

    forward: Work
    backward: Work
    weight_gradients: Work

    @property
    def all(self) -> Work:
        """Everything."""
        return self.forward + self.backward + self.weight_gradients


def block_work(job: JobSpec, mode: RecomputeMode) -> Passes:
    """Return the work of a block on one rank of a job at its layout, by what the block keeps for its backward pass."""
    parallelism = job.parallelism
    alone = parallelism.at(Layout(parallelism.tensor_parallel_size, 1, 1, parallelism.context_parallel_size))
    alone = alone.model_copy(update={"recompute": mode, "pipeline_layers_per_stage": None})
    scored = 0 if job.training.attention is None else LAST_QUERIES + SAMPLED_QUERIES
    return _block_work(job.model, alone, mode, rank_tokens(job), pairs_of_token(job), job.training.precision, scored)


def pairs_of_token(job: JobSpec) -> float:
    """Return the mean number of positions that a token attends to."""
    length = job.training.sequence_length
    window = min(length, job.model.sliding_window or length)
    return (window - window * (window - 1) / (2 * length)) * job.training.attended_share


@lru_cache(1024)
def _block_work(
    model: ModelConfig, parallelism: ParallelismConfig, mode: RecomputeMode, tokens: int, pairs: float, precision: str,
    scored: int,
) -> Passes:  # fmt: skip
    element, fp8 = BYTES[precision], precision == "fp8"
    sharding = architecture.chosen_sharding(model, parallelism)
    products = block_products(model, parallelism, tokens)
    works = [(each.role, each.passes(element, fp8 and each.role is not Role.LATENT)) for each in products]
    down = sum((work.forward for role, work in works if role is Role.DOWN_PROJECTION), Work())
    up = sum((work.forward for role, work in works if role is not Role.DOWN_PROJECTION), Work())
    of_inputs = sum((work.backward for _, work in works), Work())
    weights = sum(each.weights for each in products)
    size, split = parallelism.tensor_parallel_size, parallelism.tensor_parallel_size if sharding.wide else 1
    width = model.hidden_size // split
    attention_forward = Work(attention_flops=4 * width * tokens * pairs)
    attention_backward = Work(attention_flops=10 * width * tokens * pairs)

    # Elements per token that are read and written outside of products.
    residual = model.hidden_size // (1 if sharding.whole else size)
    turned, mlp = (model.hidden_size + model.key_value_size) // split, model.intermediate_size // split
    norm = 0 if sharding.residual and parallelism.norm == "fused" else residual
    forward_passes = 6 * residual + 4 * norm + 2 * turned + 3 * mlp
    backward_passes = 6 * residual + 8 * norm + 2 * turned + 5 * mlp
    if model.qk_norm:
        forward_passes, backward_passes = forward_passes + 4 * turned, backward_passes + 8 * turned
    if model.bottleneck_activation is not Activation.LINEAR or (sharding.residual and parallelism.norm != "sync"):
        projections = sum(len(group.wide_outs) for group in architecture.grouped_projections(model))
        latents = projections * (model.rank or 0) // (size if sharding.latents else 1)
        crossings = 3 if model.lax is not None else 1  # sum and norm besides
        forward_passes += 2 * crossings * latents
        backward_passes += 3 * crossings * latents

    forward = down + up + attention_forward + Work(moved_bytes=forward_passes * tokens * element)
    backward = of_inputs + attention_backward + Work(moved_bytes=backward_passes * tokens * element)
    of_latents = up if parallelism.context_parallel_size > 1 else up + attention_forward
    again = {"nothing": Work(), "segments": of_latents, "all": forward}[TRAITS[mode].again]
    # Where blocks recompute, each half has a backward pass of its own, and adds its products to the sums.
    apart = TRAITS[mode].again != "nothing" or parallelism.context_parallel_size > 1
    parts = 2 if parallelism.split_micro_batch and apart else 1
    sums = Work(moved_bytes=(element + 2 * PRECISE) * weights * parts)
    gradients = sum((work.weight_gradients for _, work in works), sums)
    return Passes(forward + Work(attention_flops=2 * width * tokens * scored), backward + again, gradients)


def block_products(model: ModelConfig, parallelism: ParallelismConfig, tokens: int) -> list[Product]:
    """All products of a block's forward pass on one rank."""
    sharding = architecture.chosen_sharding(model, parallelism)
    products = []
    for spec in architecture.block_weights(model, crossed=True).values():
        shape, axis = list(spec.shape), sharding.axes.get(spec.role)
        if axis is not None:
            shape[axis] //= parallelism.tensor_parallel_size
        if spec.role is Role.LATENT and len(shape) > 2:  # LaX's gate, whose rows are pieces of a latent
            count, side, _ = shape
            products.append(Product(spec.role, tokens * (model.rank or 0) // side, side, side, count, count, 1))
        elif spec.role is Role.UP_PROJECTION:  # a latent for each projection
            count, inner, outer = shape
            starts = 1 if parallelism.group_projections else count
            products.append(Product(spec.role, tokens, inner, outer, count, count, starts))
        elif spec.role in architecture.MATRICES:
            inner, outer, count = shape[0], shape[-1], shape[1] if len(shape) > 2 else 1
            times = 1 if parallelism.group_projections else count
            products.append(Product(spec.role, tokens, inner, outer, times, count, times))
    return products


def head_work(job: JobSpec) -> Passes:
    """Return the work of the head and the loss."""
    tokens, element = rank_tokens(job), BYTES[job.training.precision]
    vocabulary = job.model.vocab_size // job.parallelism.tensor_parallel_size
    hidden = job.model.hidden_size
    logits = Product(Role.HEAD, tokens, hidden, vocabulary, 1, 1, 1).passes(element)
    pass_over = Work(moved_bytes=2 * element * tokens * vocabulary)
    weight = Work(moved_bytes=(element + 2 * PRECISE) * hidden * vocabulary)
    again = logits.forward + pass_over
    return Passes(again, again + logits.backward, logits.weight_gradients + weight)


def embedding_work(job: JobSpec) -> Work:
    """Return the work of the embedding: rows read and written both ways, and a gradient of the whole table."""
    tokens, element, ranks = rank_tokens(job), BYTES[job.training.precision], job.parallelism.tensor_parallel_size
    table = job.model.vocab_size * job.model.hidden_size // ranks
    # The gradient is zeroed, read, and added to a sum in fp32.
    return Work(moved_bytes=4 * element * tokens * job.model.hidden_size + (2 * element + 2 * PRECISE) * table)


# Time of a collective: α + n/β over a ring, by the link; and over several levels of a network.
#
# =============  =====================  ==========================
# collective     steps around the ring  bytes through a link
# =============  =====================  ==========================
# all_reduce     2 (p − 1)              2 (p − 1)/p of the payload
# all_gather     p − 1                  p − 1 payloads
# reduce_scatter p − 1                  (p − 1)/p of the payload
# all_to_all     p − 1                  (p − 1)/p of the payload
# =============  =====================  ==========================
#
# The payload is what a rank passes in (Thakur, Rabenseifner and Gropp, "Optimization of Collective Communication
# Operations in MPICH", 2005).
#
# Over several levels (``machine.Cluster``) ranks scatter inside, reduce outside and gather inside: one ring per level,
# whose payload is that of the level inside divided by the ranks there, or multiplied for an all-gather. Alternatively a
# single ring goes through all levels at the pace of the slowest. The faster of the two is taken.


def collective_seconds(link: Link, collective: str, ranks: int, payload_bytes: float, calls: int = 1) -> float:
    """Return the time of ``calls`` consecutive collectives with ``payload_bytes`` in total.

    Raises:
        ValueError: The collective is not one of the table's.
    """
    if ranks == 1:
        return 0.0
    steps = (2 if collective == "all_reduce" else 1) * (ranks - 1)
    start = link.base_seconds + steps * link.hop_seconds
    return calls * start + link_bytes(collective, ranks, payload_bytes) / link.bytes_per_second


def group_seconds(cluster: Cluster, row: Row, collective: str, payload_bytes: float, calls: int = 1) -> float:
    """Like ``collective_seconds``, for groups spread over several levels that all send at once.

    Args:
        cluster: The network.
        row: Number of ranks of each group at each level.
        collective: A collective of the table.
        payload_bytes: Payload of all calls together.
        calls: Number of calls.

    Raises:
        ValueError: The collective is not in the table.
    """
    spread = [(level.among(ranks), ranks) for level, ranks in zip(cluster.levels, row, strict=True) if ranks > 1]
    if not spread:
        return 0.0
    # A ring through all levels: in each step some rank waits for the slowest link.
    figures = ((link.base_seconds, link.hop_seconds, link.bytes_per_second) for link, _ in spread)
    starts, hops, rates = zip(*figures, strict=True)
    slowest = Link(max(starts), max(hops), min(rates), "the slowest of several levels")
    flat = collective_seconds(slowest, collective, math.prod(row), payload_bytes, calls)
    if len(spread) == 1:
        return flat
    nested, payload = 0.0, payload_bytes
    for link, ranks in reversed(spread) if collective == "all_gather" else spread:
        nested += collective_seconds(link, collective, ranks, payload, calls)
        payload *= {"all_gather": ranks, "all_to_all": 1}.get(collective, 1 / ranks)
    return min(nested, flat)


def link_bytes(collective: str, ranks: int, payload_bytes: float) -> float:
    """Return the bytes that a collective sends through each link of the ring.

    Raises:
        ValueError: The collective is not in the table.
    """
    shares = {"all_reduce": 2 / ranks, "all_gather": 1.0, "reduce_scatter": 1 / ranks, "all_to_all": 1 / ranks}
    if collective not in shares:
        raise ValueError(f"there is no model of {collective!r}; choose one of {', '.join(shares)}")
    return shares[collective] * (ranks - 1) * payload_bytes


def fit(ranks: int, payload_bytes: Sequence[int], seconds: Sequence[float]) -> Link:
    """Fit α and β to measured all-reduces by least squares of the relative errors.

    Neither is negative: times proportional to the payload give an α of 0, and if larger payloads took no longer, β is
    infinite.

    Args:
        ranks: Ranks of the group; α holds for this many.
        payload_bytes: Payload of each all-reduce.
        seconds: Time of each all-reduce.

    Raises:
        ValueError: There are fewer than two different payloads, or a time is not positive.
    """
    if len(set(payload_bytes)) < 2 or min(seconds) <= 0:
        raise ValueError("a fit needs all-reduces of two or more sizes, each with a positive time")
    sent = [link_bytes("all_reduce", ranks, payload) for payload in payload_bytes]
    points = [(1 / y**2, x, y) for y, x in zip(seconds, sent, strict=True)]  # each with its weight
    total = sum(weight for weight, _, _ in points)
    mean_sent = sum(weight * x for weight, x, _ in points) / total
    mean_seconds = sum(weight * y for weight, _, y in points) / total
    covariance = sum(weight * (x - mean_sent) * (y - mean_seconds) for weight, x, y in points)
    slope = max(covariance / sum(weight * (x - mean_sent) ** 2 for weight, x, _ in points), 0.0)
    start = mean_seconds - slope * mean_sent
    if start < 0:  # the best-fitting line through the origin
        start = 0.0
        slope = sum(weight * x * y for weight, x, y in points) / sum(weight * x**2 for weight, x, _ in points)
    rate = 1 / slope if slope else math.inf
    return Link(start, 0.0, rate, f"fitted to {len(seconds)} all-reduces among {ranks} ranks")


_IDLE_SHARE = {"1f1b": 1.0, "interleaved_1f1b": 1 / 2, "zero_bubble": 1 / 6}
BUCKET_ELEMENTS = 1 << 25  # of gradients that are reduced together (``optim.zero``)

ORDER = ("tp", "cp", "pp", "dp")  # of ranks, the innermost first, as ``Layout.coordinates`` has it


class StepParts(Frozen):
    """Breakdown of a step's seconds on the slowest pipeline rank."""

    # With exposed copies of what blocks keep in the host's memory.
    arithmetic: float = Field(description="Matrix products, attention and passes over memory.")
    exchange: float = Field(description="Exposed tensor parallel collectives.")
    sends: float = Field(description="Transfers between pipeline stages.")
    idle: float = Field(description="Waiting while the pipeline fills and drains.")
    reduction: float = Field(description="Exposed collectives of gradients, and of weights, between replicas.")
    update: float = Field(description="The optimizer, including copies of state kept in the host's memory.")

    @property
    def total(self) -> float:
        """Seconds of the whole step."""
        return self.arithmetic + self.exchange + self.sends + self.idle + self.reduction + self.update

    @property
    def communication(self) -> float:
        """Seconds of exposed collectives."""
        return self.exchange + self.reduction


class HostCopies(NamedTuple):
    """A step's copies over the bus to the host's memory and back.

    Attributes:
        crossing: Seconds of those of what blocks keep.
        exposed: Seconds of these that nothing hides; part of ``StepParts.arithmetic``.
        state: Seconds of those of the optimizer's state; part of ``StepParts.update``.
    """

    crossing: float = 0.0
    exposed: float = 0.0
    state: float = 0.0


class _MicroBatch(NamedTuple):
    """Seconds of a pipeline rank for a micro-batch."""

    arithmetic: float
    exchange: float
    sends: float

    def corrected(self, factors: Factors) -> "_MicroBatch":
        rest = factors.rest
        return _MicroBatch(rest * self.arithmetic, factors.communication * self.exchange, rest * self.sends)


class BlockSeconds(NamedTuple):
    """Seconds of one block in one mode for a micro-batch, without a correction.

    Attributes:
        forward: Forward pass, with what it does not hide of a copy to the host.
        backward: Backward pass without weight gradients, with what it does not hide of a copy back.
        weights: Weight gradients.
        computed: All three.
        exchange_forward: Exposed collectives of the forward pass.
        exchange_backward: Exposed collectives of the backward pass.
        copy: What the block keeps on the host, over the bus once.
        exposed_copies: The part of both copies that nothing hides.
        first_gather: What hides the gathers of other blocks and not those of the one that a backward pass begins with.
    """

    forward: float
    backward: float
    weights: float
    computed: float
    exchange_forward: float
    exchange_backward: float
    copy: float
    exposed_copies: float
    first_gather: float

    def passes(self, factors: Factors) -> tuple[float, float, float]:
        """Return the seconds of the forward pass, of the backward pass and of weight gradients, corrected."""
        return (
            factors.rest * self.forward + factors.communication * self.exchange_forward,
            factors.rest * self.backward + factors.communication * self.exchange_backward,
            factors.rest * self.weights,
        )

    def total(self, factors: Factors) -> float:
        """Return the seconds of everything, corrected."""
        return factors.rest * self.computed + factors.communication * (self.exchange_forward + self.exchange_backward)


class Step:
    """A job at a layout, on a machine.

    Args:
        job: The job; what it recomputes is not left open.
        layout: Its layout.
        machine: What it runs on.
        order: In which groups take the places of the network, the innermost first. Gangs have ``ORDER``.
        modes: What blocks may keep besides, for ``blocks`` and ``keeping``.

    Attributes:
        job: The job.
        layout: Its layout.
        usual: Factors that correct shapes that have not run.

    Raises:
        ValueError: The layout's groups do not go into the machine's network.
    """

    def __init__(
        self, job: JobSpec, layout: Layout, machine: Machine, order: Sequence[str] = ORDER,
        modes: Sequence[RecomputeMode] = (),
    ) -> None:  # fmt: skip
        self._profile = machine.profile.attending(job)
        self._cluster, self._order = machine.cluster, order
        self._over = partial(group_seconds, machine.cluster)
        self._fitted = machine.fitted
        self.usual = self._fitted.factors if self._fitted else Factors()
        self._least = self._fitted.least if self._fitted else Factors()
        self._place(job, layout)
        self._element, self._tokens = BYTES[job.training.precision], rank_tokens(job)
        self._head, self._embedding = head_work(job), embedding_work(job)
        self._sharding = architecture.chosen_sharding(job.model, job.parallelism)
        # For the head, hidden vectors are gathered, and their gradients; where they are whole, these are summed up. For
        # the embedding it is the other way round: vectors of which each rank has looked up some, and their gradients;
        # where columns are split, nothing.
        hidden, row = self._tokens * job.model.hidden_size * self._element, self._tensor_row
        if self._sharding.whole:
            self._head_exchanges = 0.0, self._over(row, "all_reduce", hidden)
        else:
            gathered = self._over(row, "all_gather", hidden / layout.tp)
            self._head_exchanges = gathered, self._over(row, "reduce_scatter", hidden)
        self._embedding_exchanges = (0.0, 0.0) if self._sharding.residual else self._head_exchanges[::-1]
        self._cut()
        self._block = {mode: block_work(job, mode) for mode in set(modes).union(*self._rank_modes)}

    def _cut(self) -> None:
        job, size = self.job, self.layout.pp
        stages = architecture.cut(job.model, job.parallelism, job.training.sequence_length)
        self._stages: list[Sequence[Stage]] = [stages[rank::size] for rank in range(size)]
        self._rank_modes: list[Mapping[RecomputeMode, int]] = []  # of each rank: how many blocks are in each mode
        for own in self._stages:
            counts: Counter[RecomputeMode] = Counter()
            for stage in own:
                counts.update(dict(job.parallelism.modes(stage.index, len(stage.layers))))
            self._rank_modes.append(counts)
        self._cached_stages: dict[Factors, list[list[StageSeconds]]] = {}

    def _place(self, job: JobSpec, layout: Layout) -> None:
        self.job, self.layout = job, layout
        rows = dict(zip(self._order, self._cluster.rows([getattr(layout, name) for name in self._order]), strict=True))
        self._tensor_row, self._context_row, self._pipeline_row = rows["tp"], rows["cp"], rows["pp"]
        # Those with the same weights, wherever they are; and those that share a weight's update: LORO's and Muon's
        # factors are whole on each.
        self._same_row = tuple(map(mul, self._context_row, rows["dp"]))
        shared = job.parallelism.zero_stage > 0 and job.optimizer.kind == "adamw"
        self._sharers = layout.same_weights if shared else 1
        self._micro_batches = job.training.micro_batches(layout.dp)
        levels = (self._cluster.level_between(self._pipeline_row, place) for place in range(layout.pp))
        self._links = [self._cluster.levels[level].link for level in levels]  # between a pipeline rank and the next

    def sharing(self, job: JobSpec, layout: Layout) -> "Step":
        """That of the job with another number of replicas or stage of ZeRO, which changes no pass of a replica."""
        if self._order != ORDER:
            raise ValueError("where replicas are not outermost, their number moves what is outside of them")
        other = copy(self)
        other._place(job, layout)
        return other

    def keeping(self, job: JobSpec) -> "Step":
        """That of the job cut into other stages, also as many more, or with other modes of those that were named."""
        other = copy(self)
        for name in ("_reduced", "_ranks"):
            other.__dict__.pop(name, None)
        if job.parallelism.pipeline_parallel_size == self.layout.pp:
            other.job = job
        else:
            other._place(job, Layout.of(job.parallelism))
        other._cut()
        return other

    def replayed(self) -> StepParts:
        """The step's seconds, played."""
        factors, schedule = self._factors, self.job.parallelism.pipeline_schedule
        ranks, stages = [rank.corrected(factors) for rank in self._ranks], self._stage_seconds(factors)
        micro_batches, busiest = self._micro_batches, max(ranks, key=lambda rank: rank.arithmetic + rank.exchange)
        without_sends = [[replace(stage, send=0.0) for stage in own] for own in stages]
        ended = play(stages, schedule, micro_batches)
        computed = max(play(without_sends, schedule, micro_batches))
        arithmetic, exchange = micro_batches * busiest.arithmetic, micro_batches * busiest.exchange
        sends, idle = max(ended) - computed, max(0.0, computed - arithmetic - exchange)
        reduction, update = self._done(ended, factors) - max(ended), factors.rest * self._update
        return StepParts(
            arithmetic=arithmetic, exchange=exchange, sends=sends, idle=idle, reduction=reduction, update=update
        )

    def at_least(self) -> float:
        """Seconds that ``replayed`` is never below, in far less time.

        Corrected by the least factors of any shape, so that it holds for all jobs that share these passes.
        """
        factors, schedule = self._least, self.job.parallelism.pipeline_schedule
        ended = at_least(self._stage_seconds(factors), schedule, self._micro_batches)
        return self._done(ended, factors) + factors.rest * self._update

    def at_least_however_cut(self) -> float:
        """The same of every cut into as many stages, each of at least a block, and for whatever else blocks keep.

        Of what all stages take for a micro-batch, W, a rank has t. Under 1f1b its first backward pass waits for the
        first micro-batch to go through all others and back, and what it then has left is all but its first forward
        passes, a share of t each: so the step is at least W + (m − 1)·t less these, of all ranks. Under the others a
        rank waits at least for a block of each rank before it. And some rank has at least its even share of blocks.
        """
        model, size, micro_batches = self.job.model, self.layout.pp, self._micro_batches
        (mode,), factors = self._block, self._least
        layers, even = model.num_hidden_layers, -(-model.num_hidden_layers // size)
        forward, backward, weight_gradients = self.blocks[mode].passes(factors)
        block, head = self.blocks[mode].total(factors), self.of_the_head(factors)
        whole = layers * block + head
        sends = [factors.rest * self._between(place, 0) for place in range(size - 1)]
        schedule = self.job.parallelism.pipeline_schedule
        if schedule == "1f1b":
            ahead = forward / block
            ended = whole + 2 * sum(sends) + whole / sum(1 / (micro_batches - 1 - rank * ahead) for rank in range(size))
        else:
            before = forward + backward + (0.0 if schedule == "zero_bubble" else weight_gradients)
            ended = micro_batches * whole / size + before * (size - 1) / 2
        behind = layers * sum(self.blocks[mode].passes(Factors())[1:])
        alone, share = (self._weights([Stage(1, range(number), False, False)]) for number in (1, even))
        busiest = micro_batches * (even * block + (min(sends) if schedule == "1f1b" else 0.0))
        least, most = (factors.communication * self._reduction(weights, behind) for weights in (alone, share))
        ended = max(ended + least, busiest + most)
        return ended + factors.rest * self._profile.update_seconds(share / self._sharers, self._element)

    def played(self) -> float:
        """All of ``replayed``, in half its time."""
        factors, schedule = self._factors, self.job.parallelism.pipeline_schedule
        ended = play(self._stage_seconds(factors), schedule, self._micro_batches)
        return self._done(ended, factors) + factors.rest * self._update

    def _done(self, ended: Sequence[float], factors: Factors) -> float:
        """When all ranks have reduced their gradients, each after its last pass."""
        reductions = {rank: self._reduction(*rank) for rank in set(self._reduced)}  # many are alike
        ranks = zip(ended, self._reduced, strict=True)
        return max(end + factors.communication * reductions[rank] for end, rank in ranks)

    def of_a_micro_batch(self) -> tuple[float, float]:
        """What a replica computes and exchanges for a micro-batch at least, and a block's share outside forward."""
        whole, (block,) = sum(sum(rank.corrected(self._least)[:2]) for rank in self._ranks), self.blocks.values()
        return whole, 1 - block.passes(self._least)[0] / block.total(self._least)

    def parts(self) -> StepParts:
        """The step's seconds, by the formula."""
        factors, micro_batches = self._factors, self._micro_batches
        slowest, others = self._slowest_and_others(factors)
        # As though the rank with most weights had the longest backward pass.
        largest = map(max, zip(*self._reduced, strict=True))
        arithmetic, exchange, sends = (micro_batches * seconds for seconds in slowest)
        idle = _IDLE_SHARE[self.job.parallelism.pipeline_schedule] * sum(others)
        reduction, update = factors.communication * self._reduction(*largest), factors.rest * self._update
        return StepParts(
            arithmetic=arithmetic, exchange=exchange, sends=sends, idle=idle, reduction=reduction, update=update
        )

    def communication(self) -> PredictedCommunication:
        """The exposed collectives of the first pipeline rank, without a correction."""
        none, micro_batches = Factors(), self._micro_batches
        slowest, others = self._slowest_and_others(none)
        idle_share = _IDLE_SHARE[self.job.parallelism.pipeline_schedule]
        rest = micro_batches * (slowest.arithmetic + slowest.sends) + self._update
        rest += idle_share * (others.arithmetic + others.sends)
        largest = map(max, zip(*self._reduced, strict=True))  # as in ``parts``
        along = micro_batches * slowest.exchange + idle_share * others.exchange + self._reduction(*largest)
        own = micro_batches * self._ranks[0].exchange + self._reduction(*self._reduced[0])
        return PredictedCommunication(own, along / (along + rest))

    def _slowest_and_others(self, factors: Factors) -> tuple[_MicroBatch, _MicroBatch]:
        """The slowest pipeline rank's seconds for a micro-batch, and the sum of all others'."""
        first, *others = sorted((rank.corrected(factors) for rank in self._ranks), key=lambda rank: -sum(rank))
        return first, _MicroBatch(*map(sum, zip((0.0, 0.0, 0.0), *others, strict=True)))

    @property
    def _factors(self) -> Factors:
        """What the prediction is multiplied by, according to jobs that have run."""
        return self._fitted.of(self.job).factors if self._fitted else Factors()

    @property
    def _update(self) -> float:
        most = max(weights for weights, _ in self._reduced)
        on_device = self._profile.update_seconds(most / self._sharers, self._element)
        return on_device + self.exact_seconds + self._state_copies

    @property
    def exact_seconds(self) -> float:
        """Seconds of a step's arithmetic in fp64 at least, uncorrected: LORO's share of exact steps, or Muon's."""
        optimizer, every = self.job.optimizer, 1
        if optimizer.loro is not None:
            every = optimizer.loro.exact_every_steps
        elif optimizer.kind != "muon":  # LORO's lazy steps need none
            return 0.0
        most = max(sum(len(stage.layers) for stage in own) for own in self._stages)
        flops = architecture.precise_step_flops(optimizer.kind, self.job.model, most, self.layout.tp)
        return flops / every / self._profile.precise_flops

    @property
    def host_copies(self) -> HostCopies:
        """A step's copies to and from the host's memory; those of what blocks keep on the rank with most of each."""
        exposed, crossing = [], []
        for own, modes in zip(self._stages, self._rank_modes, strict=True):
            blocks = [(count, self.blocks[mode]) for mode, count in modes.items()]
            waits = sum(self._before_backward(stage)[1] for stage in own)
            exposed.append(waits + sum(count * block.exposed_copies for count, block in blocks))
            crossing.append(sum(2 * count * block.copy for count, block in blocks))
        rest, of_a_step = self._factors.rest, self._factors.rest * self._micro_batches
        return HostCopies(of_a_step * max(crossing), of_a_step * max(exposed), rest * self._state_copies)

    @property
    def _state_copies(self) -> float:
        """Seconds of copies of the optimizer's state, uncorrected: both ways one after the other, hidden by nothing."""
        if self.job.parallelism.optimizer_offload == 0:
            return 0.0
        ranks = (state_bytes(self.job, stages, self._element) for stages in self._stages)
        return max(sum(group.passing for group in groups) for groups in ranks) / self._profile.host_bandwidth

    @cached_property
    def _reduced(self) -> list[tuple[float, float]]:
        """Each rank's weights, and the seconds of its blocks' backward pass, which hides a part of their reduction."""
        of, works = self._profile.seconds, self._block.items()
        seconds = {mode: of(each.backward + each.weight_gradients) for mode, each in works}
        return [
            (self._weights(stages), sum(count * seconds[mode] for mode, count in modes.items()))
            for stages, modes in zip(self._stages, self._rank_modes, strict=True)
        ]

    @cached_property
    def _ranks(self) -> list[_MicroBatch]:
        head, head_exchange = self._profile.seconds(self._head.all), sum(self._head_exchanges)
        embedding, embedding_exchange = self._profile.seconds(self._embedding), sum(self._embedding_exchanges)
        ranks = []
        for stages, modes in zip(self._stages, self._rank_modes, strict=True):
            first, last = any(stage.first for stage in stages), any(stage.last for stage in stages)
            gathers, copies = zip(*map(self._before_backward, stages), strict=True)
            blocks = [(count, self.blocks[mode]) for mode, count in modes.items()]
            arithmetic = sum(count * block.computed for count, block in blocks) + last * head
            arithmetic += first * embedding + sum(copies)
            exchange = sum(count * (block.exchange_forward + block.exchange_backward) for count, block in blocks)
            exchange += first * embedding_exchange + last * head_exchange
            exchange += sum(gathers)
            sends = 0.0
            for stage in stages:  # a stage's input, and its output's gradient
                place, size = stage.index % self.layout.pp, self.layout.pp
                received = 0.0 if stage.first else self._between((stage.index - 1) % size, stage.layers.start)
                sends += received + (0.0 if stage.last else self._between(place, stage.layers.stop))
            ranks.append(_MicroBatch(arithmetic, exchange, sends))
        return ranks

    def _stage_seconds(self, factors: Factors) -> list[list[StageSeconds]]:
        """What each stage takes, pass by pass, corrected; all of a rank's passes take what ``_ranks`` says."""
        if factors in self._cached_stages:
            return self._cached_stages[factors]
        seconds, (head_forward, head_backward) = self._profile.seconds, self._head_exchanges
        ranks, blocks = [], {mode: block.passes(factors) for mode, block in self.blocks.items()}
        for own in self._stages:
            taking = []
            for stage in own:
                forward = weights = 0.0
                gather, host_copy = self._before_backward(stage)
                backward = factors.communication * gather + factors.rest * host_copy
                for mode, count in self.job.parallelism.modes(stage.index, len(stage.layers)):
                    forward += count * blocks[mode][0]
                    backward += count * blocks[mode][1]
                    weights += count * blocks[mode][2]
                if stage.first:  # nearly all of its work is backward
                    looked_up, returned = self._embedding_exchanges
                    forward += factors.communication * looked_up
                    backward += factors.rest * seconds(self._embedding) + factors.communication * returned
                if stage.last:
                    forward += factors.rest * seconds(self._head.forward) + factors.communication * head_forward
                    backward += factors.rest * seconds(self._head.backward) + factors.communication * head_backward
                    weights += factors.rest * seconds(self._head.weight_gradients)
                sent = 0.0 if stage.last else self._between(stage.index % self.layout.pp, stage.layers.stop)
                taking.append(StageSeconds(forward, backward, weights, factors.rest * sent))
            ranks.append(taking)
        self._cached_stages[factors] = ranks
        return ranks

    def _before_backward(self, stage: Stage) -> tuple[float, float]:
        """Seconds of gathers, and of copies from the host, that a backward pass waits for before its first block.

        A last stage's follows its own forward pass, so that this block's tensors are still on the device.
        """
        modes = [mode for mode, _ in self.job.parallelism.modes(stage.index, len(stage.layers))]
        gathers = (self.blocks[mode].first_gather for mode in modes if TRAITS[mode].slices)
        copies = (self.blocks[mode].copy for mode in modes if TRAITS[mode].on_host and not stage.last)
        return max(gathers, default=0.0), max(copies, default=0.0)

    def of_the_head(self, factors: Factors) -> float:
        """Return the seconds of one micro-batch in the head, corrected."""
        return factors.rest * self._profile.seconds(self._head.all) + factors.communication * sum(self._head_exchanges)

    @cached_property
    def blocks(self) -> dict[RecomputeMode, BlockSeconds]:
        """One block's seconds in each mode."""
        job, profile, seconds = self.job, self._profile, self._profile.seconds
        captured, exchanges = captures_steps(job), architecture.block_exchanges(job.model, job.parallelism)
        sent = [0.0, 0.0, 0.0]  # seconds of collectives between tensor parallel ranks, with nothing hidden
        for index, payloads in enumerate(exchanges):
            for kind in {payload.kind for payload in payloads}:
                passed = [payload.passed(self.layout.tp) for payload in payloads if payload.kind == kind]
                size = self._tokens * self._element * sum(passed)
                sent[index] += self._over(self._tensor_row, kind, size, len(passed))
        sent_forward, sent_backward, sent_again = sent
        blocks = {}
        for mode, block in self._block.items():
            traits = TRAITS[mode]
            behind = seconds(block.backward + block.weight_gradients)  # hides what comes for the next block

            # Of what is kept on the host, what the passes do not hide.
            bus = copy_forward = copy_backward = 0.0
            if traits.on_host:
                on_gpu, crossed = job.resources.gpus_per_worker > 0, job.model.lax is not None
                each = activations(job.model, BlockSplit.of(job.parallelism), self._element, on_gpu)
                bus = self._tokens * each.on_host(crossed, crossed, mode) / profile.host_bandwidth
                copy_forward, copy_backward = max(0.0, bus - seconds(block.forward)), max(0.0, bus - behind)

            # Collectives, as far as nothing hides them.
            forward, backward = sent_forward, sent_backward
            if traits.again == "all":
                backward += forward
            if self._sharding.residual:
                backward = profile.exposed(backward, seconds(block.weight_gradients))
            backward += profile.exposed(sent_again, seconds(block.backward), long=True)
            if job.parallelism.split_micro_batch and self.layout.cp == 1:  # else turns end where keys are exchanged
                forward = profile.exposed(forward, seconds(block.forward) / 2)
            first_gather = 0.0
            if traits.slices:
                # Of the latents of which ranks have slices: a block's, and as many where some cross into it.
                latents = architecture.saved_latents(job.model, job.parallelism, crossed=job.model.lax is not None)
                slices = self._tokens * self._element * sum(latents) / self.layout.tp
                gathers = self._over(self._tensor_row, "all_gather", slices, len(latents))
                exposed = profile.exposed(gathers, behind)
                backward += exposed
                first_gather = gathers - exposed
            keys_forward, keys_backward = self._keys(mode)

            launched = profile.of_a_block(block.all, captured)
            slower = launched / seconds(block.all)  # as kernels are launched more slowly than they run
            exposed_copies = copy_forward + copy_backward
            computed_forward, computed_backward, weights = (slower * seconds(each) for each in block)
            computed = computed_forward + copy_forward, computed_backward + copy_backward, weights
            exchanged = forward + keys_forward, backward + keys_backward
            blocks[mode] = BlockSeconds(
                *computed, launched + exposed_copies, *exchanged, bus, exposed_copies, first_gather
            )
        return blocks

    def _keys(self, mode: RecomputeMode) -> tuple[float, float]:
        """One block's keys and values to context parallel ranks, as far as attention does not hide it.

        All go to all, once forward; backward once more, and their gradients come back. That is what one document needs.
        Latents in their place are projected as often, and backward give gradients of their own and of the weights. If
        micro-batches are split, what else the other half computes in the block hides the exchange, too.
        """
        if self.layout.cp == 1:
            return 0.0, 0.0
        sent = wire(self.job, self._cluster, self._context_row, sent_between_nodes(self.job, self._cluster))
        projecting = Work(product_flops=sent.projected_tokens * attention_layer(self.job).projection_flops)
        projected = self._profile.seconds(projecting)
        again, block = TRAITS[mode].again == "all", self._block[mode]  # else attention is kept

        exposed = []
        for ways, times, each in ((1, 1, block.forward), (2 + again, 3 + again, block.backward)):
            meanwhile = self._profile.seconds(Work(attention_flops=each.attention_flops))
            if self.job.parallelism.split_micro_batch:
                meanwhile += (self._profile.seconds(each) - meanwhile) / 2
            exposed.append(times * projected + self._profile.exposed(ways * sent.seconds, meanwhile, long=True))
        return exposed[0], exposed[1]

    def _between(self, place: int, layer: int) -> float:
        """What goes from one pipeline rank to the next, before a block."""
        model = self.job.model
        width = model.hidden_size // (1 if self._sharding.whole else self.layout.tp)
        if model.crosses_into(layer):
            width += 7 * model.bottleneck_rank
        link = self._links[place]
        return link.base_seconds + link.hop_seconds + self._tokens * width * self._element / link.bytes_per_second

    def _reduction(self, weights: float, backward: float) -> float:
        """The exchange of gradients between replicas, and of the weights that each of them has updated.

        Args:
            weights: How many a rank has.
            backward: Seconds of the backward pass of its blocks, which hides a part.
        """
        # Custom updates need whole gradients, whatever ZeRO's stage.
        whole, ranks = self._sharers == 1, self.layout.same_weights
        rounds = self._micro_batches if self.job.parallelism.zero_stage == 2 else 1
        kind = "all_reduce" if whole else "reduce_scatter"
        buckets = max(1, round(weights / BUCKET_ELEMENTS))
        one_round = self._over(self._same_row, kind, weights * PRECISE, buckets)
        last = one_round / buckets
        reduced = rounds * (last + self._profile.exposed(one_round - last, backward, long=True))
        if whole:
            return reduced
        return reduced + self._over(self._same_row, "all_gather", weights / ranks * self._element, buckets)

    def _weights(self, stages: Sequence[Stage]) -> float:
        """Of a pipeline rank, as though tensor parallel ranks had equal parts of all of them."""
        model, weights = self.job.model, 0
        for stage in stages:
            crossed = sum(map(model.crosses_into, stage.layers))
            weights += crossed * architecture.block_parameters(model, crossed=True)
            weights += (len(stage.layers) - crossed) * architecture.block_parameters(model, crossed=False)
            weights += (stage.first + stage.last) * model.vocab_size * model.hidden_size
        return weights / self.layout.tp
