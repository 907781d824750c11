"""Muon on sharded factors against torch's own Muon, and its orthogonalization against singular values."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from boost_core.architecture import ParamKind, Role
from boost_core.config.training import MuonConfig, OptimizerConfig
from boost_core.optim.loro_muon import Muon, orthogonalized
from boost_core.optim.zero import ParamGroup
from boost_core.parallel.communicator import CommunicationLedger, Communicator
from tests.numerics.sharded import shard_of
from tests.ranks import Ranks

SHAPE = (2, 6, 16)  # projections, rank, long axis
ROLES = {"down": Role.DOWN_PROJECTION, "up": Role.UP_PROJECTION}
AXES = {"down": 0, "up": 2}
STEPS, RATE, DECAY, MOMENTUM, CLIP = 6, 0.02, 0.1, 0.9, 0.5


def drawn(seed: int) -> dict[str, Tensor]:
    """One tensor of each factor's shape; A is [n, g, r], B is [g, r, n]."""
    generator = torch.Generator().manual_seed(seed)
    first, second = (torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(2))
    return {"down": first.permute(2, 0, 1).contiguous(), "up": second}


def gathered(shard: Tensor, axis: int, ranks: int) -> Tensor:
    parts = [torch.empty_like(shard) for _ in range(ranks)]
    dist.all_gather(parts, shard.contiguous())
    return torch.cat(parts, dim=axis)


def trained() -> tuple[dict[str, Tensor], dict[str, Tensor], list[int]]:
    """The whole factors and their moments after some steps, and the elements of each exchange."""
    ledger = CommunicationLedger()
    tensor_parallel = Communicator(dist.group.WORLD, "tp", ledger)
    rank, size = tensor_parallel.rank, tensor_parallel.size
    weights = {name: nn.Parameter(shard_of(whole, AXES[name], rank, size).clone()) for name, whole in drawn(0).items()}
    kind = ParamKind(DECAY, split=True, partial=False, tied=False, custom_update=True, moments=1)
    group = ParamGroup(kind, weights, torch.float64, Communicator(None, "dp", ledger), zero_stage=1)
    muon = MuonConfig(momentum=MOMENTUM)
    optimizer = Muon([group], OptimizerConfig(kind="muon", muon=muon), muon, ROLES, tensor_parallel)
    for step in range(1, STEPS + 1):
        for name, gradient in drawn(step).items():
            group.add_gradient(name, shard_of(gradient, AXES[name], rank, size), first=True)
        optimizer.step(torch.tensor([CLIP]), RATE, step)
    kept = {name: gathered(weight.data, AXES[name], size) for name, weight in weights.items()}
    moments = {
        piece.name: gathered(piece.tensor, AXES[piece.name], size)
        for piece in group.pieces()
        if piece.quantity == "first_moment"
    }
    assert {piece.quantity for piece in group.pieces()} == {"master", "first_moment"}
    return kept, moments, [totals.elements // totals.calls for totals in ledger.totals().values()]


def projections(name: str, factor: Tensor) -> list[Tensor]:
    """The matrices of a factor, one a projection."""
    return [factor[:, index] if name == "down" else factor[index] for index in range(SHAPE[0])]


def by_torch() -> tuple[dict[str, list[Tensor]], dict[str, list[Tensor]]]:
    """The same by ``torch.optim.Muon``, whose Newton–Schulz steps, in bf16 by default, are in float64 here."""
    weights = {
        name: [nn.Parameter(each.clone()) for each in projections(name, factor)] for name, factor in drawn(0).items()
    }
    everything = [weight for each in weights.values() for weight in each]
    optimizer = torch.optim.Muon(
        everything, lr=RATE, weight_decay=DECAY, momentum=MOMENTUM, adjust_lr_fn="match_rms_adamw"
    )
    with patch.object(torch.Tensor, "bfloat16", torch.Tensor.double):
        for step in range(1, STEPS + 1):
            for name, gradient in drawn(step).items():
                for weight, each in zip(weights[name], projections(name, gradient), strict=True):
                    weight.grad = CLIP * each
            optimizer.step()
    moments = {name: [optimizer.state[each]["momentum_buffer"] for each in those] for name, those in weights.items()}
    return {name: [each.data for each in those] for name, those in weights.items()}, moments


@pytest.mark.parametrize("size", [1, 2, 4])
def test_steps_on_shards_are_those_of_torchs_muon(ranks: Ranks, size: int) -> None:
    expected, expected_moments = by_torch()
    for kept, moments, exchanged in ranks.run(size, trained):
        for name in ROLES:
            for ours, theirs in (
                (kept[name], expected[name]), (moments[name], expected_moments[name]),
            ):  # fmt: skip
                for mine, its in zip(projections(name, ours), theirs, strict=True):
                    # Sums in another order, 1e-15, grow by at most 3.4 in each of five steps, and by the condition.
                    torch.testing.assert_close(mine, its, rtol=1e-9, atol=1e-10)
        assert exchanged == ([] if size == 1 else [SHAPE[0] * SHAPE[1] ** 2])


@pytest.mark.parametrize("shape", [(3, 6, 16), (1, 8, 8), (2, 12, 5)])  # the last: fewer keys and values than ranks
def test_singular_values_are_moved_and_vectors_kept(shape: tuple[int, int, int]) -> None:
    x_grn = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    left, values, right = torch.linalg.svd(x_grn, full_matrices=False)
    moved = values / values.norm(dim=-1, keepdim=True)
    for _ in range(5):
        moved = 3.4445 * moved - 4.775 * moved**3 + 2.0315 * moved**5
    expected = left * moved.unsqueeze(-2) @ right
    found = orthogonalized(x_grn, Communicator(None, "tp", CommunicationLedger()))
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-10)


def test_no_gradient_moves_nothing() -> None:
    zero = torch.zeros(SHAPE)
    assert torch.equal(orthogonalized(zero, Communicator(None, "tp", CommunicationLedger())), zero)
