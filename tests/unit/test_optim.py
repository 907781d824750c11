import math
from dataclasses import replace
from typing import get_args

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    get_constant_schedule_with_warmup,
    get_cosine_with_min_lr_schedule_with_warmup,
    get_polynomial_decay_schedule_with_warmup,
    get_wsd_schedule,
)

from boost_core.architecture import BTP, ParamKind
from boost_core.config import ModelConfig, ParallelismConfig
from boost_core.config.training import OptimizerConfig
from boost_core.model.decoder import build
from boost_core.model.low_rank import weight_specs
from boost_core.optim.adamw import MasterWeightAdamW
from boost_core.optim.clipping import clip_factor, global_norm
from boost_core.optim.schedule import learning_rate
from boost_core.optim.zero import Gradients, ParamGroup, Staging
from boost_core.parallel.btp import GradientSinks
from boost_core.parallel.communicator import CommunicationLedger, Communicator
from boost_core.parallel.mesh import ProcessGroups


def test_the_schedule_warms_up_peaks_and_ends_at_its_floor() -> None:
    optimizer = OptimizerConfig(learning_rate=1.0, warmup_steps=10, final_learning_rate_ratio=0.1)
    rates = [learning_rate(step, 110, optimizer) for step in range(1, 111)]
    assert rates[:10] == pytest.approx([step / 10 for step in range(1, 11)])
    assert rates[59] == pytest.approx(0.1 + 0.9 * 0.5)
    assert rates[109] == pytest.approx(0.1)
    assert rates[9:] == sorted(rates[9:], reverse=True)


def test_without_warm_up_and_with_only_warm_up() -> None:
    assert learning_rate(1, 1, OptimizerConfig(learning_rate=1.0)) == pytest.approx(0.1)
    assert learning_rate(5, 5, OptimizerConfig(learning_rate=1.0, warmup_steps=5)) == 1.0
    linear = OptimizerConfig(learning_rate=1.0, schedule="linear")
    assert learning_rate(30, 10, linear) == learning_rate(10, 10, linear) == pytest.approx(0.1)


def theirs(schedule: str, optimizer: torch.optim.Optimizer, warmup: int, steps: int, decay: int) -> LambdaLR:
    """The same schedule by transformers, with a peak of 1 and a floor of 0.1."""
    if schedule == "cosine":
        return get_cosine_with_min_lr_schedule_with_warmup(optimizer, warmup, steps, min_lr_rate=0.1)
    if schedule == "linear":
        return get_polynomial_decay_schedule_with_warmup(optimizer, warmup, steps, lr_end=0.1)
    if schedule == "constant":
        return get_constant_schedule_with_warmup(optimizer, warmup)
    return get_wsd_schedule(
        optimizer, warmup, decay, num_training_steps=steps, decay_type="linear", min_lr_ratio=0.1
    )  # fmt: skip


@pytest.mark.parametrize("schedule", get_args(OptimizerConfig.model_fields["schedule"].annotation))
@pytest.mark.parametrize(("warmup", "steps", "decay"), [(0, 20, 7), (10, 110, None), (3, 13, 10)])
def test_each_schedule_is_that_of_transformers(schedule: str, warmup: int, steps: int, decay: int | None) -> None:
    config = OptimizerConfig(
        learning_rate=1.0, warmup_steps=warmup, schedule=schedule, decay_steps=decay if schedule == "wsd" else None
    )
    sgd = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
    scheduler, expected = theirs(schedule, sgd, warmup, steps, decay or math.ceil((steps - warmup) / 10)), []
    for _ in range(steps):  # the step before the first has number 0 there
        sgd.step()
        scheduler.step()
        expected += scheduler.get_last_lr()
    rates = [learning_rate(step, steps, config) for step in range(1, steps + 1)]
    begin = warmup if schedule == "wsd" else 0  # whose warm-up begins at the floor there
    assert rates[begin:] == pytest.approx(expected[begin:], rel=1e-12)


ALONE = Communicator(None, "dp", CommunicationLedger())
PLAIN = ParamKind(decay=0.0, split=True, partial=False, tied=False, custom_update=False)


def grouped(kind: ParamKind, compute_type: torch.dtype, **weights: nn.Parameter) -> ParamGroup:
    return ParamGroup(kind, weights, compute_type, ALONE, zero_stage=1)


@pytest.mark.parametrize("clip_norm", [1.0, 100.0])
def test_clipping_is_by_the_norm_over_all_gradients(clip_norm: float) -> None:
    one = grouped(PLAIN, torch.float32, a=nn.Parameter(torch.ones(2)), b=nn.Parameter(torch.ones(65)))
    other = grouped(replace(PLAIN, decay=0.1), torch.float32, c=nn.Parameter(torch.ones(3)))
    one.add_gradient("a", torch.tensor([0.0, 3.0]))
    one.add_gradient("b", 4.0 * torch.eye(65)[64])
    other.add_gradient("c", torch.tensor([12.0, 0.0, 0.0]))
    norm, _ = global_norm([one, other], ProcessGroups(*[ALONE] * 7))
    assert norm.item() == pytest.approx(13.0)
    assert 13.0 * clip_factor(norm, clip_norm).item() == pytest.approx(min(13.0, clip_norm), rel=1e-6)


def test_adamw_follows_its_formula_on_fp32_masters_under_bf16_weights() -> None:
    config = OptimizerConfig(betas=(0.9, 0.99), epsilon=1e-8)
    start = torch.tensor([[1.0, -2.0]])
    weight, scale = nn.Parameter(start.clone()), nn.Parameter(torch.ones(2))
    decayed = grouped(replace(PLAIN, decay=0.1), torch.bfloat16, matrix=weight)
    optimizer = MasterWeightAdamW([decayed, grouped(PLAIN, torch.bfloat16, scale=scale)], config)
    expected, first, second = start.double(), torch.zeros(1, 2).double(), torch.zeros(1, 2).double()
    for step, gradient in enumerate(torch.tensor([[[0.1, -0.2]], [[0.3, 0.0]], [[-0.5, 0.01]]]), start=1):
        decayed.add_gradient("matrix", gradient, first=True)
        gradient = gradient * 0.5
        optimizer.step(torch.tensor([0.5]), 1e-3, step)
        first = 0.9 * first + 0.1 * gradient
        second = 0.99 * second + 0.01 * gradient**2
        direction = (first / (1 - 0.9**step)) / ((second / (1 - 0.99**step)).sqrt() + 1e-8)
        expected = expected * (1 - 1e-3 * 0.1) - 1e-3 * direction
    masters = {piece.name: piece.tensor for piece in optimizer.pieces() if piece.quantity == "master"}
    torch.testing.assert_close(masters["matrix"].double(), expected, rtol=1e-6, atol=0)
    assert weight.dtype == torch.bfloat16
    assert torch.equal(weight.data, masters["matrix"].to(torch.bfloat16))
    assert torch.equal(masters["scale"], torch.ones(2))  # scales are not decayed


def test_masters_on_the_host_are_rounded_in_chunks_that_a_custom_updates_buffers_hold() -> None:
    weights = {str(index): nn.Parameter(torch.randn(32, 64)) for index in range(8)}
    drawn = {name: weight.detach().clone() for name, weight in weights.items()}
    kind, staging = replace(PLAIN, custom_update=True), Staging(torch.device("cpu"))
    group = ParamGroup(kind, weights, torch.bfloat16, ALONE, zero_stage=0, offload=1.0, staging=staging)
    for weight in weights.values():
        weight.data.zero_()
    group.round_masters()
    assert all(torch.equal(weights[name].data, values.bfloat16()) for name, values in drawn.items())


def test_fp32_masters_are_the_weights_themselves() -> None:
    weight = nn.Parameter(torch.ones(2, 2))
    assert grouped(PLAIN, torch.float32, matrix=weight).master.data_ptr() == weight.data_ptr()


def test_a_gradient_that_does_not_come_is_missed() -> None:
    weights = {"used": nn.Parameter(torch.ones(2)), "unused": nn.Parameter(torch.ones(2))}
    gradients = Gradients(weights, [grouped(PLAIN, torch.float32, **weights)], ALONE)
    gradients.begin()
    weights["used"].sum().backward()
    with pytest.raises(AssertionError, match="no gradient reached unused"):
        gradients.finish()


def test_a_gradient_that_comes_less_often_than_it_did_is_missed() -> None:
    weight = nn.Parameter(torch.ones(2))
    gradients = Gradients({"weight": weight}, [grouped(PLAIN, torch.float32, weight=weight)], ALONE)
    for micro_batches in (2, 2):
        gradients.begin()
        for _ in range(micro_batches):
            weight.sum().backward()
        gradients.finish()
    gradients.begin()
    weight.sum().backward()
    with pytest.raises(AssertionError, match="gradients of weight"):
        gradients.finish()


def test_another_number_of_micro_batches_is_learnt_anew() -> None:
    weight = nn.Parameter(torch.ones(2))
    group = grouped(PLAIN, torch.float32, weight=weight)
    gradients = Gradients({"weight": weight}, [group], ALONE)
    for micro_batches in (2, 2, 3, 3, 1):
        gradients.begin(micro_batches)
        for _ in range(micro_batches):
            weight.sum().backward()
        gradients.finish()
        assert group.summed_gradients()["weight"].tolist() == [micro_batches] * 2


def test_what_a_sum_had_before_a_step_is_not_in_it() -> None:
    whole, part = nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(2, 3))
    group = grouped(PLAIN, torch.float32, whole=whole, part=part)
    sinks = GradientSinks()
    gradients = Gradients({"whole": whole, "part": part}, [group], ALONE, sinks=sinks)
    for _ in range(2):
        for sums in group.sums.values():
            sums.fill_(torch.nan)  # as after a step that has diverged
        gradients.begin()
        for _ in range(2):
            whole.sum().backward()
        for row in (0, 1):
            sinks.add(part[row], torch.full((3,), 1.0 + row))
        gradients.finish()
        assert group.sums["whole"].tolist() == [[2.0] * 3] * 2
        assert group.sums["part"].tolist() == [[1.0] * 3, [2.0] * 3]


def test_every_norm_of_a_model_is_left_undecayed() -> None:
    shape = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2, "rank": 4}
    model = ModelConfig.model_validate(shape | {"family": "lax"})
    network, _ = build(model, ParallelismConfig(), Communicator(None, "tp", CommunicationLedger()))
    kinds = {name: ParamKind.of(spec, BTP, OptimizerConfig(), False) for name, spec in weight_specs(network).items()}
    found = [name for name, kind in kinds.items() if not kind.decay]
    assert all(name.endswith(("scale", "shift")) for name in found)
    # Two norms a block and the last one; in the second block a scale and a shift for each of four crossings.
    assert len(found) == 2 * 2 + 1 + 2 * 4
