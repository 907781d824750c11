"""The plan's FLOPs are those that torch counts as one rank of the trainer takes a step."""

from typing import Any

import pytest
from torch.nn.attention import SDPBackend
from torch.utils.flop_counter import FlopCounterMode

from boost_core.bench.rank import draw_weights
from boost_core.config import JobSpec
from boost_core.plan.throughput import block_work, head_work
from boost_core.train.state import TrainState
from boost_core.train.step import training_step
from tests.numerics.test_memory_plan import CPU, RandomTokens, job, one_rank

COLA, SVD, DENSE = {"family": "cola"}, {"family": "svd"}, {"family": "dense"}
CASES = [
    (COLA, {}),
    (COLA, {"tensor_parallel_size": 2}),
    (COLA | {"num_key_value_heads": 2}, {"tensor_parallel_size": 2, "group_projections": False}),
    (COLA, {"tensor_parallel_size": 2, "recompute": "full"}),
    (SVD, {"tensor_parallel_size": 2, "strategy": "vanilla"}),
    (SVD, {"tensor_parallel_size": 2, "strategy": "vanilla", "group_projections": False}),
    (DENSE, {"tensor_parallel_size": 2}),
    (DENSE | {"num_key_value_heads": 2}, {}),
]


def counted(spec: JobSpec) -> int:
    """What torch counts in a step. It knows products, and not a CPU's attention in one kernel."""
    with one_rank(spec, "naive"):
        state = TrainState.initial(spec, CPU, draw_weights)
        with FlopCounterMode(display=False) as counter:
            training_step(state, RandomTokens(spec))
    return counter.get_total_flops()


@pytest.mark.full
@pytest.mark.parametrize(("model", "parallelism"), CASES, ids=map(str, CASES))
def test_products_are_counted_to_the_flop(model: dict[str, Any], parallelism: dict[str, Any]) -> None:
    spec = job(model, parallelism)
    blocks, head = spec.model.num_hidden_layers, head_work(spec).all
    assert counted(spec) == blocks * block_work(spec, spec.parallelism.recompute).all.product_flops + head.product_flops


def test_lax_gates_are_counted_as_though_latents_crossed_into_the_first_block_too() -> None:
    spec = job({"family": "lax", "lax": {"gate": "dense"}}, {"tensor_parallel_size": 2})
    training, rank, blocks = spec.training, spec.model.bottleneck_rank, spec.model.num_hidden_layers
    gates = 3 * 2 * 7 * rank**2 * training.micro_batch_size * training.sequence_length
    planned = (
        blocks * block_work(spec, spec.parallelism.recompute).all.product_flops + head_work(spec).all.product_flops
    )
    assert counted(spec) + gates == planned


def test_attention_is_what_its_products_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all pairs, causal or not; and backward without the scores again, as its products keep them."""
    spec = job(COLA)
    one_kernel = counted(spec)
    monkeypatch.setattr("boost_core.model.attention.backends", lambda _: [SDPBackend.MATH])
    products = counted(spec) - one_kernel
    passes, blocks, length = (
        block_work(spec, spec.parallelism.recompute),
        spec.model.num_hidden_layers,
        spec.training.sequence_length,
    )
    forward, backward = passes.forward.attention_flops, passes.backward.attention_flops
    assert blocks * (forward + backward * 8 / 10) * 2 * length / (length + 1) == pytest.approx(products)
