"""The plan's bytes with sparse attention are no less than what the trainer holds, and hardly more."""

from typing import Any

import numpy as np
import pytest

from boost_core.bench.rank import draw_weights
from boost_core.config import JobSpec
from boost_core.config.parallelism import Layout
from boost_core.plan import memory
from boost_core.plan.memory import rank_memory
from boost_core.train.state import TrainState
from boost_core.train.step import training_step
from tests.numerics.allocator import allocated
from tests.numerics.test_memory_plan import COLA, CPU, RandomTokens, job, one_rank, slack
from tests.ranks import Ranks

SPARSE = {"kind": "vertical_slash", "budget": 0.2, "sink": 2, "window": 1, "from_length": 768}
LENGTH = 1024


class Tokens(RandomTokens):
    """Sequences of a long document and a short one."""

    def sequences(self, *_: int) -> np.ndarray:
        tokens = np.maximum(super().sequences(), 1)
        tokens[:, 900] = 0
        return tokens


@pytest.mark.full
@pytest.mark.parametrize(
    ("parallelism", "precision", "apart"),
    [({"recompute": "none"}, "fp32", False), ({"recompute": "latent", "tensor_parallel_size": 2}, "bf16", True)],
    ids=str,
)
def test_a_step_takes_no_more_than_planned_and_hardly_less(
    parallelism: dict[str, Any], precision: str, apart: bool
) -> None:
    training = {"sequence_length": LENGTH, "micro_batch_size": 1, "global_batch_size": 1, "precision": precision}
    spec = job(
        COLA | {"num_hidden_layers": 2},
        parallelism,
        training=training | {"attention": SPARSE},
        data={"documents_apart": apart},
    )

    def step() -> None:
        training_step(TrainState.initial(spec, CPU, draw_weights), Tokens(spec))  # type: ignore[arg-type]

    with one_rank(spec, "naive"):
        _, _, peak = allocated(step)
    planned = rank_memory(spec, Layout.of(spec.parallelism)).total
    assert peak <= planned <= peak + slack(spec) * LENGTH // 32 + memory.head_bytes(spec)


def peak_of_step(spec: JobSpec) -> int:
    def step() -> None:
        training_step(TrainState.initial(spec, CPU, draw_weights), Tokens(spec))  # type: ignore[arg-type]

    return allocated(step)[2]


@pytest.mark.full
@pytest.mark.parametrize("ranks_", [2, 4])
def test_nor_does_one_over_context_parallel_ranks(ranks: Ranks, ranks_: int) -> None:
    """Which has keys of all heads in the plan, should every one be seen."""
    training = {"sequence_length": LENGTH, "micro_batch_size": 1, "global_batch_size": 1, "attention": SPARSE}
    spec = job(COLA | {"num_hidden_layers": 2}, {"context_parallel_size": ranks_}, training=training)
    planned = rank_memory(spec, Layout.of(spec.parallelism)).total
    for peak in ranks.run(ranks_, peak_of_step, spec):
        assert peak <= planned <= 2 * peak


@pytest.mark.parametrize("context", [1, pytest.param(2, marks=pytest.mark.nightly)])
@pytest.mark.nightly
def test_nor_does_a_pipeline_which_keeps_the_indexes_of_several_micro_batches(ranks: Ranks, context: int) -> None:
    training = {"sequence_length": LENGTH, "micro_batch_size": 1, "global_batch_size": 4, "attention": SPARSE}
    parallelism = {"pipeline_parallel_size": 2, "context_parallel_size": context}
    spec = job(COLA | {"num_hidden_layers": 4}, parallelism, training=training)
    planned = rank_memory(spec, Layout.of(spec.parallelism)).total
    assert (peak := max(ranks.run(2 * context, peak_of_step, spec))) <= planned <= 2 * peak
