"""The configuration and the architecture agree on what a strategy can split."""

from itertools import product
from math import gcd
from typing import Any

import pytest

from boost_core.architecture.families import model_weights
from boost_core.architecture.sharding import chosen_sharding
from boost_core.config import ModelConfig, ParallelismConfig
from boost_core.config.strategy import strategy_problems

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
