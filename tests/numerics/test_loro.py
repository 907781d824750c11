"""LORO on sharded factors against the same steps written out with whole matrices."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from boost_core.architecture.roles import ParamKind
from boost_core.config import LoroConfig, ModelConfig, OptimizerConfig, ParallelismConfig
from boost_core.models.build import build
from boost_core.nn.weights import weight_specs
from boost_core.optim.group import ParamGroup
from boost_core.optim.loro import FactorPair, Loro, factor_pairs
from boost_core.optim.riemannian import riemannian_step
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.ledger import CommunicationLedger
from tests.numerics.sharded import shard_of
from tests.ranks import Ranks

STEP_SIZE = 0.3


def operands(rows: int, columns: int, rank: int) -> list[Tensor]:
    """M, N and two directions that do not come from one gradient, as Adam's do not."""
    generator = torch.Generator().manual_seed(5)
    shapes = ((rows, rank), (columns, rank)) * 2
    return [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]


def step_by_the_formulas(m: Tensor, n: Tensor, direction_m: Tensor, direction_n: Tensor) -> Tensor:
    """W⁺ = the best rank-r approximation of W − η (U K₀ Vᵀ + U (Q − K₀Vᵀ) + (P − U UᵀP) Vᵀ), all matrices whole."""
    (u, r_m), (v, r_n) = torch.linalg.qr(m), torch.linalg.qr(n)
    p, q = direction_m @ r_n.inverse(), r_m.T.inverse() @ direction_n.T
    k_0 = q @ v
    tangent = u @ k_0 @ v.T + u @ (q - k_0 @ v.T) + (p - u @ (u.T @ p)) @ v.T
    left, values, right = torch.linalg.svd(m @ n.T - STEP_SIZE * tangent, full_matrices=False)
    rank = m.shape[1]
    return left[:, :rank] * values[:rank] @ right[:rank]


def sharded_step(shape: tuple[int, int, int]) -> tuple[Tensor, Tensor, list[tuple[str, int]]]:
    ledger = CommunicationLedger()
    collectives = Communicator(dist.group.WORLD, "tp", ledger)
    shards = [shard_of(whole, 0, collectives.rank, collectives.size) for whole in operands(*shape)]
    moved = riemannian_step(*shards, STEP_SIZE, collectives)
    whole = []
    for shard in moved:
        parts = [torch.empty_like(shard) for _ in range(collectives.size)]
        dist.all_gather(parts, shard.contiguous())
        whole.append(torch.cat(parts))
    sent = [(entry.kind, line.elements // line.calls) for entry, line in ledger.totals().items()]
    return whole[0], whole[1], sent


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("shape", [(32, 48, 6), (64, 16, 8), (16, 16, 12), (8, 12, 8)])
def test_an_exact_step_is_the_truncated_svd_of_the_whole(ranks: Ranks, size: int, shape: tuple[int, int, int]) -> None:
    rank = shape[2]
    expected = step_by_the_formulas(*operands(*shape))
    for m, n, sent in ranks.run(size, sharded_step, shape):
        # The SVD of W and of what a Gram matrix has left of it agree to the root of float64's precision at worst.
        assert (m @ n.T - expected).norm() / expected.norm() < 1e-10
        grams = torch.stack((m.T @ m, n.T @ n))
        singular_values = torch.linalg.svdvals(expected)[:rank]
        torch.testing.assert_close(grams, torch.diag(singular_values).expand(2, -1, -1), rtol=1e-9, atol=1e-9)
        assert sent == ([] if size == 1 else [("all_reduce", rank * rank)])


def test_a_step_from_a_singular_start_is_finite() -> None:
    alone = Communicator(None, "tp", CommunicationLedger())
    m, n, direction_m, direction_n = operands(16, 12, 4)
    moved = riemannian_step(m, torch.zeros_like(n), direction_m, direction_n, STEP_SIZE, alone)
    assert all(factor.isfinite().all() for factor in moved)


def adam(gradients: list[Tensor]) -> Tensor:
    """Adam's direction after these gradients times what the bias correction makes of a learning rate of one."""
    first = second = torch.zeros_like(gradients[0])
    for gradient in gradients:
        first, second = 0.9 * first + 0.1 * gradient, 0.999 * second + 0.001 * gradient**2
    steps = len(gradients)
    return first / (second.sqrt() + 1e-6) * math.sqrt(1 - 0.999**steps) / (1 - 0.9**steps)


def test_lazy_steps_an_exact_one_and_the_rewarming_after_it() -> None:
    alone = Communicator(None, "tp", CommunicationLedger())
    m, n, *_ = operands(12, 10, 3)
    down, up = nn.Parameter(m.unsqueeze(1).clone()), nn.Parameter(n.T.unsqueeze(0).clone())
    config = OptimizerConfig(kind="loro", loro=LoroConfig(exact_every_steps=3, rewarm_steps=2), weight_decay=0.1)
    kind = ParamKind(decay=0.1, split=True, latent=False, tied=False, custom_update=True)
    factors = ParamGroup(kind, {"down": down, "up": up}, torch.float64, alone, zero_stage=1)
    optimizer = Loro([factors], config, config.loro, [FactorPair("down", 0, "up", 0)], 0.25, alone)
    generator = torch.Generator().manual_seed(9)
    seen: list[tuple[Tensor, Tensor]] = []
    for step in range(1, 6):
        seen.append(tuple(torch.randn(each.shape, generator=generator, dtype=torch.float64) for each in (m, n)))
        factors.clear_gradients()
        factors.add_gradient("down", seen[-1][0].unsqueeze(1) * 2)
        factors.add_gradient("up", seen[-1][1].T.unsqueeze(0) * 2)
        optimizer.step(torch.tensor([0.5]), 0.01, step)
        directions = [adam([pair[factor] for pair in seen]) for factor in (0, 1)]
        if step == 3:
            m, n = riemannian_step(m, n, *directions, 0.01, alone)
            torch.testing.assert_close(down[:, 0].data @ up[0].data, m @ n.T, rtol=1e-9, atol=1e-12)
            m, n = down[:, 0].data.clone(), up[0].T.data.clone()  # the same but for the signs of their columns
            seen.clear()
        else:
            rate = 0.01 * (0.5 if step == 4 else 1)
            m, n = (
                factor * (1 - rate * 0.1) - rate * 0.25 * direction
                for factor, direction in zip((m, n), directions, strict=True)
            )
        torch.testing.assert_close(down[:, 0].data, m, rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(up[0].T.data, n, rtol=1e-9, atol=1e-12)


def test_every_factor_of_a_model_belongs_to_one_pair() -> None:
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "rank": 4}
    model = ModelConfig.model_validate(shape | {"family": "svd", "num_key_value_heads": 2})
    network, _ = build(model, ParallelismConfig(), Communicator(None, "tp", CommunicationLedger()))
    pairs = factor_pairs(network)
    specs = weight_specs(network)
    assert len(pairs) == len(set(pairs)) == 7 * 2
    for pair in pairs:
        assert pair.projection < specs[pair.down].shape[1]
        assert pair.member < specs[pair.up].shape[0]
    assert sum(specs[name].shape[1] for name in {pair.down for pair in pairs}) == len(pairs)
    assert sum(specs[name].shape[0] for name in {pair.up for pair in pairs}) == len(pairs)
