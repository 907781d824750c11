"""The weights of each family; what strategies shard and exchange of them; parameters, FLOPs and pipeline stages.

======  =================================  =============================================================================
dense   y = x W                            the baseline
svd     y = z B, z = x A                   an ordinary LLaMA in low-rank form
cola    z = silu(x A)                      the gate keeps its own SiLU at 60M and 130M only (arXiv 2502.10940)
lax     z = act(LN(x A + G(z′)))           z′ is the same projection's latent in the previous block, which crosses
                                           through the gate G; act is that of its base (arXiv 2505.21732)
======  =================================  =============================================================================

Dense models use the published names of Hugging Face's LLaMA, whose matrices are d_out × d_in; low-rank ones those of
CoLA's code, which has ``cola_a`` (d_in × r) and ``cola_b`` (r × d_out) in place of a projection's ``weight``. LaX's
crossings, for which no names are published, are ``crossing`` beside the ``cola_a`` of the projection they cross into.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from itertools import accumulate, chain, groupby, pairwise
from typing import NamedTuple

from boost_core.config.base import counted
from boost_core.config.job import JobSpec
from boost_core.config.model import ModelConfig
from boost_core.config.parallelism import TRAITS, Layout, ParallelismConfig, RecomputeMode, StrategyName, strategy_of
from boost_core.config.training import OptimizerConfig
from boost_core.hardware import peak_flops_per_second

# The seven projections of a decoder block, in four groups that each share an input; the same in all families.


@dataclass(frozen=True)
class ProjectionGroup:
    """Projections of the same input.

    Attributes:
        name: Name of their module.
        published: Published name of each projection.
        wide_in: Input width.
        wide_outs: Output width of each projection; equal widths are adjacent.
        norm: Published name of the RMSNorm before them if they read the residual, otherwise ``None``.
    """

    name: str
    published: tuple[str, ...]
    wide_in: int
    wide_outs: tuple[int, ...]
    norm: str | None = None

    @property
    def runs(self) -> Sequence[range]:
        """The projections with each output width, which share a weight."""
        ends = accumulate((len(list(run)) for _, run in groupby(self.wide_outs)), initial=0)
        return [range(begin, end) for begin, end in pairwise(ends)]

    def products(self, grouped: bool) -> Sequence[range]:
        """The projections that each matrix product of the input computes.

        Args:
            grouped: Whether the projections share one product.
        """
        count = len(self.wide_outs)
        return [range(count)] if grouped else [range(index, index + 1) for index in range(count)]

    def pieces(self, grouped: bool) -> Sequence[range]:
        """The projections, of equal width, in each batched product of latents with their up-projections."""
        return self.runs if grouped else self.products(grouped=False)


def grouped_projections(model: ModelConfig) -> tuple[ProjectionGroup, ...]:
    """The projection groups of a block, in the order in which it computes them."""
    hidden, mlp, key_value = model.hidden_size, model.intermediate_size, model.key_value_size
    attention = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    return (
        ProjectionGroup("query_key_value", attention, hidden, (hidden, key_value, key_value), "input_layernorm"),
        ProjectionGroup("output", ("self_attn.o_proj",), hidden, (hidden,)),
        ProjectionGroup("gate_up", ("mlp.gate_proj", "mlp.up_proj"), hidden, (mlp, mlp), "post_attention_layernorm"),
        ProjectionGroup("down", ("mlp.down_proj",), mlp, (hidden,)),
    )


# A weight as a family declares it, and the properties by which optimizers group weights.


class Role(Enum):
    """What a weight does, which is all that a strategy needs to shard it."""

    EMBEDDING = "embedding"  # [V, d]
    DOWN_PROJECTION = "down"  # A: [d_in, g, r], for g projections of one input
    UP_PROJECTION = "up"  # B: [g, r, d_out]
    DENSE_IN = "dense in"  # out of the residual: [d_in, g, d_out]
    DENSE_OUT = "dense out"  # back into the residual: [d_in, d_out]
    CHANNELS = "channels"  # a factor for each channel of the residual, such as γ: [d]
    HEAD_CHANNELS = "head channels"  # a factor for each channel of a head; heads are split over ranks: [e]
    LATENT = "latent"  # operates on a whole latent: LaX's gates and norms
    HEAD = "head"  # [d, V]


FACTORS = frozenset({Role.DOWN_PROJECTION, Role.UP_PROJECTION})
MATRICES = FACTORS | {Role.DENSE_IN, Role.DENSE_OUT}

# The axis along which each role is split over the tensor parallel ranks; None if every rank has the whole weight.
SplitAxes = Mapping[Role, int | None]


@dataclass(frozen=True)
class WeightSpec:
    """One weight as the model declares it.

    Attributes:
        shape: Full shape, before sharding.
        role: What it does.
        start: Its initial values: a constant, or standard deviations of a normal distribution, either one for all or
            one for each projection along ``axis``.
        published: Names of the published tensors that it holds: one, or one for each projection along ``axis``.
        axis: The axis along which several projections' weights are stacked; ``None`` if it holds a single weight.
        transposed: Whether the published tensors are transposed.
    """

    shape: tuple[int, ...]
    role: Role
    start: float | tuple[float, ...]
    published: tuple[str, ...]
    axis: int | None = None
    transposed: bool = False


def moments_of(spec: WeightSpec, optimizer: OptimizerConfig) -> int:
    """Number of running means of a weight's gradient that an optimizer keeps."""
    return 1 if optimizer.kind == "muon" and spec.role in FACTORS else 2


@dataclass(frozen=True)
class ParamKind:
    """The properties shared by weights that are updated alike.

    Attributes:
        decay: Weight decay.
        split: Whether they are split over tensor parallel ranks; otherwise each rank has all of them.
        partial: Whether each tensor parallel rank computes only a part of their gradients.
        tied: Whether the first and last pipeline ranks both have them, and each computes a part of their gradients.
        custom_update: Whether the optimizer updates them by a special rule, for which it needs each weight whole.
        moments: Number of running means kept: 1 for the gradient only, 2 for its square as well.
    """

    decay: float
    split: bool
    partial: bool
    tied: bool
    custom_update: bool
    moments: int = 2

    @classmethod
    def of(cls, spec: WeightSpec, sharding: "Sharding", optimizer: OptimizerConfig, tied: bool) -> "ParamKind":
        """The kind of one weight; weights initialized to a constant do not decay."""
        decay = 0.0 if isinstance(spec.start, float) else optimizer.weight_decay
        custom_update = optimizer.kind != "adamw" and spec.role in FACTORS
        split, partial = sharding.axes[spec.role] is not None, spec.role in sharding.partial_gradients
        return cls(decay, split, partial, tied, custom_update, moments_of(spec, optimizer))

    @property
    def order(self) -> tuple[float, bool, bool, bool]:
        """Sort key that puts the largest groups first, so that most gradients do not wait for the few others."""
        return -self.decay, self.partial, self.tied, self.custom_update


Weights = dict[str, WeightSpec]

_STD = 0.02


def model_weights(model: ModelConfig) -> Weights:
    """Every weight of a model by its full name."""
    weights = {f"embedding.{name}": spec for name, spec in embedding_weights(model).items()}
    for layer in range(model.num_hidden_layers):
        for name, spec in block_weights(model, model.crosses_into(layer)).items():
            published = tuple(f"model.layers.{layer}.{each}" for each in spec.published)
            weights[f"blocks.{layer}.{name}"] = replace(spec, published=published)
    return weights | {f"head.{name}": spec for name, spec in head_weights(model).items()}


def embedding_weights(model: ModelConfig) -> Weights:
    """The embedding's weights."""
    shape = (model.vocab_size, model.hidden_size)
    return {"weight": WeightSpec(shape, Role.EMBEDDING, (_STD,), ("model.embed_tokens.weight",))}


def head_weights(model: ModelConfig) -> Weights:
    """The weights of the final norm and the head."""
    weights = {"scale": WeightSpec((model.hidden_size,), Role.CHANNELS, 1.0, ("model.norm.weight",))}
    if not model.tie_embeddings:
        shape = (model.hidden_size, model.vocab_size)
        weights["weight"] = WeightSpec(shape, Role.HEAD, (_STD,), ("lm_head.weight",), transposed=True)
    return weights


@lru_cache(1024)  # a scheduler asks for the same one with each number of replicas
def block_weights(model: ModelConfig, crossed: bool) -> Mapping[str, WeightSpec]:
    """The weights of a block, by their names within it.

    Args:
        model: The model.
        crossed: Whether latents of the previous block cross into it.
    """
    weights: Weights = {}
    for group in grouped_projections(model):
        weights |= {f"{group.name}.{name}": spec for name, spec in group_weights(model, group).items()}
        if crossed:
            weights |= {f"{group.name}.crossing.{name}": spec for name, spec in crossing_weights(model, group).items()}
    return weights


def group_weights(model: ModelConfig, group: ProjectionGroup) -> Weights:
    """The weights of a group's projections and of the norm before them, without crossings."""
    weights = projection_weights(model, group)
    if group.norm is not None:
        weights["scale"] = WeightSpec((group.wide_in,), Role.CHANNELS, 1.0, (f"{group.norm}.weight",))
    if model.qk_norm and group.name == "query_key_value":
        for name, published in (("query_scale", "q_norm"), ("key_scale", "k_norm")):
            shape, names = (model.head_size,), (f"self_attn.{published}.weight",)
            weights[name] = WeightSpec(shape, Role.HEAD_CHANNELS, 1.0, names)
    return weights


def factors_std(rank: int, wide_in: int, wide_out: int) -> float:
    """CoLA's initial standard deviation of both factors: r^(-1/4) (d_in + d_out)^(-1/4) (arXiv 2502.10940)."""
    return float((rank * (wide_in + wide_out)) ** -0.25)


def projection_weights(model: ModelConfig, group: ProjectionGroup) -> Weights:
    """The weights of a group's projections alone."""
    rank = model.rank
    if rank is None and group.norm is None:  # what writes to the residual has a single projection
        shape, names = (group.wide_in, *group.wide_outs), _each(group, range(1), "weight")
        return {"weight": WeightSpec(shape, Role.DENSE_OUT, (_STD,), names, transposed=True)}
    if rank is None:  # one matrix per output width
        return {
            f"weight_{index}": WeightSpec(
                (group.wide_in, len(run), group.wide_outs[run.start]), Role.DENSE_IN, (_STD,),
                _each(group, run, "weight"), axis=1, transposed=True,
            )
            for index, run in enumerate(group.runs)
        }  # fmt: skip
    # One A for all projections, and one B per output width.
    every = range(len(group.wide_outs))
    stds = tuple(factors_std(rank, group.wide_in, wide_out) for wide_out in group.wide_outs)
    shape = (group.wide_in, len(every), rank)
    weights = {"down": WeightSpec(shape, Role.DOWN_PROJECTION, stds, _each(group, every, "cola_a"), axis=1)}
    for index, run in enumerate(group.runs):
        shape = (len(run), rank, group.wide_outs[run.start])
        names = _each(group, run, "cola_b")
        weights[f"up_{index}"] = WeightSpec(shape, Role.UP_PROJECTION, (stds[run.start],), names, axis=0)
    return weights


def is_dense(model: ModelConfig) -> bool:
    """Whether the model's projections are all plain matrices."""
    return model.rank is None


def is_low_rank(model: ModelConfig) -> bool:
    """Whether the model's projections are all low-rank pairs, with nothing added."""
    return model.rank is not None and model.lax is None


def crossing_weights(model: ModelConfig, group: ProjectionGroup) -> Weights:
    """The weights of the crossings into a group's projections."""
    if model.lax is None:
        return {}
    count, rank = len(group.published), model.bottleneck_rank

    # A normal distribution with the variance of Kaiming-uniform: 1/(3n) for a linear map of n inputs.
    of_each: list[tuple[str, tuple[int, ...], float | tuple[float, ...]]] = [
        (name, (side, side), (math.sqrt(1 / (3 * side)),)) for name, side in gate_matrices(model).items()
    ]
    of_each += [("norm_scale", (rank,), 1.0), ("norm_shift", (rank,), 0.0)]
    return {
        name: WeightSpec((count, *shape), Role.LATENT, start, _each(group, range(count), f"crossing.{name}"), axis=0)
        for name, shape, start in of_each
    }


def gate_matrices(model: ModelConfig) -> dict[str, int]:
    """The square matrices of the gate that a crossing latent passes through, and the side of each."""
    if model.lax is None:
        return {}
    rank = model.bottleneck_rank
    # The sides a ≤ b of LaX's tensor gate: a·b = rank, as close to each other as possible.
    shorter = next(width for width in range(math.isqrt(rank), 0, -1) if rank % width == 0)
    gates = {"identity": {}, "dense": {"gate_matrix": rank}, "tensor": {"gate_a": shorter, "gate_b": rank // shorter}}
    return gates[model.lax.gate]


def _each(group: ProjectionGroup, projections: Iterable[int], name: str) -> tuple[str, ...]:
    return tuple(f"{group.published[index]}.{name}" for index in projections)


# The tensor parallel strategies: along which axis each splits every role, and what its ranks exchange.
#
# ========  ==============================  =================================
# strategy  all-reduced forward             contents
# ========  ==============================  =================================
# fullrank  2d, as two halves               attention and MLP output
# vanilla   5d + 2f (4d → GQA's widths)     the wide output of all seven pairs
# btp       7r                              the latents of all seven pairs
# ========  ==============================  =================================
#
# Counts are elements per block and token, with hidden size d, MLP size f and rank r (BOOST, arXiv 2512.12131). btp also
# exchanges the norms' sums of squares: as an extra column of a latent's payload (``fused``, this project's own) or in
# separate collectives. Under fullrank ranks have the residual vectors of a part of the tokens each (sequence
# parallelism, arXiv 2205.05198): an all-reduce becomes a reduce-scatter of what is added to them and an all-gather of
# what is read, which together send as much. What is read is gathered once more backward, rather than kept.


class Payload(NamedTuple):
    """What one collective carries per token.

    Attributes:
        elements: Elements of activations or their gradients: wide vectors or latents. Of an all-gather those of its
            result.
        statistics: Sums of squares for a norm.
        kind: ``all_reduce``, ``all_gather`` or ``reduce_scatter``.
    """

    elements: int
    statistics: int = 0
    kind: str = "all_reduce"

    def passed(self, ranks: int) -> int:
        """Elements per token, with statistics, that each of some ranks passes to the collective."""
        return (self.elements + self.statistics) // (ranks if self.kind == "all_gather" else 1)


class Exchanges(NamedTuple):
    """Collectives, forward and backward; and backward those of the forward pass whose results are not kept."""

    forward: Sequence[Payload]
    backward: Sequence[Payload]
    again: Sequence[Payload] = ()


@dataclass(frozen=True, eq=False)
class Sharding:
    """How a strategy splits a model.

    Attributes:
        name: Name of the strategy.
        axes: The axis along which each role is split.
        sequence: Whether ranks have the residual vectors of a part of the tokens each.
        partial_gradients: Weights of which each rank has all, but computes only a part of the gradient.
    """

    name: StrategyName
    axes: SplitAxes
    sequence: bool = False
    partial_gradients: frozenset[Role] = frozenset({Role.LATENT, Role.HEAD_CHANNELS})

    @property
    def residual(self) -> bool:
        """Whether the residual vectors, like the norms' scales, are split over the ranks; otherwise each is whole."""
        return self.axes[Role.CHANNELS] is not None

    @property
    def whole(self) -> bool:
        """Whether each rank has the whole residual stream: all vectors, and all of each."""
        return not (self.residual or self.sequence)

    @property
    def latents(self) -> bool:
        """Whether each rank has a slice of every latent."""
        return self.axes.get(Role.DOWN_PROJECTION) == 2

    @property
    def wide(self) -> bool:
        """Whether each rank has some of the heads and part of the MLP."""
        return 2 in (self.axes.get(Role.UP_PROJECTION), self.axes.get(Role.DENSE_IN))


def chosen_sharding(model: ModelConfig, parallelism: ParallelismConfig) -> Sharding:
    """The sharding that a job uses."""
    return _SHARDINGS[strategy_of(model, parallelism)]


def block_exchanges(model: ModelConfig, parallelism: ParallelismConfig) -> Exchanges:
    """The exchanges of one block."""
    both = zip(*(_exchanges(model, group, parallelism) for group in grouped_projections(model)), strict=True)
    return Exchanges(*(list(chain.from_iterable(payloads)) for payloads in both))


def saved_latents(model: ModelConfig, parallelism: ParallelismConfig, crossed: bool) -> Sequence[int]:
    """Elements per token of each whole latent that a block receives between two exchanges.

    Args:
        model: The model.
        parallelism: How it is split; its strategy is btp.
        crossed: Whether latents of the previous block cross into it.
    """
    rank, grouped = model.rank or 0, parallelism.group_projections
    groups = grouped_projections(model)
    own = [len(product) * rank for group in groups for product in group.products(grouped)]
    return own + [len(piece) * rank for group in groups if crossed for piece in group.pieces(grouped)]


def _exchanges(model: ModelConfig, group: ProjectionGroup, parallelism: ParallelismConfig) -> Exchanges:
    """The exchanges of a projection group."""
    products = group.products(parallelism.group_projections)
    match strategy_of(model, parallelism):
        case "btp":
            # Latents with the preceding norm's statistic; backward, the gradients of both, apart only under ``sync``.
            latents = [Payload(len(product) * model.bottleneck_rank) for product in products]
            if group.norm is None:
                return Exchanges(latents, latents)
            apart = latents + [Payload(0, 1) for _ in products]
            together = [Payload(latent.elements, 1) for latent in latents]
            forward = together if parallelism.norm == "fused" else apart
            return Exchanges(forward, apart if parallelism.norm == "sync" else together)
        case "vanilla":
            # Wide outputs, those of equal width together; backward, the gradient of each product's wide input.
            pieces = group.pieces(parallelism.group_projections)
            wide = [Payload(len(piece) * group.wide_outs[piece.start]) for piece in pieces]
            return Exchanges(wide, [Payload(group.wide_in) for _ in products])
        case "fullrank":
            # What is read from the residual, gathered, and what is added, scattered; backward, the gradients of both.
            if group.norm is None:
                added = sum(group.wide_outs)
                return Exchanges([Payload(added, kind="reduce_scatter")], [Payload(added, kind="all_gather")])
            read = [Payload(group.wide_in, kind="all_gather")]
            return Exchanges(read, [Payload(group.wide_in, kind="reduce_scatter")], read)


BTP = Sharding("btp", {
    Role.EMBEDDING: 1, Role.DOWN_PROJECTION: 0, Role.UP_PROJECTION: 2, Role.CHANNELS: 0, Role.LATENT: None,
    Role.HEAD_CHANNELS: None, Role.HEAD: 1,
})  # fmt: skip
VANILLA = Sharding(
    "vanilla", {Role.EMBEDDING: 0, Role.DOWN_PROJECTION: 2, Role.UP_PROJECTION: 1, Role.CHANNELS: None, Role.HEAD: 1}
)
FULLRANK = Sharding("fullrank", {
    Role.EMBEDDING: 0, Role.DENSE_IN: 2, Role.DENSE_OUT: 0, Role.CHANNELS: None, Role.HEAD_CHANNELS: None, Role.HEAD: 1,
}, sequence=True, partial_gradients=frozenset({Role.LATENT, Role.HEAD_CHANNELS, Role.CHANNELS}))  # fmt: skip
_SHARDINGS = {sharding.name: sharding for sharding in (BTP, VANILLA, FULLRANK)}


# Parameter counts of a model.


def block_matrix_parameters(model: ModelConfig) -> int:
    """Return the parameters in the matrices of one block: d_in · d_out dense, r (d_in + d_out) for a low-rank pair."""
    return sum(math.prod(spec.shape) for spec in block_weights(model, crossed=False).values() if spec.role in MATRICES)


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


def precise_step_flops(kind: str, model: ModelConfig, layers: int, tensor_parallel_size: int) -> float:
    """Return a rank's FLOPs in fp64 for an exact step of LORO, or Muon's update, of this many blocks' factors.

    LORO (``optim.riemannian_step``) by Golub & Van Loan, Matrix Computations, 4th ed.: 21 n³ for a singular value
    decomposition with both bases (§8.6), and 9 n³ for one of a symmetric matrix (§8.3). A pair has one of 2r × 2r, two
    of r × r for pseudoinverses, and eight symmetric ones, which all tensor parallel ranks repeat; and 26 r² for each
    row of its two factors, in products.

    Muon (``optim.orthogonalized``): a factor's five Newton-Schulz steps are four products of r × r each, which all
    tensor parallel ranks repeat; its Gram matrix and the result take 4 r² for each row.

    Args:
        kind: ``loro`` or ``muon``.
        model: The model.
        layers: Number of blocks.
        tensor_parallel_size: Ranks over which the rows are split.
    """
    rank, pairs = model.bottleneck_rank, sum(len(group.published) for group in grouped_projections(model))
    rows = block_matrix_parameters(model) // rank
    of_a_pair, of_a_row = {"loro": (21 * 8 + 2 * 21 + 8 * 9, 26), "muon": (5 * 4 * 2 * 2, 4)}[kind]
    return layers * (of_a_pair * pairs * rank**3 + of_a_row * rows * rank**2 / tensor_parallel_size)


def model_flops_per_token(model: ModelConfig, sequence_length: int, attended: float = 1.0) -> int:
    """Return the FLOPs of one token's forward and backward pass, without recomputation.

    Two per matrix parameter forward and four backward, plus the attention scores counted in full
    (12·L·d·s, or 12·L·d·w with a sliding window w < s), as in the PaLM paper's appendix B (arXiv 2204.02311). The
    embedding look-up is free. Only the share ``attended`` of the scores counts; see ``TrainingConfig.attended_share``.
    """
    blocks = model.num_hidden_layers * block_flops_per_token(model, sequence_length, attended)
    return blocks + _crossing_flops_per_token(model) + head_flops_per_token(model)


def hardware_flops_per_token(
    model: ModelConfig, parallelism: ParallelismConfig, sequence_length: int, attended: float = 1.0
) -> float:
    """Return the FLOPs that all tensor parallel ranks compute per token, with duplicated and recomputed work."""
    block = block_flops_per_token(model, sequence_length, attended, parallelism)
    crossing = parallelism.tensor_parallel_size * _crossing_flops_per_token(model) / model.num_hidden_layers
    modes = parallelism.modes_of_all(model.num_hidden_layers)
    blocks = sum(count * (1 + RECOMPUTED[TRAITS[mode].again]) for mode, count in modes.items())
    return blocks * (block + crossing) + head_flops_per_token(model)


def block_flops_per_token(
    model: ModelConfig, sequence_length: int, attended: float = 1.0, parallelism: ParallelismConfig | None = None
) -> int:
    """Return the FLOPs per token of one block: the model's, or, given ``parallelism``, of all tensor parallel ranks.

    The matrices are divided among the ranks, and so are the heads, except under vanilla: there queries, keys and values
    are whole on every rank, and each computes the attention of all heads.
    """
    scores, ranks = 12 * model.hidden_size * min(sequence_length, model.sliding_window or sequence_length), 1
    if parallelism is not None and not chosen_sharding(model, parallelism).wide:
        ranks = parallelism.tensor_parallel_size
    return 6 * block_matrix_parameters(model) + ranks * round(attended * scores)


def _crossing_flops_per_token(model: ModelConfig) -> int:
    """FLOPs per token of the gates that latents pass through between blocks (LaX), on each tensor parallel rank."""
    crossed = sum(map(model.crosses_into, range(model.num_hidden_layers)))
    latents = sum(len(group.published) for group in grouped_projections(model)) * (model.rank or 0)
    # A matrix multiplies pieces of a latent that are as long as its side.
    return 6 * crossed * latents * sum(gate_matrices(model).values())


def head_flops_per_token(model: ModelConfig) -> int:
    """Return the FLOPs per token of the language-model head."""
    return 6 * model.vocab_size * model.hidden_size


class FlopRates(NamedTuple):
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
        needed = model_flops_per_token(spec.model, length, attended)
        computed = hardware_flops_per_token(spec.model, parallelism, length, attended)
        return cls(needed, computed, None if peak is None else parallelism.world_size * peak)

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
    listed = f"parallelism.recompute lists {counted(recompute[wrong].blocks, 'block')} for stage {wrong}"
    has = f"{Layout.of(parallelism).replica_text}, which has {sizes[wrong]}"
    return f"{listed} of {has}; make its entries add up to {', '.join(map(str, sizes))}"


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
    block = block_flops_per_token(model, sequence_length, parallelism=parallelism)
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
