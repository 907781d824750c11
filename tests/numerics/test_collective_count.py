"""What BTP sends, counted: four all-reduces of 7r latent elements a block and token, nothing for the embedding."""

import pytest
import torch

from boost_core.config import ModelConfig
from boost_core.parallel.ledger import Entry, Totals
from boost_core.plan.communication import block_backward, block_forward
from tests.numerics.sharded import run_sharded
from tests.ranks import Ranks

SEQUENCES, LENGTH = 2, 16
TOKENS = SEQUENCES * LENGTH


def model(layers: int, rank: int = 12) -> ModelConfig:
    return ModelConfig(
        hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4, rank=rank, vocab_size=256
    )


def counted(lines: dict[Entry, Totals]) -> dict[tuple[str, str], tuple[int, int]]:
    return {(entry.kind, entry.purpose): (line.calls, line.elements) for entry, line in lines.items()}


@pytest.mark.parametrize(("size", "layers", "rank"), [(2, 1, 12), (2, 3, 12), (4, 2, 5)])
def test_every_collective_of_forward_and_backward(ranks: Ranks, size: int, layers: int, rank: int) -> None:
    config = model(layers, rank)
    hidden_shard = config.hidden_size // size
    for outcome in ranks.run(size, run_sharded, config, SEQUENCES, LENGTH, torch.float32):
        # Spelled out here from the paper, so that neither the model nor the plan vouches for itself.
        latents_and_statistics = (3 * rank + 1) + rank + (2 * rank + 1) + rank
        assert counted(outcome.forward) == {
            ("all_reduce", "latent"): (4 * layers, latents_and_statistics * TOKENS * layers),
            ("all_gather", "hidden"): (1, (hidden_shard + 1) * TOKENS),
            ("all_reduce", "loss maximum"): (1, TOKENS),
            ("all_reduce", "loss sums"): (1, 2 * TOKENS),
        }
        assert counted(outcome.backward) == {
            ("all_reduce", "latent gradient"): (4 * layers, 7 * rank * TOKENS * layers),
            ("reduce_scatter", "hidden gradient"): (1, (hidden_shard + 1) * size * TOKENS),
        }


def test_the_plan_predicts_the_ledger(ranks: Ranks) -> None:
    config = model(layers=2)
    (outcome, *_) = ranks.run(2, run_sharded, config, SEQUENCES, LENGTH, torch.float32)
    for planned, line in (
        (block_forward(config), outcome.forward[Entry("all_reduce", "tp", "latent")]),
        (block_backward(config), outcome.backward[Entry("all_reduce", "tp", "latent gradient")]),
    ):
        elements = (planned.latent_elements + planned.statistic_elements) * TOKENS * config.num_hidden_layers
        assert line.calls == planned.all_reduces * config.num_hidden_layers
        assert line.elements == elements
        assert line.bytes == 4 * elements
        assert line.seconds > 0


def test_one_rank_sends_nothing(ranks: Ranks) -> None:
    (outcome,) = ranks.run(1, run_sharded, model(layers=1), SEQUENCES, LENGTH, torch.float32)
    assert not outcome.forward
    assert not outcome.backward
