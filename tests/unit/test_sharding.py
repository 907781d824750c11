"""The configuration and the architecture agree on what a strategy can split, and on what outputs are made of."""

import json
from collections.abc import Iterator
from itertools import product
from math import gcd
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from boost_core import architecture
from boost_core.architecture import (
    FACTORS,
    ProjectionGroup,
    Role,
    Weights,
    WeightSpec,
    chosen_sharding,
    grouped_projections,
    model_weights,
    projection_weights,
)
from boost_core.config import JobSpec, Layout, ModelConfig, ParallelismConfig, load_job
from boost_core.config.job import layout_problems
from boost_core.config.parallelism import cannot_send_latents, strategy_problems
from boost_core.config.training import TrainingConfig
from boost_core.convert.published_config import model_type

SHAPE = {
    "hidden_size": 48, "intermediate_size": 60, "num_hidden_layers": 2, "num_attention_heads": 12, "vocab_size": 264,
}  # fmt: skip
MODELS = [
    {"family": "dense"},
    {"family": "dense", "num_key_value_heads": 4},
    {"family": "svd", "rank": 9},
    {"family": "cola", "rank": 10, "num_key_value_heads": 6, "tie_embeddings": True},
    {"family": "lax", "rank": 15, "lax": {"gate": "tensor"}},
]


@pytest.mark.parametrize("changes", MODELS, ids=str)
def test_what_the_configuration_allows_is_what_divides_every_weight_and_the_heads(changes: dict[str, Any]) -> None:
    model, seen = ModelConfig.model_validate(SHAPE | changes), set()
    for strategy, size in product(("btp", "vanilla", "fullrank"), range(1, 16)):
        parallelism = ParallelismConfig.model_validate({"strategy": strategy, "tensor_parallel_size": size})
        problems = strategy_problems(model, parallelism)
        if any(problem.field == ("parallelism", "strategy") for problem in problems):
            continue
        sharding = chosen_sharding(model, parallelism)
        axes = [(spec.shape, sharding.axes[spec.role]) for spec in model_weights(model).values()]
        sizes = [shape[axis] for shape, axis in axes if axis is not None]
        if sharding.wide:
            sizes += [model.num_attention_heads, model.key_value_heads]
        assert (not problems) == (gcd(*sizes) % size == 0), (strategy, size)
        seen.add(not problems)
    assert seen == {True, False}


def test_dense_ranks_have_equal_parts_of_a_sequences_tokens(tmp_path: Path) -> None:
    def written(length: int) -> str:
        model, training = SHAPE | {"family": "dense"}, {"sequence_length": length, "steps": 1}
        spec = {"name": "odd", "model": model, "parallelism": {"tensor_parallel_size": 2}, "training": training}
        return json.dumps(spec)

    file = tmp_path / "job.json"
    file.write_text(written(64))
    load_job(file)
    file.write_text(written(63))
    with pytest.raises(ValueError, match="2 does not divide the 63 tokens of a sequence on a rank"):
        load_job(file)
    # Records of jobs that were accepted before are read all the same, and no plan proposes such a layout.
    spec = JobSpec.model_validate_json(written(63))
    assert spec.layouts() == (Layout(2, 1, 1),)
    assert layout_problems(spec.model, spec.parallelism, spec.training, spec.optimizer, 0)


@pytest.mark.parametrize("changes", MODELS, ids=str)
def test_they_agree_on_what_is_made_of_latents_alone(changes: dict[str, Any]) -> None:
    model = ModelConfig.model_validate(SHAPE | changes)
    weights = [projection_weights(model, group) for group in grouped_projections(model)]
    roles = {spec.role for of_group in weights for spec in of_group.values()}
    assert model.outputs_from_latents is (roles <= FACTORS)


@pytest.fixture
def scaled() -> Iterator[ModelConfig]:
    """A model whose queries and attention outputs get their projections' inputs added, each channel scaled."""
    plain = architecture.projection_weights

    def with_channels(model: ModelConfig, group: ProjectionGroup) -> Weights:
        weights = plain(model, group)
        if group.wide_in in group.wide_outs:
            weights["channels"] = WeightSpec((group.wide_in,), Role.CHANNELS, 0.0, (f"{group.published[0]}.channels",))
        return weights

    with (
        patch.object(architecture, "projection_weights", with_channels),
        patch.object(ModelConfig, "outputs_from_latents", False),
    ):
        yield ModelConfig.model_validate(SHAPE | {"family": "svd", "rank": 12})


def test_what_takes_outputs_for_products_of_latents_is_refused(scaled: ModelConfig) -> None:
    for choice, says in (({"strategy": "vanilla"}, "adds to their products"), ({"norm": "sync"}, "use fused")):
        (problem,) = strategy_problems(scaled, ParallelismConfig.model_validate(choice))
        assert says in problem.message
    training = TrainingConfig(steps=1, sequence_length=8)
    assert "not computed from latents alone" in str(cannot_send_latents(scaled, ParallelismConfig(), training))
    with pytest.raises(ValueError, match="nor modeling_boost"):
        model_type(scaled)
