"""The head's loss is torch's, and the logits of all tokens never exist at once."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from boost_core.parallel import vocabulary
from boost_core.parallel.communicator import CommunicationLedger, Communicator
from tests.numerics.sharded import shard_of
from tests.numerics.storages import Made
from tests.ranks import Ranks

TOKENS, HIDDEN, VOCABULARY = 96, 8, 640
Gradients = tuple[torch.Tensor, torch.Tensor]


def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    x_Td = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64)
    head_dV = torch.randn(HIDDEN, VOCABULARY, generator=generator, dtype=torch.float64)
    return x_Td, head_dV, torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)


def chunked(tokens_at_once: int, z_loss: float) -> tuple[torch.Tensor, Gradients, int]:
    """Losses, gradients (of the vectors: this rank's part) and the largest tensor, in elements."""
    collectives = Communicator(dist.group.WORLD, "tp", CommunicationLedger())
    x_Td, head_dV, target_T = operands()
    head_dV = shard_of(head_dV, 1, collectives.rank, collectives.size).clone().requires_grad_()
    x_Td.requires_grad_()
    with Made() as made, patch.object(vocabulary, "CHUNK_ELEMENTS", tokens_at_once * head_dV.shape[1]):
        loss_T = vocabulary.token_losses(collectives, x_Td, head_dV, target_T, z_loss)
        loss_T.sum().backward()
    return loss_T.detach(), (x_Td.grad, head_dV.grad), made.largest_bytes() // 8


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize(("tokens_at_once", "z_loss"), [(1, 0.0), (10, 0.5), (TOKENS, 0.0)])
def test_the_loss_in_chunks_is_the_loss(ranks: Ranks, size: int, tokens_at_once: int, z_loss: float) -> None:
    x_Td, head_dV, target_T = operands()
    x_Td.requires_grad_()
    head_dV.requires_grad_()
    logits_TV = x_Td @ head_dV
    expected = torch.nn.functional.cross_entropy(logits_TV, target_T, reduction="none")
    (expected + z_loss * logits_TV.logsumexp(dim=-1).square()).sum().backward()
    outcomes = ranks.run(size, chunked, tokens_at_once, z_loss)
    for loss_T, _, largest in outcomes:
        torch.testing.assert_close(loss_T, expected.detach(), rtol=1e-12, atol=1e-12)
        # A chunk of logits, or else the head itself.
        assert largest == max(tokens_at_once, HIDDEN) * VOCABULARY // size
    parts = [gradients for _, gradients, _ in outcomes]
    torch.testing.assert_close(sum(dx for dx, _ in parts), x_Td.grad, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(torch.cat([dhead for _, dhead in parts], dim=1), head_dV.grad, rtol=1e-10, atol=1e-12)
