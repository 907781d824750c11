"""LORO on sharded factors against the same steps written out with whole matrices."""

import math

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from boost_core.architecture import ParamKind
from boost_core.config import ModelConfig, ParallelismConfig
from boost_core.config.training import LoroConfig, OptimizerConfig
from boost_core.model.decoder import build
from boost_core.model.low_rank import weight_specs
from boost_core.optim.loro_muon import FactorPair, Loro, factor_pairs, riemannian_step
from boost_core.optim.zero import ParamGroup
from boost_core.parallel.communicator import CommunicationLedger, Communicator
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


@pytest.mark.full
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


class PublishedLoro:
    """What LOROAdamW does to one pair and to one other weight, on whole matrices.

    Read from ``loro_torch/loro_optim.py`` of github.com/mzf666/LORO-main at 4da57b6: ``weight_out`` is M, ``weight_in``
    is N, and ``--loro_refresh all`` resets the moments and counts of all weights after an exact step.
    """

    EPSILON = 1e-6

    def __init__(self, weight_out: Tensor, weight_in: Tensor, other: Tensor, share: float, decay: float) -> None:
        self.weights = [weight_out.clone(), weight_in.clone(), other.clone()]
        self._share, self._decay = share, decay
        self._refresh()

    def _refresh(self) -> None:
        self._moments = [(torch.zeros_like(each), torch.zeros_like(each)) for each in self.weights]
        self._count = 0

    def step(self, gradients: list[Tensor], rate: float, exact: bool) -> None:
        self._count += 1
        directions = []
        for gradient, (first, second) in zip(gradients, self._moments, strict=True):
            first.mul_(0.9).add_(gradient, alpha=0.1)
            second.mul_(0.999).addcmul_(gradient, gradient, value=0.001)
            directions.append(first / (second.sqrt() + self.EPSILON))
        eta = rate * math.sqrt(1 - 0.999**self._count) / (1 - 0.9**self._count)
        weight_out, weight_in, other = self.weights
        other -= eta * directions[2]
        if exact:
            weight_out[:], weight_in[:] = self._retracted(*directions[:2], eta)
            self._refresh()
            return
        for factor, direction in ((weight_out, directions[0]), (weight_in, directions[1])):
            factor -= eta * self._share * direction
            factor -= eta * self._decay * factor

    def _retracted(self, d_out: Tensor, d_in: Tensor, eta: float) -> tuple[Tensor, Tensor]:
        weight_out, weight_in, _ = self.weights
        rank = weight_out.shape[1]
        (u, r_out), (v, r_in) = torch.linalg.qr(weight_out), torch.linalg.qr(weight_in)
        along_v = torch.linalg.solve(r_in.T, d_out.T).T
        along_u = torch.linalg.solve(r_out.T, d_in.T)
        k_0 = along_u @ v
        q_1, k_1 = torch.linalg.qr((along_u - k_0 @ v.T).T)
        q_2, k_2 = torch.linalg.qr(along_v - u @ (u.T @ along_v))
        core = torch.zeros(2 * rank, 2 * rank, dtype=u.dtype)
        core[:rank, :rank] = r_out @ r_in.T - eta * k_0
        core[:rank, rank:], core[rank:, :rank] = -eta * k_1.T, -eta * k_2
        left, values, right = torch.linalg.svd(core)
        root = values[:rank].sqrt()
        return torch.cat((u, q_2), 1) @ (left[:, :rank] * root), torch.cat((v, q_1), 1) @ (right[:rank].T * root)


STEPS, EXACT_EVERY, REWARM = 20, 8, 2
WIDE_OUT, WIDE_IN, RANK, SHARE, RATE = 20, 12, 3, 0.25, 0.01


def beside_the_published(decay: float) -> float:
    """How far sharded LORO gets from the published steps: the largest relative difference of products and weights."""
    ranks = Communicator(dist.group.WORLD, "tp", CommunicationLedger())
    generator = torch.Generator().manual_seed(9)
    shapes = (WIDE_OUT, RANK), (WIDE_IN, RANK), (4, 6)
    start = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    published = PublishedLoro(*start, share=SHARE, decay=decay)

    def shard(whole: Tensor) -> Tensor:
        return shard_of(whole, 0, ranks.rank, ranks.size)

    def whole(mine: Tensor) -> Tensor:
        return ranks.all_gather(mine.contiguous(), "").flatten(0, 1)

    up = nn.Parameter(shard(start[0]).T.unsqueeze(0).clone())
    down = nn.Parameter(shard(start[1]).unsqueeze(1).clone())
    other = nn.Parameter(start[2].clone())
    config = OptimizerConfig(
        kind="loro", loro=LoroConfig(exact_every_steps=EXACT_EVERY, rewarm_steps=REWARM), weight_decay=decay
    )
    alone = Communicator(None, "dp", CommunicationLedger())
    kinds = [
        ParamKind(wd, split, partial=False, tied=False, custom_update=split)
        for wd, split in ((decay, True), (0, False))
    ]
    factors, others = (
        ParamGroup(kind, members, torch.float64, alone, zero_stage=1)
        for kind, members in zip(kinds, ({"down": down, "up": up}, {"other": other}), strict=True)
    )
    optimizer = Loro([factors, others], config, config.loro, [FactorPair("down", 0, "up", 0)], SHARE, ranks)
    worst = 0.0
    for step in range(1, STEPS + 1):
        # Of a product W, dM = G N and dN = Gᵀ M, whatever the signs of the factors' columns; small, so that ε shows.
        gradient_W = 1e-6 * torch.randn(WIDE_OUT, WIDE_IN, generator=generator, dtype=torch.float64)
        gradient = 1e-6 * torch.randn(4, 6, generator=generator, dtype=torch.float64)
        weight_out, weight_in = whole(up[0].T.detach()), whole(down[:, 0].detach())
        factors.add_gradient("up", shard(gradient_W @ weight_in).T.unsqueeze(0), first=True)
        factors.add_gradient("down", shard(gradient_W.T @ weight_out).unsqueeze(1), first=True)
        others.add_gradient("other", gradient, first=True)
        optimizer.step(torch.tensor([1.0]), RATE, step)
        theirs_out, theirs_in, _ = published.weights
        rate = RATE * (0.5 if step in (EXACT_EVERY + 1, 2 * EXACT_EVERY + 1) else 1.0)
        published.step([gradient_W @ theirs_in, gradient_W.T @ theirs_out, gradient], rate, step % EXACT_EVERY == 0)
        expected = theirs_out @ theirs_in.T
        product = whole(up[0].T.detach()) @ whole(down[:, 0].detach()).T
        worst = max(worst, ((product - expected).norm() / expected.norm()).item())
        worst = max(worst, (other.detach() - published.weights[2]).abs().max().item())
    return worst


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_twenty_steps_are_the_published_ones(ranks: Ranks, size: int, decay: float) -> None:
    assert max(ranks.run(size, beside_the_published, decay)) < 1e-9


def test_moments_start_anew_where_an_exact_step_is_left_out() -> None:
    alone, weight = Communicator(None, "tp", CommunicationLedger()), nn.Parameter(torch.ones(4))
    factor = nn.Parameter(torch.ones(1, 3, 4))
    kinds = [ParamKind(0.0, split, partial=False, tied=False, custom_update=split) for split in (True, False)]
    members = {"up": factor}, {"other": weight}
    groups = [ParamGroup(kind, each, torch.float32, alone, 0) for kind, each in zip(kinds, members, strict=True)]
    config = OptimizerConfig(kind="loro", loro=LoroConfig(exact_every_steps=4))
    optimizer = Loro(groups, config, config.loro, [], SHARE, alone)
    for step in range(1, 5):
        if step in (2, 4):
            optimizer.skip(step)
        else:
            for group in groups:
                for name in group.names:
                    group.add_gradient(name, torch.ones_like(group.sums[name]), first=True)
            optimizer.step(torch.tensor([1.0]), RATE, step)
        moments = [each.tensor for each in optimizer.pieces() if each.quantity != "master"]
        assert all((moment == 0).all() == (step == 4) for moment in moments)


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
