"""What each strategy sends, counted: under BTP four all-reduces of 7r latent elements a block and token."""

import pytest
import torch

from boost_core.architecture import block_exchanges, saved_latents
from boost_core.config import ModelConfig, ParallelismConfig
from boost_core.parallel.communicator import Entry, Totals
from boost_core.parallel.recompute import PURPOSE
from tests.numerics.sharded import run_sharded
from tests.ranks import Ranks

SEQUENCES, LENGTH = 2, 16
TOKENS = SEQUENCES * LENGTH


def model(**changes) -> ModelConfig:
    shape = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4, "rank": 12,
        "vocab_size": 256,
    }  # fmt: skip
    return ModelConfig.model_validate(shape | changes)


def counted(lines: dict[Entry, Totals]) -> dict[tuple[str, str], tuple[int, int]]:
    return {(entry.kind, entry.purpose): (line.calls, line.elements) for entry, line in lines.items()}


@pytest.mark.parametrize(("size", "layers", "rank"), [(2, 1, 12), (2, 3, 12), (4, 2, 5)])
def test_every_collective_of_btp_forward_and_backward(ranks: Ranks, size: int, layers: int, rank: int) -> None:
    config = model(num_hidden_layers=layers, rank=rank)
    hidden_shard = config.hidden_size // size
    for outcome in ranks.run(size, run_sharded, config, ParallelismConfig(), SEQUENCES, LENGTH, torch.float32):
        # Spelled out here from the paper, so that neither the model nor the plan vouches for itself.
        latents_and_statistics = (3 * rank + 1) + rank + (2 * rank + 1) + rank
        assert counted(outcome.forward) == {
            ("all_reduce", "latent"): (4 * layers, latents_and_statistics * TOKENS * layers),
            ("all_reduce", "hidden"): (1, TOKENS),  # the statistic of the norm before the head
            ("all_gather", "hidden"): (1, hidden_shard * TOKENS),
            ("all_reduce", "loss maximum"): (1, TOKENS),
            ("all_reduce", "loss sums"): (1, 2 * TOKENS),
        }
        assert counted(outcome.backward) == {
            ("all_reduce", "latent gradient"): (4 * layers, latents_and_statistics * TOKENS * layers),
            ("all_reduce", "hidden gradient"): (1, TOKENS),
            ("reduce_scatter", "hidden gradient"): (1, hidden_shard * size * TOKENS),
        }


@pytest.mark.parametrize("gate", ["identity", "dense", "tensor"])
def test_lax_sends_no_more_than_cola(ranks: Ranks, gate: str) -> None:
    cola, lax = (
        ranks.run(2, run_sharded, config, ParallelismConfig(), SEQUENCES, LENGTH, torch.float32)[0]
        for config in (model(), model(family="lax", lax={"gate": gate}))
    )
    assert counted(lax.forward) == counted(cola.forward)
    assert counted(lax.backward) == counted(cola.backward)


CHOICES = [
    ({"family": "dense", "rank": None}, {}),
    ({}, {"strategy": "vanilla"}),
    ({}, {"strategy": "vanilla", "group_projections": False}),
    ({"num_key_value_heads": 2}, {"strategy": "vanilla"}),
    ({}, {}),
    ({"hidden_size": 128, "intermediate_size": 352, "rank": 32}, {}),
    ({}, {"norm": "online_paper"}),
    ({}, {"norm": "sync"}),
    ({}, {"group_projections": False}),
    ({}, {"norm": "sync", "group_projections": False}),
    ({}, {"recompute": "shared"}),
    ({"family": "lax", "num_key_value_heads": 2}, {"recompute": "shared", "group_projections": False}),
]


@pytest.mark.parametrize(
    ("shape", "choice"), CHOICES, ids=[f"{shape or ''}{choice or ''}" for shape, choice in CHOICES]
)
@pytest.mark.parametrize("sequences", [1, 3])
def test_the_plan_predicts_the_ledger(ranks: Ranks, shape: dict, choice: dict, sequences: int) -> None:
    config, parallelism = model(**shape), ParallelismConfig.model_validate(choice)
    outcome = ranks.run(2, run_sharded, config, parallelism, sequences, LENGTH, torch.float32)[0]
    of_blocks = {"latent", "wide", "statistic"}
    forward = [line for entry, line in outcome.forward.items() if entry.purpose in of_blocks]
    gradients = {f"{purpose} gradient" for purpose in of_blocks}
    backward = [line for entry, line in outcome.backward.items() if entry.purpose in gradients]
    tokens = sequences * LENGTH * config.num_hidden_layers
    again = [line for entry, line in outcome.backward.items() if entry.purpose == "wide again"]
    planned = block_exchanges(config, parallelism)
    for payloads, lines in zip(planned, (forward, backward, again), strict=True):
        assert sum(line.calls for line in lines) == len(payloads) * config.num_hidden_layers
        assert sum(line.elements for line in lines) == sum(payload.passed(2) for payload in payloads) * tokens
        assert sum(line.bytes for line in lines) == 4 * sum(line.elements for line in lines)
        assert all(line.seconds > 0 for line in lines)
    gathers = [line for entry, line in outcome.backward.items() if (entry.group, entry.purpose) == ("tp", PURPOSE)]
    latents = [
        width
        for layer in range(config.num_hidden_layers if parallelism.recompute == "shared" else 0)
        for width in saved_latents(config, parallelism, config.crosses_into(layer))
    ]
    assert sum(line.calls for line in gathers) == len(latents)
    assert sum(line.bytes for line in gathers) == 4 * sum(latents) * sequences * LENGTH // 2
    of_their_own = sum(line.elements for entry, line in outcome.forward.items() if entry.purpose == "statistic")
    assert of_their_own == sum(payload.statistics for payload in planned.forward if not payload.elements) * tokens


def test_dense_ranks_send_as_much_as_with_all_reduces_and_gather_what_they_read_again(ranks: Ranks) -> None:
    config = model(family="dense", rank=None)
    outcome = ranks.run(2, run_sharded, config, ParallelismConfig(), SEQUENCES, LENGTH, torch.float32)[0]
    whole, shard = (64 * TOKENS // part for part in (1, 2))
    of_blocks = {key: line for key, line in counted(outcome.forward).items() if "loss" not in key[1]}
    assert of_blocks == {
        ("reduce_scatter", "embedding"): (1, whole), ("all_gather", "wide"): (4, 4 * shard),
        ("reduce_scatter", "wide"): (4, 4 * whole), ("all_gather", "hidden"): (1, shard),
    }  # fmt: skip
    assert counted(outcome.backward) == {
        ("reduce_scatter", "hidden gradient"): (1, whole), ("all_gather", "wide gradient"): (4, 4 * shard),
        ("all_gather", "wide again"): (4, 4 * shard), ("reduce_scatter", "wide gradient"): (4, 4 * whole),
        ("all_gather", "embedding gradient"): (1, shard),
    }  # fmt: skip


def test_one_rank_sends_nothing(ranks: Ranks) -> None:
    (outcome,) = ranks.run(1, run_sharded, model(), ParallelismConfig(), SEQUENCES, LENGTH, torch.float32)
    assert not outcome.forward
    assert not outcome.backward
