"""What plans and reports say of sparse attention."""

from pathlib import Path
from typing import Any

import pytest

from boost_core.architecture import FlopRates, hardware_flops_per_token, model_flops_per_token
from boost_core.config import JobSpec
from boost_core.config.model import LAST_QUERIES, SAMPLED_QUERIES, SparseAttentionConfig
from boost_core.config.parallelism import RecomputeMode
from boost_core.plan.memory import index_bytes
from boost_core.plan.report import plan
from boost_core.plan.throughput import block_work
from boost_core.train.loop import RECENT_STEPS, RecallWatch
from tests.jobs import tiny_job

LENGTH = 65536
SPARSE = {"kind": "vertical_slash", "budget": 0.05}


def job(attention: dict[str, Any] | None, recompute: str = "none") -> JobSpec:
    training = {"sequence_length": LENGTH, "micro_batch_size": 1, "attention": attention}
    parallelism = {"tensor_parallel_size": 1, "recompute": recompute}
    return tiny_job(Path("corpus"), "checkpoints", training=training, parallelism=parallelism)


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_the_budgets_pairs_are_counted_and_the_queries_that_choose(recompute: RecomputeMode) -> None:
    dense, sparse = (block_work(job(attention, recompute), recompute) for attention in (None, SPARSE))
    choosing = 2 * 32 * LENGTH * (LAST_QUERIES + SAMPLED_QUERIES)
    assert sparse.all.attention_flops - choosing == pytest.approx(0.05 * dense.all.attention_flops)
    assert sparse.forward.attention_flops - choosing == pytest.approx(0.05 * dense.forward.attention_flops)
    assert sparse.all.product_flops == dense.all.product_flops


def test_utilization_is_of_the_budgeted_attention() -> None:
    spec = job(SPARSE)
    model, length = spec.model, LENGTH
    scores = 2 * 12 * 32 * length
    dense = model_flops_per_token(model, length)
    assert dense - model_flops_per_token(model, length, 0.05) == pytest.approx(0.95 * scores, rel=1e-6)
    rates = FlopRates.of(spec, "")
    assert rates.model == model_flops_per_token(model, length, 0.05)
    assert rates.hardware == hardware_flops_per_token(model, spec.parallelism, length, 0.05)
    assert plan(spec).flops_per_token == rates.model


def test_no_index_is_larger_than_planned() -> None:
    """All of the budget in the verticals that add fewest pairs: those at the end of the document."""
    of = SparseAttentionConfig.model_validate(SPARSE)
    room, verticals, slashes = of.pairs(LENGTH) - of.always_pairs(LENGTH), 0, 0
    for block in range(LENGTH // 64 - of.near_blocks - 1, -1, -1):
        added = LENGTH - 64 * (block + of.near_blocks)
        taken = min(64, room // added)
        verticals, room = verticals + taken, room - taken * added
    room = of.pairs(LENGTH) - of.always_pairs(LENGTH)
    for distance in range(LENGTH // 64 - 1, of.near_blocks, -1):
        slashes += (room := room - 64 * (LENGTH - 64 * distance)) > 0
    lines = max(verticals + of.sink + of.near_blocks, slashes + of.sink + of.near_blocks)
    assert 8 * lines <= index_bytes(job(SPARSE), 1) <= 1.2 * 8 * lines
    assert index_bytes(job(None), 1) == 0


def test_recall_below_its_target_is_told_once_until_it_is_back() -> None:
    watch = RecallWatch(SparseAttentionConfig.model_validate(SPARSE | {"recall": 0.9}))
    said = [watch.update(0.5) for _ in range(RECENT_STEPS + 5)]
    (told,) = [text for text in said if text]
    assert said[RECENT_STEPS - 1] == told
    assert told.startswith(
        "sparse attention kept 50.0% of dense attention in the last 32 steps, below training.attention."
    )
    assert [watch.update(0.99) for _ in range(RECENT_STEPS)] == [None] * RECENT_STEPS
    assert [text for _ in range(RECENT_STEPS) if (text := watch.update(0.1))] != []
    assert RecallWatch(None).update(None) is None
