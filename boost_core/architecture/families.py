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
from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import lru_cache

from boost_core.architecture.projections import ProjectionGroup, projection_groups
from boost_core.architecture.roles import FACTORS, MATRICES, Role, WeightSpec
from boost_core.config.model import ModelConfig

Weights = dict[str, WeightSpec]

_STD = 0.02


def model_weights(model: ModelConfig) -> Weights:
    """Every weight of a model by its full name."""
    found = {f"embedding.{name}": spec for name, spec in embedding_weights(model).items()}
    for layer in range(model.num_hidden_layers):
        for name, spec in block_weights(model, model.crosses_into(layer)).items():
            published = tuple(f"model.layers.{layer}.{each}" for each in spec.published)
            found[f"blocks.{layer}.{name}"] = replace(spec, published=published)
    return found | {f"head.{name}": spec for name, spec in head_weights(model).items()}


def embedding_weights(model: ModelConfig) -> Weights:
    """The embedding's weights."""
    shape = (model.vocab_size, model.hidden_size)
    return {"weight": WeightSpec(shape, Role.EMBEDDING, (_STD,), ("model.embed_tokens.weight",))}


def head_weights(model: ModelConfig) -> Weights:
    """The weights of the final norm and the head."""
    found = {"scale": _norm_scale(model.hidden_size, "model.norm")}
    if not model.tie_embeddings:
        shape = (model.hidden_size, model.vocab_size)
        found["weight"] = WeightSpec(shape, Role.HEAD, (_STD,), ("lm_head.weight",), transposed=True)
    return found


@lru_cache(1024)  # a scheduler asks for the same one with each number of replicas
def block_weights(model: ModelConfig, crossed: bool) -> Mapping[str, WeightSpec]:
    """The weights of a block, by their names within it.

    Args:
        model: The model.
        crossed: Whether latents of the previous block cross into it.
    """
    found: Weights = {}
    for group in projection_groups(model):
        found |= {f"{group.name}.{name}": spec for name, spec in group_weights(model, group).items()}
        if crossed:
            found |= {f"{group.name}.crossing.{name}": spec for name, spec in crossing_weights(model, group).items()}
    return found


def group_weights(model: ModelConfig, group: ProjectionGroup) -> Weights:
    """The weights of a group's projections and of the norm before them, without crossings."""
    found = projection_weights(model, group)
    if group.norm is not None:
        found["scale"] = _norm_scale(group.wide_in, group.norm)
    if model.qk_norm and group.name == "query_key_value":
        for name, published in (("query_scale", "q_norm"), ("key_scale", "k_norm")):
            shape, names = (model.head_size,), (f"self_attn.{published}.weight",)
            found[name] = WeightSpec(shape, Role.HEAD_CHANNELS, 1.0, names)
    return found


def projection_weights(model: ModelConfig, group: ProjectionGroup) -> Weights:
    """The weights of a group's projections alone."""
    return _dense(group) if model.rank is None else _low_rank(group, model.rank)


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
    groups = projection_groups(model)
    weights = (projection_weights(model, group) | crossing_weights(model, group) for group in groups)
    return {spec.role for of_group in weights for spec in of_group.values()}


def crossing_weights(model: ModelConfig, group: ProjectionGroup) -> Weights:
    """The weights of the crossings into a group's projections."""
    if model.lax is None:
        return {}
    count, rank = len(group.published), model.bottleneck_rank

    def of_each(name: str, shape: tuple[int, ...], start: float | tuple[float, ...]) -> WeightSpec:
        return WeightSpec((count, *shape), Role.LATENT, start, _each(group, range(count), f"crossing.{name}"), axis=0)

    # A normal distribution with the variance of Kaiming-uniform: 1/(3n) for a linear map of n inputs.
    gate = {
        name: of_each(name, (side, side), (math.sqrt(1 / (3 * side)),)) for name, side in gate_matrices(model).items()
    }
    return gate | {name: of_each(name, (rank,), start) for name, start in (("norm_scale", 1.0), ("norm_shift", 0.0))}


def gate_matrices(model: ModelConfig) -> dict[str, int]:
    """The square matrices of the gate that a crossing latent passes through, and the side of each."""
    if model.lax is None:
        return {}
    rank = model.bottleneck_rank
    shorter, longer = balanced_factors(rank)
    gates = {"identity": {}, "dense": {"gate_matrix": rank}, "tensor": {"gate_a": shorter, "gate_b": longer}}
    return gates[model.lax.gate]


def balanced_factors(rank: int) -> tuple[int, int]:
    """The sides a ≤ b of LaX's tensor gate: a·b = rank, as close to each other as possible."""
    shorter = next(width for width in range(math.isqrt(rank), 0, -1) if rank % width == 0)
    return shorter, rank // shorter


def _dense(group: ProjectionGroup) -> Weights:
    """One matrix per output width; groups that write to the residual have a single projection."""
    if group.norm is None:
        shape, names = (group.wide_in, *group.wide_outs), _each(group, range(1), "weight")
        return {"weight": WeightSpec(shape, Role.DENSE_OUT, (_STD,), names, transposed=True)}
    return {
        f"weight_{index}": WeightSpec(
            (group.wide_in, len(run), group.wide_outs[run.start]), Role.DENSE_IN, (_STD,),
            _each(group, run, "weight"), axis=1, transposed=True,
        )
        for index, run in enumerate(group.runs)
    }  # fmt: skip


def _low_rank(group: ProjectionGroup, rank: int) -> Weights:
    """One A for all projections, and one B per output width."""
    every = range(len(group.wide_outs))
    stds = tuple(_cola_std(rank, group.wide_in, wide_out) for wide_out in group.wide_outs)
    shape = (group.wide_in, len(every), rank)
    found = {"down": WeightSpec(shape, Role.DOWN_PROJECTION, stds, _each(group, every, "cola_a"), axis=1)}
    for index, run in enumerate(group.runs):
        shape = (len(run), rank, group.wide_outs[run.start])
        names = _each(group, run, "cola_b")
        found[f"up_{index}"] = WeightSpec(shape, Role.UP_PROJECTION, (stds[run.start],), names, axis=0)
    return found


def _cola_std(rank: int, wide_in: int, wide_out: int) -> float:
    """CoLA's initial standard deviation of A and B, r^(-1/4) (d_in + d_out)^(-1/4) (arXiv 2502.10940)."""
    return float((rank * (wide_in + wide_out)) ** -0.25)


def _norm_scale(width: int, published: str) -> WeightSpec:
    return WeightSpec((width,), Role.CHANNELS, 1.0, (f"{published}.weight",))


def _each(group: ProjectionGroup, projections: Iterable[int], name: str) -> tuple[str, ...]:
    return tuple(f"{group.published[index]}.{name}" for index in projections)
