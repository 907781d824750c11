"""Exact at any legal shape: hypothesis draws the shape, the family, the strategy and the batch."""

from typing import Any

import pytest
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from boost_core.config import ModelConfig, ParallelismConfig
from boost_core.config.parallelism import strategy_of, strategy_problems
from tests.numerics import reference
from tests.numerics.sharded import batch, errors_of_cells, full_weights, token_weights
from tests.ranks import Ranks

FAMILIES = [
    {"family": "dense"},
    {"family": "svd"},
    {"family": "cola"},
    {"family": "lax", "lax": {"base": "svd", "gate": "dense"}},
    {"family": "lax", "lax": {"base": "cola", "gate": "tensor"}},
    {"family": "lax", "lax": {"base": "cola", "gate": "identity"}},
]


@st.composite
def shapes(draw: st.DrawFn) -> dict[str, Any]:
    key_value_heads = draw(st.sampled_from([2, 4, 6]))
    heads = key_value_heads * draw(st.integers(1, 3))
    hidden_size = heads * 2 * draw(st.integers(1, 4))
    family = draw(st.sampled_from(FAMILIES))
    # LaX's norm makes ±1 of any two latents, so that their gradient is only what rounding leaves: no rank of 2 there.
    narrowest = 2 if family["family"] == "lax" else 1
    low_rank = {} if family["family"] == "dense" else {"rank": 2 * draw(st.integers(narrowest, hidden_size // 2))}
    return family | low_rank | {
        "hidden_size": max(8, hidden_size),
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "intermediate_size": 2 * draw(st.integers(4, 60)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "vocab_size": 2 * draw(st.integers(1, 200)),
        "tie_embeddings": draw(st.booleans()),
        "gate_activation": draw(st.sampled_from([None, True, False])),
    }  # fmt: skip


@st.composite
def choices(draw: st.DrawFn) -> dict[str, Any]:
    return {
        "tensor_parallel_size": 2,
        "strategy": draw(st.sampled_from([None, "vanilla", "btp"])),
        "norm": draw(st.sampled_from(["fused", "online_paper", "sync"])),
        "group_projections": draw(st.booleans()),
        "recompute": draw(st.sampled_from(["none", "latent", "shared", "full"])),
        "split_micro_batch": draw(st.booleans()),
    }


@pytest.mark.nightly
@settings(
    max_examples=40, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture],
)  # fmt: skip
@given(shape=shapes(), choice=choices(), sequences=st.integers(1, 3), length=st.integers(1, 9))
def test_any_legal_shape_is_exact(
    ranks: Ranks, shape: dict[str, Any], choice: dict[str, Any], sequences: int, length: int
) -> None:
    assume(shape["hidden_size"] % (2 * shape["num_attention_heads"]) == 0)
    model, parallelism = ModelConfig.model_validate(shape), ParallelismConfig.model_validate(choice)
    assume(not strategy_problems(model, parallelism))
    # Halves of one sequence are not computed again.
    assume(not (parallelism.split_micro_batch and sequences == 1 and parallelism.recompute != "none"))
    assume(strategy_of(model, parallelism) != "fullrank" or length % 2 == 0)
    leaves = {name: weight.clone().requires_grad_() for name, weight in full_weights(model).items()}
    loss = reference.token_losses(model, leaves, *batch(model, sequences, length))
    (loss * token_weights(loss.numel())).sum().backward()
    gradients = {name: leaf.grad for name, leaf in leaves.items() if leaf.grad.norm() > 1e-12}
    for (errors,) in ranks.run(2, errors_of_cells, model, [parallelism], sequences, length, loss.detach(), gradients):
        assert max(errors.values()) < 1e-10, errors
