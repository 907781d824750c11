"""What a rank computes and moves for a micro-batch: in a block, and in the head.

Widths are this rank's, as in ``activations``. A product of T × k by k × n takes 2·T·k·n FLOPs and moves the three
matrices; its backward pass is two products of the same sizes, and adds the weight's gradient to a sum in fp32. All
blocks are assumed to be ones into which latents cross, and recomputed blocks to recompute their last product, too.

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
==========  ==========================================================================================================
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from boost_core.architecture.families import block_weights, projection_weights
from boost_core.architecture.projections import projection_groups
from boost_core.architecture.roles import MATRICES, Role, WeightSpec
from boost_core.architecture.sharding import Sharding, chosen_sharding
from boost_core.config.attention import LAST_QUERIES, SAMPLED_QUERIES
from boost_core.config.job import JobSpec
from boost_core.config.layout import Layout
from boost_core.config.model import ModelConfig
from boost_core.config.parallelism import TRAITS, ParallelismConfig, RecomputeMode
from boost_core.hardware import BYTES

_PRECISE = BYTES["fp32"]


@dataclass(frozen=True)
class Work:
    """Work of a device; a profile says how long it takes.

    Attributes:
        product_flops: FLOPs of matrix products.
        fp8_flops: FLOPs of products in 8 bits, not included in ``product_flops``.
        attention_flops: FLOPs of attention.
        moved_bytes: Bytes that products and passes read and write.
        starts: Number of product kernels launched.
    """

    product_flops: float = 0.0
    attention_flops: float = 0.0
    moved_bytes: float = 0.0
    starts: int = 0
    fp8_flops: float = 0.0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.product_flops + other.product_flops,
            self.attention_flops + other.attention_flops,
            self.moved_bytes + other.moved_bytes,
            self.starts + other.starts,
            self.fp8_flops + other.fp8_flops,
        )


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

    def work(self, element: int, fp8: bool = False) -> Work:
        """Return the work of one pass, given the bytes per element."""
        moved = self.rows * (self.inputs * self.inner + self.matrices * self.outer) + self.weights
        flops = 2 * self.rows * self.weights
        return Work(0.0 if fp8 else flops, 0.0, moved * element, self.starts, flops if fp8 else 0.0)


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


def dealt_tokens(job: JobSpec) -> Sequence[int]:
    """Tokens that a context parallel rank has of each part dealt by itself: a micro-batch, or its halves."""
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
    model: ModelConfig,
    parallelism: ParallelismConfig,
    mode: RecomputeMode,
    tokens: int,
    pairs: float,
    precision: str,
    scored: int,
) -> Passes:
    element, fp8 = BYTES[precision], precision == "fp8"
    sharding = chosen_sharding(model, parallelism)
    products = block_products(model, parallelism, tokens)
    works = [(each.role, each.work(element, fp8 and each.role is not Role.LATENT)) for each in products]
    down = sum((work for role, work in works if role is Role.DOWN_PROJECTION), Work())
    up = sum((work for role, work in works if role is not Role.DOWN_PROJECTION), Work())
    weights = sum(each.weights for each in products)
    width = model.hidden_size // (parallelism.tensor_parallel_size if sharding.wide else 1)
    attention_forward = Work(attention_flops=4 * width * tokens * pairs)
    attention_backward = Work(attention_flops=10 * width * tokens * pairs)
    forward_passes, backward_passes = _passes(model, parallelism, sharding)
    forward = down + up + attention_forward + Work(moved_bytes=forward_passes * tokens * element)
    backward = down + up + attention_backward + Work(moved_bytes=backward_passes * tokens * element)
    of_latents = up if parallelism.context_parallel_size > 1 else up + attention_forward
    again = {"nothing": Work(), "segments": of_latents, "all": forward}[TRAITS[mode].again]
    gradients = sum((each.work(element) for each in products), Work(moved_bytes=2 * _PRECISE * weights))
    return Passes(forward + Work(attention_flops=2 * width * tokens * scored), backward + again, gradients)


def block_products(model: ModelConfig, parallelism: ParallelismConfig, tokens: int) -> list[Product]:
    """All products of a block's forward pass on one rank."""
    sharding = chosen_sharding(model, parallelism)
    return [
        product
        for spec in block_weights(model, crossed=True).values()
        if (product := _product(spec, sharding, parallelism, tokens, model.rank or 0))
    ]


def _product(
    spec: WeightSpec, sharding: Sharding, parallelism: ParallelismConfig, tokens: int, rank: int
) -> Product | None:
    """Return the product with a weight; ``None`` for norms."""
    shape, axis = list(spec.shape), sharding.axes.get(spec.role)
    if axis is not None:
        shape[axis] //= parallelism.tensor_parallel_size
    if spec.role is Role.LATENT and len(shape) > 2:  # LaX's gate, whose rows are pieces of a latent
        count, side, _ = shape
        return Product(spec.role, tokens * rank // side, side, side, count, count, 1)
    if spec.role not in MATRICES:
        return None
    if spec.role is Role.UP_PROJECTION:  # a latent for each projection
        count, inner, outer = shape
        return Product(spec.role, tokens, inner, outer, count, count, 1 if parallelism.group_projections else count)
    inner, outer, count = shape[0], shape[-1], shape[1] if len(shape) > 2 else 1
    times = 1 if parallelism.group_projections else count
    return Product(spec.role, tokens, inner, outer, times, count, times)


def _passes(model: ModelConfig, parallelism: ParallelismConfig, sharding: Sharding) -> tuple[int, int]:
    """Return the elements per token that are read and written outside of products, forward and backward."""
    size = parallelism.tensor_parallel_size
    split = size if sharding.wide else 1
    residual = model.hidden_size // (size if sharding.residual else 1)
    turned, mlp = (model.hidden_size + model.key_value_size) // split, model.intermediate_size // split
    fused = sharding.residual and parallelism.norm == "fused"
    norm = 0 if fused else residual
    forward, backward = 6 * residual + 4 * norm + 2 * turned + 3 * mlp, 6 * residual + 8 * norm + 2 * turned + 5 * mlp
    scaled = _scaled_channels(model) // split
    forward, backward = forward + 3 * scaled, backward + 4 * scaled
    if model.qk_norm:
        forward, backward = forward + 4 * turned, backward + 8 * turned
    if model.latent_activation or (sharding.residual and parallelism.norm != "sync"):
        groups = projection_groups(model)
        latents = sum(len(group.wide_outs) for group in groups) * (model.rank or 0) // (size if sharding.latents else 1)
        crossings = 3 if model.lax is not None else 1  # sum and norm besides
        forward, backward = forward + 2 * crossings * latents, backward + 3 * crossings * latents
    return forward, backward


def _scaled_channels(model: ModelConfig) -> int:
    """Return the number of channels that a block's projections scale one by one."""
    weights = (projection_weights(model, group).values() for group in projection_groups(model))
    return sum(math.prod(spec.shape) for each in weights for spec in each if spec.role is Role.CHANNELS)


def head_work(job: JobSpec) -> Passes:
    """Return the work of the head and the loss."""
    tokens, element = rank_tokens(job), BYTES[job.training.precision]
    vocabulary = job.model.vocab_size // job.parallelism.tensor_parallel_size
    hidden = job.model.hidden_size
    moved = element * (tokens * (hidden + vocabulary) + hidden * vocabulary)
    logits = Work(2 * tokens * hidden * vocabulary, 0.0, moved, 1)
    pass_over = Work(moved_bytes=2 * element * tokens * vocabulary)
    weight = Work(moved_bytes=2 * _PRECISE * hidden * vocabulary)
    return Passes(logits + pass_over, logits + logits + pass_over, logits + weight)
