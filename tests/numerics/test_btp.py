"""BTP is exact: the same loss and gradients as an unsharded model, at any tensor parallel size."""

import pytest
import torch

from boost_core.config import ModelConfig
from tests.numerics import reference
from tests.numerics.sharded import Outcome, batch, full_weights, run_sharded, token_weights
from tests.ranks import Ranks

SEQUENCES, LENGTH = 2, 24


def model(**changes) -> ModelConfig:
    shape = {
        "vocab_size": 256, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 2,
        "num_attention_heads": 8, "num_key_value_heads": 4, "rank": 12, "gate_activation": False,
    }  # fmt: skip
    return ModelConfig.model_validate(shape | changes)


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    return ((value.double() - truth).norm() / truth.norm()).item()


def reference_outcome(config: ModelConfig, weights: dict[str, torch.Tensor]) -> tuple[torch.Tensor, dict]:
    leaves = {name: weight.clone().requires_grad_() for name, weight in weights.items()}
    loss = reference.token_losses(config, leaves, *batch(config, SEQUENCES, LENGTH))
    (loss * token_weights(loss.numel())).sum().backward()
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items()}


VARIANTS = [
    pytest.param({}, id="grouped-query attention"),
    pytest.param({"num_key_value_heads": None, "gate_activation": True}, id="gate activation"),
    pytest.param({"hidden_size": 40, "intermediate_size": 52, "num_attention_heads": 4, "rank": 7}, id="odd rank"),
]


@pytest.mark.parametrize("changes", VARIANTS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_float64_loss_and_every_gradient_equal_the_reference(ranks: Ranks, size: int, changes: dict) -> None:
    config = model(**changes)
    loss, gradients = reference_outcome(config, full_weights(config))
    for outcome in ranks.run(size, run_sharded, config, SEQUENCES, LENGTH, torch.float64):
        assert relative_error(outcome.loss, loss) < 1e-10
        assert outcome.gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            assert relative_error(outcome.gradients[name], gradient) < 1e-10, name


@pytest.mark.parametrize("size", [2, 4])
def test_float64_sharded_equals_unsharded_product_model(ranks: Ranks, size: int) -> None:
    (whole,) = ranks.run(1, run_sharded, model(), SEQUENCES, LENGTH, torch.float64)
    (sharded, *_) = ranks.run(size, run_sharded, model(), SEQUENCES, LENGTH, torch.float64)
    assert relative_error(sharded.loss, whole.loss) < 1e-10
    for name, gradient in whole.gradients.items():
        assert relative_error(sharded.gradients[name], gradient) < 1e-10, name


def _total_error(outcome: Outcome, loss: torch.Tensor, gradients: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Error of the losses, and of all gradients together, each gradient scaled to norm one."""
    errors = [relative_error(outcome.gradients[name], gradient) ** 2 for name, gradient in gradients.items()]
    return relative_error(outcome.loss, loss), (sum(errors) / len(errors)) ** 0.5


@pytest.mark.parametrize("size", [2, 4])
def test_bf16_is_no_worse_than_one_and_a_half_times_unsharded_bf16(ranks: Ranks, size: int) -> None:
    config = model(hidden_size=256, intermediate_size=512, rank=64)
    # The truth in float64 from the same rounded weights, so that only arithmetic differs.
    rounded = {name: weight.to(torch.bfloat16).double() for name, weight in full_weights(config).items()}
    loss, gradients = reference_outcome(config, rounded)
    (unsharded,) = ranks.run(1, run_sharded, config, SEQUENCES, LENGTH, torch.bfloat16)
    (sharded, *_) = ranks.run(size, run_sharded, config, SEQUENCES, LENGTH, torch.bfloat16)
    loss_limit, gradient_limit = _total_error(unsharded, loss, gradients)
    loss_error, gradient_error = _total_error(sharded, loss, gradients)
    assert 0 < loss_error <= 1.5 * loss_limit
    assert 0 < gradient_error <= 1.5 * gradient_limit
