"""Every legal cell of family × strategy × norm × grouping × recompute × split is exact, at any tensor parallel size."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist

from boost_core.config import Activation, ModelConfig, ParallelismConfig
from boost_core.config.parallelism import strategy_problems
from boost_core.kernels.latent_epilogue import latent_epilogue
from boost_core.kernels.residual_add import residual_add
from boost_core.parallel.btp import BottleneckTensorParallel, NormWeights
from boost_core.parallel.communicator import CommunicationLedger, Communicator
from tests.numerics import reference
from tests.numerics.sharded import (
    Outcome,
    batch,
    errors_of_cells,
    full_weights,
    relative_error,
    run_sharded,
    shard_of,
    token_weights,
)
from tests.pairwise import pairwise
from tests.ranks import Ranks

SEQUENCES, LENGTH = 3, 16  # an odd number, so that a split has unequal halves

SHAPE = {
    "vocab_size": 256, "hidden_size": 64, "intermediate_size": 176, "num_hidden_layers": 3,
    "num_attention_heads": 8, "num_key_value_heads": 4, "rank": 12,
}  # fmt: skip

FAMILIES = {
    "dense": {"family": "dense", "rank": None},
    "svd": {"family": "svd"},
    "cola": {"family": "cola"},
    "cola with gate": {"family": "cola", "gate_activation": True, "num_key_value_heads": None},
    "lax over cola": {"family": "lax"},
    "lax over svd, dense gate": {"family": "lax", "lax": {"base": "svd", "gate": "dense"}},
    "lax over cola, tensor gate": {"family": "lax", "lax": {"gate": "tensor"}},
    "tied dense": {"family": "dense", "rank": None, "tie_embeddings": True},
    "tied cola": {"family": "cola", "tie_embeddings": True, "rank": 8},
}
CHOICES = [
    ParallelismConfig.model_validate(
        {
            "strategy": strategy, "norm": norm, "group_projections": grouped, "recompute": recompute,
            "split_micro_batch": split,
        }
    )
    for strategy, norm, grouped, recompute, split in itertools.product(
        ("fullrank", "vanilla", "btp"),
        ("fused", "online_paper", "sync"),
        (True, False),
        ("none", "latent", "full"),
        (False, True),
    )
]  # fmt: skip


@functools.cache
def model(family: str) -> ModelConfig:
    return ModelConfig.model_validate(SHAPE | FAMILIES[family])


def cells(family: str) -> list[ParallelismConfig]:
    """Every legal choice for a family; a dense block has nothing to group."""
    legal = [choice for choice in CHOICES if not strategy_problems(model(family), choice)]
    return [choice for choice in legal if choice.group_projections or choice.strategy != "fullrank"]


def test_how_many_cells_are_legal() -> None:
    # dense: not or fully recomputed. vanilla: that, grouped or not. btp, grouped or not: two norms with three
    # recomputations, two of them split or not, and a third norm that can be neither split nor recomputed in parts.
    vanilla, btp = 2 * 2, 2 * (2 * (2 * 2 + 1) + 2)
    assert {family: len(cells(family)) for family in FAMILIES} == {
        family: 2 if "dense" in family.split()[-1] else btp if "lax" in family else vanilla + btp for family in FAMILIES
    }


@functools.cache
def reference_outcome(
    config: ModelConfig, rounded_to: torch.dtype, sequences: int = SEQUENCES, length: int = LENGTH
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss and gradients in float64, from weights rounded to another type first."""
    rounded = {name: weight.to(rounded_to).double().clone() for name, weight in full_weights(config).items()}
    leaves = {name: weight.requires_grad_() for name, weight in rounded.items()}
    loss = reference.token_losses(config, leaves, *batch(config, sequences, length))
    (loss * token_weights(loss.numel())).sum().backward()
    return loss.detach(), {name: leaf.grad for name, leaf in leaves.items()}


def cells_at(size: int, family: str) -> list[ParallelismConfig]:
    """All of them on two ranks; on more, with narrower shards, and on one, which has nobody to wait for, each pair."""
    if size == 2:
        return cells(family)
    return pairwise(
        cells(family),
        lambda cell: (cell.strategy, cell.norm, cell.group_projections, cell.recompute, cell.split_micro_batch),
    )


# For every run those that differ most, on two ranks.
SOME = ("tied dense", "cola with gate")
SIZES_AND_FAMILIES = [
    pytest.param(size, family, marks=() if size == 2 and family in SOME else pytest.mark.nightly)
    for size in (1, 2, 4)
    for family in FAMILIES
]


@pytest.mark.parametrize(("size", "family"), SIZES_AND_FAMILIES)
def test_float64_loss_and_every_gradient_equal_the_reference(ranks: Ranks, size: int, family: str) -> None:
    config, chosen = model(family), cells_at(size, family)
    loss, gradients = reference_outcome(config, torch.float64)
    for errors in ranks.run(size, errors_of_cells, config, chosen, SEQUENCES, LENGTH, loss, gradients):
        for cell, of_cell in zip(chosen, errors, strict=True):
            assert of_cell.keys() == {"loss", *full_weights(config)}
            assert max(of_cell.values()) < 1e-10, (cell, of_cell)


@pytest.mark.full
@pytest.mark.parametrize("family", ["cola with gate", "lax over cola"])
def test_float64_halves_of_one_sequence_equal_the_reference(ranks: Ranks, family: str) -> None:
    config, length = model(family), 15  # tokens in unequal halves
    chosen = [cell for cell in cells(family) if cell.split_micro_batch and cell.recompute == "none"]
    loss, gradients = reference_outcome(config, torch.float64, 1, length)
    for errors in ranks.run(2, errors_of_cells, config, chosen, 1, length, loss, gradients):
        for cell, of_cell in zip(chosen, errors, strict=True):
            assert max(of_cell.values()) < 1e-10, (cell, of_cell)


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_float64_sharded_equals_the_unsharded_product_model(ranks: Ranks, size: int) -> None:
    arguments = (model("cola"), ParallelismConfig(), SEQUENCES, LENGTH, torch.float64)
    (whole,) = ranks.run(1, run_sharded, *arguments)
    (sharded, *_) = ranks.run(size, run_sharded, *arguments)
    assert relative_error(sharded.loss, whole.loss) < 1e-10
    for name, gradient in whole.gradients.items():
        assert relative_error(sharded.gradients[name], gradient) < 1e-10, name


# Rounding is random: two norms of its errors can be compared once they are of some hundreds of losses.
MANY = 24


def bf16_errors(ranks: Ranks, size: int, config: ModelConfig, norm: str) -> tuple[float, float]:
    """Error of the losses, and of all gradients together, each gradient scaled to norm one."""
    loss, gradients = reference_outcome(config, torch.bfloat16, MANY)
    parallelism = ParallelismConfig.model_validate({"norm": norm})
    outcome: Outcome = ranks.run(size, run_sharded, config, parallelism, MANY, LENGTH, torch.bfloat16)[0]
    errors = [relative_error(outcome.gradients[name], gradient) ** 2 for name, gradient in gradients.items()]
    return relative_error(outcome.loss, loss), (sum(errors) / len(errors)) ** 0.5


WIDE = ModelConfig.model_validate(
    SHAPE | {"hidden_size": 256, "intermediate_size": 512, "rank": 64, "num_hidden_layers": 2}
)


@pytest.mark.full
@pytest.mark.parametrize("size", [2, 4])
def test_bf16_is_no_worse_than_one_and_a_half_times_unsharded_bf16(ranks: Ranks, size: int) -> None:
    loss_limit, gradient_limit = bf16_errors(ranks, 1, WIDE, "fused")
    loss_error, gradient_error = bf16_errors(ranks, size, WIDE, "fused")
    assert 0 < loss_error <= 1.5 * loss_limit
    assert 0 < gradient_error <= 1.5 * gradient_limit


def normed_projection(norm: str, outlier: float) -> torch.Tensor:
    """norm(x) A on this rank's shards in bf16, d 2048, r 256, one channel in 64 ``outlier`` times larger."""
    collectives = Communicator(dist.group.WORLD, "tp", CommunicationLedger())
    x_Td, down_d1r, scale_d = (
        shard_of(whole, axis, collectives.rank, collectives.size).bfloat16()
        for whole, axis in zip(projection_operands(outlier), (1, 0, 0), strict=True)
    )
    width = x_Td.shape[1] * collectives.size
    strategy, weights = BottleneckTensorParallel(collectives, norm), NormWeights(scale_d, width, 1e-6)
    wait = strategy.start(strategy.partial_latents(x_Td, residual_add(x_Td, None).squares, down_d1r, weights))
    return latent_epilogue(*wait(), 1, width, 1e-6, Activation.LINEAR)[0]


def projection_operands(outlier: float) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    x_Td = torch.randn(64, 2048, generator=generator)
    x_Td[:, ::64] *= outlier
    down_d1r = torch.randn(2048, 1, 256, generator=generator) / 2048**0.5
    return x_Td, down_d1r, 1 + 0.1 * torch.randn(2048, generator=generator)


def input_gradient(norm: str) -> torch.Tensor:
    """The gradient of this rank's shard, of which latents are made and, scaled by the same statistic, outputs, too."""
    collectives = Communicator(dist.group.WORLD, "tp", CommunicationLedger())
    shards = [
        shard_of(whole.double(), axis, collectives.rank, collectives.size).requires_grad_()
        for whole, axis in zip((*projection_operands(1.0), up_projection()), (1, 0, 0, 1), strict=True)
    ]
    x_Td, down_d1r, scale_d, up_rd = shards
    width, strategy = x_Td.shape[1] * collectives.size, BottleneckTensorParallel(collectives, norm)
    weights, residual = NormWeights(scale_d, width, 1e-6), residual_add(x_Td, None)
    partial = strategy.partial_latents(residual.inputs, residual.squares, down_d1r, weights)
    h_Tr, squares_T = strategy.start(partial)()
    z_Tr = latent_epilogue(h_Tr, squares_T, 1, width, 1e-6, Activation.LINEAR)[0]
    normed_Td = latent_epilogue(residual.inputs, squares_T, 1, width, 1e-6, Activation.LINEAR)[0]
    output_Td = z_Tr @ up_rd + normed_Td * scale_d
    output_Td.square().mul(torch.arange(len(x_Td)).unsqueeze(1)).sum().backward()
    return x_Td.grad


def up_projection() -> torch.Tensor:
    return torch.randn(256, 2048, generator=torch.Generator().manual_seed(5)) / 16


@pytest.mark.parametrize("norm", ["fused", "online_paper"])
def test_a_statistic_may_scale_the_input_too(ranks: Ranks, norm: str) -> None:
    (whole,) = ranks.run(1, input_gradient, norm)
    assert relative_error(torch.cat(ranks.run(2, input_gradient, norm), dim=1), whole) < 1e-10


@pytest.mark.full
@pytest.mark.parametrize("outlier", [1.0, 100.0])
@pytest.mark.parametrize("size", [2, 4])
def test_the_fused_norm_is_no_less_accurate_in_bf16_than_the_published_form(
    ranks: Ranks, size: int, outlier: float
) -> None:
    x_Td, down_d1r, scale_d = (operand.bfloat16().double() for operand in projection_operands(outlier))
    truth = (x_Td / (x_Td.square().mean(-1, keepdim=True) + 1e-6).sqrt() * scale_d) @ down_d1r[:, 0]
    fused, published = (
        relative_error(ranks.run(size, normed_projection, norm, outlier)[0], truth)
        for norm in ("fused", "online_paper")
    )
    assert 0 < fused <= published
