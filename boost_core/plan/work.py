"""What a rank computes and moves of a micro-batch: in a block, and in the head.

Widths are this rank's (``memory.Activations``). A product of T × k by k × n takes 2·T·k·n FLOPs and moves the three
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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
    grouped_projections,
    head_weights,
    projection_weights,
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
