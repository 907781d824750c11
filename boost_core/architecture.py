"""The weights of each family.

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
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from itertools import accumulate, chain, groupby, pairwise
from typing import NamedTuple

from boost_core.config.model import ModelConfig
from boost_core.config.parallelism import TRAITS, ParallelismConfig, RecomputeMode, StrategyName, chosen_strategy
from boost_core.config.training import OptimizerConfig

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


@lru_cache(1024)  # a search asks for the same ones with each layout
def reads_input(model: ModelConfig, group: ProjectionGroup) -> bool:
    """Whether a group's outputs depend on its input other than through latents, as not all weights are factors."""
    return any(spec.role not in FACTORS for spec in projection_weights(model, group).values())


def is_dense(model: ModelConfig) -> bool:
    """Whether the model's projections are all plain matrices."""
    return _block_roles(model) == MATRICES - FACTORS


def is_low_rank(model: ModelConfig) -> bool:
    """Whether the model's projections are all low-rank pairs, with nothing added."""
    return _block_roles(model) == FACTORS


def _block_roles(model: ModelConfig) -> set[Role]:
    """The roles of what a block's projections and crossings are made of."""
    groups = grouped_projections(model)
    weights = (projection_weights(model, group) | crossing_weights(model, group) for group in groups)
    return {spec.role for of_group in weights for spec in of_group.values()}


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


@dataclass(frozen=True)
class Payload:
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

    @property
    def total(self) -> int:
        """Elements and statistics together."""
        return self.elements + self.statistics

    def passed(self, ranks: int) -> int:
        """Elements per token that each of some ranks passes to the collective."""
        return self.total // ranks if self.kind == "all_gather" else self.total


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
        exchanges: The exchanges of a model's projection group.
        sequence: Whether ranks have the residual vectors of a part of the tokens each.
    """

    name: StrategyName
    axes: SplitAxes
    exchanges: Callable[[ModelConfig, ProjectionGroup, ParallelismConfig], Exchanges]
    sequence: bool = False

    @property
    def residual(self) -> bool:
        """Whether the residual vectors, like the norms' scales, are split over the ranks; otherwise each is whole."""
        return self.axes[Role.CHANNELS] is not None

    @property
    def whole(self) -> bool:
        """Whether each rank has the whole residual stream: all vectors, and all of each."""
        return not (self.residual or self.sequence)

    @property
    def partial_gradients(self) -> frozenset[Role]:
        """Weights of which each rank has all, but computes only a part of the gradient."""
        always = frozenset({Role.LATENT, Role.HEAD_CHANNELS})
        return always | {Role.CHANNELS} if self.sequence else always

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
    return _SHARDINGS[chosen_strategy(model, parallelism)]


def block_exchanges(model: ModelConfig, parallelism: ParallelismConfig) -> Exchanges:
    """The exchanges of one block."""
    exchanges = chosen_sharding(model, parallelism).exchanges
    both = zip(*(exchanges(model, group, parallelism) for group in grouped_projections(model)), strict=True)
    return Exchanges(*(list(chain.from_iterable(payloads)) for payloads in both))


def micro_batch_payloads(model: ModelConfig, parallelism: ParallelismConfig, mode: RecomputeMode) -> Sequence[Payload]:
    """One block's collectives per micro-batch: forward, backward, and forward again under full recomputation."""
    exchanges = block_exchanges(model, parallelism)
    again = exchanges.forward if TRAITS[mode].again == "all" else ()
    return [*exchanges.forward, *exchanges.backward, *exchanges.again, *again]


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


def _btp(model: ModelConfig, group: ProjectionGroup, parallelism: ParallelismConfig) -> Exchanges:
    """Latents with the preceding norm's statistic; backward, the gradients of both, apart only under ``sync``."""
    products = group.products(parallelism.group_projections)
    latents = [Payload(len(product) * model.bottleneck_rank) for product in products]
    if group.norm is None:
        return Exchanges(latents, latents)
    apart = latents + [Payload(0, 1) for _ in products]
    together = [Payload(latent.elements, 1) for latent in latents]
    return Exchanges(
        together if parallelism.norm == "fused" else apart, apart if parallelism.norm == "sync" else together
    )


def _vanilla(model: ModelConfig, group: ProjectionGroup, parallelism: ParallelismConfig) -> Exchanges:  # noqa: ARG001
    """Wide outputs, those of equal width together; backward, the gradient of each product's wide input."""
    pieces = group.pieces(parallelism.group_projections)
    return Exchanges(
        [Payload(len(piece) * group.wide_outs[piece.start]) for piece in pieces],
        [Payload(group.wide_in) for _ in group.products(parallelism.group_projections)],
    )


def _fullrank(model: ModelConfig, group: ProjectionGroup, parallelism: ParallelismConfig) -> Exchanges:  # noqa: ARG001
    """What is read from the residual, gathered, and what is added, scattered; backward, the gradients of both."""
    if group.norm is None:
        added = sum(group.wide_outs)
        return Exchanges([Payload(added, kind="reduce_scatter")], [Payload(added, kind="all_gather")])
    read = [Payload(group.wide_in, kind="all_gather")]
    return Exchanges(read, [Payload(group.wide_in, kind="reduce_scatter")], read)


BTP = Sharding(
    "btp",
    {
        Role.EMBEDDING: 1, Role.DOWN_PROJECTION: 0, Role.UP_PROJECTION: 2, Role.CHANNELS: 0, Role.LATENT: None,
        Role.HEAD_CHANNELS: None, Role.HEAD: 1,
    },
    _btp,
)  # fmt: skip
VANILLA = Sharding(
    "vanilla",
    {Role.EMBEDDING: 0, Role.DOWN_PROJECTION: 2, Role.UP_PROJECTION: 1, Role.CHANNELS: None, Role.HEAD: 1},
    _vanilla,
)
FULLRANK = Sharding(
    "fullrank",
    {
        Role.EMBEDDING: 0, Role.DENSE_IN: 2, Role.DENSE_OUT: 0, Role.CHANNELS: None, Role.HEAD_CHANNELS: None,
        Role.HEAD: 1,
    },
    _fullrank,
    sequence=True,
)  # fmt: skip
_SHARDINGS = {sharding.name: sharding for sharding in (BTP, VANILLA, FULLRANK)}
