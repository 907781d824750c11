"""What a rank computes, moves and keeps of a micro-batch: in a block, and in the head.

Widths are this rank's, as for ``Activations``. A product of T × k by k × n takes 2·T·k·n FLOPs and moves the three
matrices; its backward pass is two products of the same sizes, and reads the weight's gradient to add it to a sum in
fp32. All blocks are assumed to be ones into which latents cross, and recomputed blocks to recompute their last product,
too.

==========  ==========================================================================================================
attention   4 FLOPs for each pair of positions and element of the queries, and 10 backward, as its kernels compute the
            scores again (arXiv 2205.14135). A token's pairs are half its sequence, or the part in a window; separate
            documents are assumed to be as long as a sequence, as their lengths are not known. Sparse attention uses its
            full budget, and also scores some queries with all keys, for 2 FLOPs each
passes      elements read and written outside of products, about: residual 6w and 6w backward; a norm with its own pass
            4w and 8w, and those of heads 4(q + k) and 8(q + k); rotary embedding 2(q + k) both ways; the MLP's product
            3m and 5m; latents that are scaled or activated 2 and 3 of each, three times that where the previous block's
            latents cross into them; channels that a projection scales 3 and 4 of each
head        logits, and backward those again, with two passes over them each; gathered hidden vectors
embedding   rows both ways; and backward a gradient of the whole table, whose bytes do not depend on the tokens
==========  ==========================================================================================================
"""

import math
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import accumulate
from operator import add

from boost_core.architecture import (
    MATRICES,
    Role,
    WeightSpec,
    block_weights,
    chosen_sharding,
    embedding_weights,
    gate_matrices,
    grouped_projections,
    head_weights,
    projection_weights,
    reads_input,
    saved_latents,
)
from boost_core.config.base import counted
from boost_core.config.job import JobSpec
from boost_core.config.model import LAST_QUERIES, SAMPLED_QUERIES, Activation, ModelConfig
from boost_core.config.parallelism import TRAITS, Layout, ParallelismConfig, RecomputeMode
from boost_core.hardware import BYTES, peak_flops_per_second

PRECISE = BYTES["fp32"]  # bytes of statistics, sums and masters


@dataclass(frozen=True)
class Work:
    """Work of a device; a profile says how long it takes.

    Attributes:
        product_flops: FLOPs of matrix products.
        attention_flops: FLOPs of attention.
        moved_bytes: Bytes that products and passes read and write.
        starts: Number of product kernels launched.
        fp8_flops: FLOPs of products in 8 bits, not included in ``product_flops``.
        outputs: Elements of the results of products, of which each tile costs the same at any inner width.
    """

    product_flops: float = 0.0
    attention_flops: float = 0.0
    moved_bytes: float = 0.0
    starts: int = 0
    fp8_flops: float = 0.0
    outputs: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(*map(add, vars(self).values(), vars(other).values()))


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
        in_16_bits = Work(flops, 0.0, moved, self.starts)
        each = replace(in_16_bits, product_flops=0.0, fp8_flops=flops) if fp8 else in_16_bits
        return Passes(
            replace(each, outputs=written), replace(each, outputs=read), replace(in_16_bits, outputs=self.weights)
        )


@dataclass(frozen=True)
class Passes:
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


def rank_tokens(job: JobSpec) -> int:
    """Return the number of a micro-batch's tokens on a rank."""
    training = job.training
    return training.micro_batch_size * training.sequence_length // job.parallelism.context_parallel_size


def tokens_by_part(job: JobSpec) -> Sequence[int]:
    """Return a context parallel rank's tokens of each part with its own partition: a micro-batch, or its halves."""
    sequences = job.training.micro_batch_size
    parts = (-(-sequences // 2), sequences // 2) if job.parallelism.split_micro_batch else (sequences,)
    return [part * job.training.sequence_length // job.parallelism.context_parallel_size for part in parts]


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
    sharding = chosen_sharding(model, parallelism)
    products = block_products(model, parallelism, tokens)
    works = [(each.role, each.passes(element, fp8 and each.role is not Role.LATENT)) for each in products]
    down = sum((work.forward for role, work in works if role is Role.DOWN_PROJECTION), Work())
    up = sum((work.forward for role, work in works if role is not Role.DOWN_PROJECTION), Work())
    of_inputs = sum((work.backward for _, work in works), Work())
    weights = sum(each.weights for each in products)
    width = model.hidden_size // (parallelism.tensor_parallel_size if sharding.wide else 1)
    attention_forward = Work(attention_flops=4 * width * tokens * pairs)
    attention_backward = Work(attention_flops=10 * width * tokens * pairs)

    # Elements per token that are read and written outside of products.
    size, split = parallelism.tensor_parallel_size, parallelism.tensor_parallel_size if sharding.wide else 1
    residual = model.hidden_size // (1 if sharding.whole else size)
    turned, mlp = (model.hidden_size + model.key_value_size) // split, model.intermediate_size // split
    norm = 0 if sharding.residual and parallelism.norm == "fused" else residual
    forward_passes = 6 * residual + 4 * norm + 2 * turned + 3 * mlp
    backward_passes = 6 * residual + 8 * norm + 2 * turned + 5 * mlp
    groups = grouped_projections(model)
    scaled = 0  # channels that the block's projections scale one by one
    for group in groups:
        weights_of_group = projection_weights(model, group).values()
        scaled += sum(math.prod(spec.shape) for spec in weights_of_group if spec.role is Role.CHANNELS)
    scaled //= split
    forward_passes, backward_passes = forward_passes + 3 * scaled, backward_passes + 4 * scaled
    if model.qk_norm:
        forward_passes, backward_passes = forward_passes + 4 * turned, backward_passes + 8 * turned
    if model.bottleneck_activation is not Activation.LINEAR or (sharding.residual and parallelism.norm != "sync"):
        latents = sum(len(group.wide_outs) for group in groups) * (model.rank or 0) // (size if sharding.latents else 1)
        crossings = 3 if model.lax is not None else 1  # sum and norm besides
        forward_passes += 2 * crossings * latents
        backward_passes += 3 * crossings * latents

    forward = down + up + attention_forward + Work(moved_bytes=forward_passes * tokens * element)
    backward = of_inputs + attention_backward + Work(moved_bytes=backward_passes * tokens * element)
    of_latents = up if parallelism.context_parallel_size > 1 else up + attention_forward
    again = {"nothing": Work(), "segments": of_latents, "all": forward}[TRAITS[mode].again]
    # Where any block recomputes, each half has a backward pass of its own, and adds its products to the sums.
    apart = parallelism.recompute_text not in ("none", "auto") or parallelism.context_parallel_size > 1
    apart = apart or TRAITS[mode].again != "nothing"
    parts = 2 if parallelism.split_micro_batch and apart else 1
    sums = Work(moved_bytes=(element + 2 * PRECISE) * weights * parts)
    gradients = sum((work.weight_gradients for _, work in works), sums)
    return Passes(forward + Work(attention_flops=2 * width * tokens * scored), backward + again, gradients)


def block_products(model: ModelConfig, parallelism: ParallelismConfig, tokens: int) -> list[Product]:
    """All products of a block's forward pass on one rank."""
    sharding = chosen_sharding(model, parallelism)
    products = []
    for spec in block_weights(model, crossed=True).values():
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
        elif spec.role in MATRICES:
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


# Parameter counts of a model.


def block_matrix_parameters(model: ModelConfig) -> int:
    """Return the parameters in the matrices of one block: d_in · d_out dense, r (d_in + d_out) for a low-rank pair."""
    weights = block_weights(model, crossed=False).values()
    return sum(math.prod(spec.shape) for spec in weights if spec.role in MATRICES)


@lru_cache(64)  # a search asks for the same
def block_parameters(model: ModelConfig, crossed: bool) -> int:
    """Return all parameters of one block, with or without latents crossing into it."""
    return _parameters(block_weights(model, crossed))


def parameter_count(model: ModelConfig) -> int:
    """Return all trainable parameters: blocks with their two norms, crossings, embedding, head, final norm."""
    crossed = sum(map(model.crosses_into, range(model.num_hidden_layers)))
    blocks = (model.num_hidden_layers - crossed) * block_parameters(model, crossed=False)
    blocks += crossed * block_parameters(model, crossed=True)
    return blocks + _parameters(embedding_weights(model)) + _parameters(head_weights(model))


def _parameters(weights: Mapping[str, WeightSpec]) -> int:
    return sum(math.prod(spec.shape) for spec in weights.values())


# How much arithmetic a model needs.

# Forward and backward passes are three units of a block's arithmetic; recomputation comes on top.
RECOMPUTED = {"nothing": 0.0, "segments": 0.5 / 3, "all": 1 / 3}  # by ``ModeTraits.again``


def exact_step_flops(model: ModelConfig, layers: int, tensor_parallel_size: int) -> float:
    """Return a rank's FLOPs in fp64 for an exact step of LORO over this many blocks (``optim.riemannian_step``).

    By Golub & Van Loan, Matrix Computations, 4th ed.: 21 n³ for a singular value decomposition with both bases (§8.6),
    and 9 n³ for one of a symmetric matrix (§8.3). A pair has one of 2r × 2r, two of r × r for pseudoinverses, and eight
    symmetric ones, which all tensor parallel ranks repeat; and 26 r² for each row of its two factors, in products.
    """
    pairs = rows = 0
    for spec in block_weights(model, crossed=False).values():
        if spec.role is Role.DOWN_PROJECTION:
            pairs, rows = pairs + spec.shape[1], rows + spec.shape[0] * spec.shape[1]
        elif spec.role is Role.UP_PROJECTION:
            rows += spec.shape[0] * spec.shape[2]
    rank = model.bottleneck_rank
    return layers * ((21 * 8 + 2 * 21 + 8 * 9) * pairs * rank**3 + 26 * rows * rank**2 / tensor_parallel_size)


def model_flops_per_token(model: ModelConfig, sequence_length: int, attended: float = 1.0) -> int:
    """Return the FLOPs of one token's forward and backward pass, without recomputation.

    Two per matrix parameter forward and four backward, plus the attention scores counted in full
    (12·L·d·s, or 12·L·d·w with a sliding window w < s), as in the PaLM paper's appendix B (arXiv 2204.02311). The
    embedding look-up is free. Only the share ``attended`` of the scores counts; see ``TrainingConfig.attended_share``.
    """
    block = block_flops_per_token(model, sequence_length, attended)
    return model.num_hidden_layers * block + head_flops_per_token(model)


def hardware_flops_per_token(
    model: ModelConfig, parallelism: ParallelismConfig, sequence_length: int, attended: float = 1.0
) -> float:
    """Return the FLOPs that all tensor parallel ranks compute per token, with duplicated and recomputed work."""
    block = computed_block_flops_per_token(model, parallelism, sequence_length, attended)
    modes = parallelism.modes_of_all(model.num_hidden_layers)
    blocks = sum(count * (1 + RECOMPUTED[TRAITS[mode].again]) for mode, count in modes.items())
    return blocks * block + head_flops_per_token(model)


def block_flops_per_token(model: ModelConfig, sequence_length: int, attended: float = 1.0) -> int:
    """Return the model FLOPs per token of one block."""
    return 6 * block_matrix_parameters(model) + _attention_flops_per_token(model, sequence_length, attended)


def computed_block_flops_per_token(
    model: ModelConfig, parallelism: ParallelismConfig, sequence_length: int, attended: float = 1.0
) -> int:
    """Return the FLOPs per token of one block on all tensor parallel ranks together.

    The matrices are divided among the ranks, and so are the heads, except under vanilla: there queries, keys and values
    are whole on every rank, and each computes the attention of all heads.
    """
    ranks = 1 if chosen_sharding(model, parallelism).wide else parallelism.tensor_parallel_size
    return 6 * block_matrix_parameters(model) + ranks * _attention_flops_per_token(model, sequence_length, attended)


def _attention_flops_per_token(model: ModelConfig, sequence_length: int, attended: float) -> int:
    scores = 12 * model.hidden_size * min(sequence_length, model.sliding_window or sequence_length)
    return round(attended * scores)


def head_flops_per_token(model: ModelConfig) -> int:
    """Return the FLOPs per token of the language-model head."""
    return 6 * model.vocab_size * model.hidden_size


@dataclass(frozen=True)
class FlopRates:
    """FLOPs per token of a job, and the peak rate of its gang.

    Attributes:
        model: FLOPs per token that the model needs.
        hardware: FLOPs per token that the gang computes, with duplicated and recomputed work.
        peak: Peak FLOPs per second of all the gang's devices; ``None`` if unknown.
    """

    model: int
    hardware: float
    peak: float | None

    @classmethod
    def of(cls, spec: JobSpec, device_name: str) -> "FlopRates":
        """Return the rates of a job in its layout, on devices of this name."""
        length, parallelism, attended = spec.training.sequence_length, spec.parallelism, spec.training.attended_share
        peak = peak_flops_per_second(device_name, spec.training.precision)
        return cls(
            model_flops_per_token(spec.model, length, attended),
            hardware_flops_per_token(spec.model, parallelism, length, attended),
            None if peak is None else parallelism.world_size * peak,
        )

    def utilization(self, tokens_per_second: float, flops_per_token: float) -> float | None:
        """Return the share of the peak that is used, from 0 to 1; ``None`` if the peak is unknown."""
        return None if self.peak is None else tokens_per_second * flops_per_token / self.peak


# How a model is cut into pipeline stages: as the job lists them, or into stages of about equal work.


@dataclass(frozen=True)
class Stage:
    """One stage of the pipeline.

    Attributes:
        index: Its number, from 0; it runs on pipeline rank ``index mod pp``.
        layers: Its blocks.
        first: Whether it has the embedding.
        last: Whether it has the head and the loss.
    """

    index: int
    layers: range
    first: bool
    last: bool


def block_modes(parallelism: ParallelismConfig, stage: Stage) -> dict[int, RecomputeMode]:
    """Return the mode of each of a stage's blocks."""
    runs = parallelism.modes(stage.index, len(stage.layers))
    return dict(zip(stage.layers, (mode for mode, count in runs for _ in range(count)), strict=True))


def miscounted(model: ModelConfig, parallelism: ParallelismConfig, sequence_length: int) -> str | None:
    """Explain which stage has another number of blocks than ``recompute`` lists, and the fix; ``None`` if all match."""
    recompute = parallelism.recompute
    if not isinstance(recompute, tuple):
        return None
    sizes = layers_per_stage(model, parallelism, sequence_length)
    wrong = next((index for index, size in enumerate(sizes) if recompute[index].blocks != size), None)
    if wrong is None:
        return None
    return (
        f"parallelism.recompute lists {counted(recompute[wrong].blocks, 'block')} for stage {wrong} of "
        f"{Layout.of(parallelism).replica_text}, which has {sizes[wrong]}; make its entries add up to "
        f"{', '.join(map(str, sizes))}"
    )


def cut(model: ModelConfig, parallelism: ParallelismConfig, sequence_length: int) -> Sequence[Stage]:
    """Return all stages in order, as in ``pipeline_layers_per_stage`` if the job sets it.

    Otherwise the last stage has fewer blocks to make up for the head; an embedding costs next to nothing.

    Raises:
        ValueError: There are more stages than blocks.
    """
    count, layers = parallelism.stages, model.num_hidden_layers
    if parallelism.pipeline_layers_per_stage is not None:
        return stages_of(parallelism.pipeline_layers_per_stage)
    if count > layers:
        raise ValueError(f"{count} pipeline stages need as many blocks; the model has {layers}")
    block = computed_block_flops_per_token(model, parallelism, sequence_length)
    return _cut(layers, count, head_flops_per_token(model) / block)


def layers_per_stage(model: ModelConfig, parallelism: ParallelismConfig, sequence_length: int) -> tuple[int, ...]:
    """Return the number of blocks of each stage. Arguments and errors as in ``cut``."""
    return tuple(len(stage.layers) for stage in cut(model, parallelism, sequence_length))


@lru_cache(1024)  # a scheduler asks the same for each number of replicas
def _cut(layers: int, count: int, head_in_blocks: float) -> tuple[Stage, ...]:
    # The last stage's number of blocks that minimizes the most work of any stage; of equal ones, the largest.
    last = min(
        range(1, layers - count + 2) if count > 1 else [layers],
        key=lambda last: (max(-(-(layers - last) // (count - 1)) if count > 1 else 0, last + head_in_blocks), -last),
    )
    others, number = layers - last, count - 1  # evenly; the later ones get the extra blocks
    sizes = [others * (index + 1) // number - others * index // number for index in range(number)]
    return stages_of((*sizes, last))


@lru_cache(1024)
def stages_of(sizes: Sequence[int]) -> tuple[Stage, ...]:
    """Build stages with the given numbers of blocks."""
    return tuple(
        Stage(index, range(end - size, end), index == 0, index == len(sizes) - 1)
        for index, (end, size) in enumerate(zip(accumulate(sizes), sizes, strict=True))
    )


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
# With ``recompute: latent`` a block keeps 7r + 2w, the statistics, and the sum of squares it began with; attention's
# output (q) and the MLP's product (m) where the next projection reads them other than through latents; context parallel
# ranks also keep attention's output (q) in any case, and its log-sum-exps (h in fp32). ``shared`` keeps 7r/p in place
# of 7r; ``full`` keeps w and that sum. LaX's carried latents add 7r, or under ``shared`` 7r/p and only where they
# cross. With ``offload`` the host holds what ``shared`` keeps, on one rank with p = 1, and the device only attention's
# output on context parallel ranks. On a CPU the kernels' references run, which keep more.
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
    """

    def __init__(self, model: ModelConfig, parallelism: ParallelismConfig, element_bytes: int, kernels: bool) -> None:
        self.model, self.parallelism, self.element_bytes, self.kernels = model, parallelism, element_bytes, kernels
        self.sharding = chosen_sharding(model, parallelism)
        self._size = parallelism.tensor_parallel_size
        self._split = self._size if self.sharding.wide else 1  # parts into which heads and MLP are split
        self.residual = model.hidden_size // (1 if self.sharding.whole else self._size)
        self._rows = self._size if self.sharding.sequence else 1  # parts into which the tokens of norms are split
        self.latent = (model.rank or 0) // (self._size if self.sharding.latents else 1)
        self.query, self.key_value = model.hidden_size // self._split, model.key_value_size // self._split
        self._mlp, self._heads = model.intermediate_size // self._split, model.num_attention_heads // self._split
        self.blocks_ahead = 2 if self._size > 1 else 1

        groups = grouped_projections(model)
        normed = [group for group in groups if group.norm]
        self._projections = sum(len(group.wide_outs) for group in groups)
        self._projections_together = max(len(group.wide_outs) for group in groups)  # with a common input
        self._normed = sum(len(group.wide_outs) for group in normed)  # projections after a norm
        # Whether projections with a common input share a product; dense ones always do.
        self._grouped = parallelism.group_projections or model.rank is None
        self._products = sum(len(group.products(self._grouped)) for group in normed)  # after a norm
        # Pieces of equal width (``model.low_rank``) into which their latents are divided.
        self._normed_pieces = sum(len(group.pieces(self._grouped)) for group in normed)
        # Widths of inputs, other than the residual, on which groups' outputs depend not through latents alone.
        self._inputs_read = {
            group.name: group.wide_in // self._split for group in groups if not group.norm and reads_input(model, group)
        }
        # Norms whose statistic only latents are scaled by.
        self._latent_norms = sum(not reads_input(model, group) for group in normed)
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
        self._rotated = 0
        if self._grouped and parallelism.context_parallel_size == 1:
            self._rotated = 2 * self.query if self.query == self.key_value else self.key_value
        # Torch's norm of whole rows where it has no kernel: an element's copy in fp32, and both of these, the row in
        # fp32 and the normed row before scaling. The residual itself is freed where such norms keep a copy of it.
        self._fp32_copy = PRECISE if element_bytes < PRECISE else 0
        self._composite_norm = PRECISE + self._fp32_copy
        self._freed = element_bytes if element_bytes < PRECISE else 0

    def embedding(self) -> int:
        """Bytes kept by the embedding: with a split vocabulary, the token's index and whether it is in the shard."""
        return 0 if self.sharding.residual else 8 + self.element_bytes

    def stream_start(self) -> int:
        """Bytes kept of the residual stream's start for its sums of squares, where the first block's is on the host.

        A reference keeps a copy in fp32, which ``head`` counts.
        """
        itself = self.kernels or self.element_bytes == PRECISE or not self.sharding.residual
        return self.residual * self.element_bytes if itself else 0

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
        attended = 0
        if self.parallelism.context_parallel_size > 1:
            in_segments = "output" in self._inputs_read and not traits.on_host
            attended = self._heads * PRECISE + (0 if in_segments else self.query * self.element_bytes)
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
        saved += sum(self._inputs_read.values()) * self.element_bytes
        if TRAITS[mode].slices and (self._size > 1 or TRAITS[mode].on_host):
            # This rank's slice of a block's latents, and of those that cross into it.
            return saved + sum(saved_latents(self.model, self.parallelism, crossed)) // self._size * self.element_bytes
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
            gradients += (
                (2 if crossed else 1)
                * (self._projections + self._projections_together)
                * (self.latent * self.element_bytes)
            )
        segments = traits.again == "segments"
        again = self._whole_block(crossed) - self.block(crossed, receives, "latent" if segments else mode)
        if segments and self.kernels:
            # One segment at a time, between two exchanges.
            attention = (3 if self.model.qk_norm else 2) * (self.query + self.key_value) + 3 * self.latent
            mlp = 3 * self._mlp + 2 * self.latent
            again = min(again, self.element_bytes * max(attention, mlp) + PRECISE * self._heads)
        return gradients + again

    def fp8_operand(self) -> int:
        """Most bytes of a product's operand in 8 bits: for gate and up together, their gradients."""
        widest = max(2 * self._mlp, self.query + 2 * self.key_value, self._projections_together * self.latent)
        return widest + PRECISE * self._projections_together

    def head(self) -> int:
        """Bytes kept by the final norm and the loss, including the last residual."""
        hidden, element = self.model.hidden_size, self.element_bytes
        loss = 8 + PRECISE + PRECISE // self._rows  # the target's index, the log-sum-exp, and the norm's statistic
        norm = (self.residual + hidden) * element
        if self.sharding.residual:
            norm += 0 if self.kernels else self.residual * self._fp32_copy
            # The gathered vectors in fp32, once scaled; on one rank a view with the statistic next to it.
            return norm + loss + hidden * PRECISE + (element if self._size == 1 and element == PRECISE else 0)
        return norm + loss + (0 if self.kernels else self.residual * (self._composite_norm - self._freed))

    def head_norm_backward(self) -> int:
        """Bytes held during the backward pass through the final norm, including all that ``head`` keeps."""
        hidden = self.model.hidden_size
        if self.sharding.residual:
            # Gradients in fp32: of the scaled rows, of the rows, and the summands of their scales' gradients.
            return self.head() + 3 * hidden * PRECISE
        # Torch's kernel has its input and output; composed of torch's operations, each summand is separate.
        return self.head() + (2 * hidden * self.element_bytes if self.kernels else 5 * hidden * PRECISE)

    def _whole_block(self, crossed: bool) -> int:
        element, width = self.element_bytes, self.residual
        activation = self.model.bottleneck_activation is not Activation.LINEAR
        widths = 2 * width + 2 * self.query + 2 * self.key_value + 3 * self._mlp
        saved = widths * element + self._heads * PRECISE

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
            gate = (0, 1, 3)[len(gate_matrices(self.model))]
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
            if self._scaled:  # reciprocal roots, in place of the residual's sums on one rank that nothing else reads
                more += PRECISE * (self._normed_pieces - (self._latent_norms if self._size == 1 else 0))
                if copies and self._size > 1 and self.parallelism.norm == "fused":  # of statistics, too
                    more -= self._sent_statistics
        else:
            more += self.residual * (self._products * self._composite_norm - 2 * self._freed)
        more += self._rotated * element
        if crossed:
            steps = PRECISE * self._projections * (3 if activation else 2)
            arrived = PRECISE * self._normed if self._scaled else 0
            gate = -self._projections * element if gate_matrices(self.model) else 0
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
