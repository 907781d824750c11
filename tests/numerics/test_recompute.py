"""What is kept for backward, counted tensor by tensor, and what it costs to keep less."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from boost_core.architecture import grouped_projections
from boost_core.config import ModelConfig, ParallelismConfig
from boost_core.kernels.residual_add import residual_add
from boost_core.model.attention import Rotation
from boost_core.model.decoder import build
from boost_core.parallel.communicator import CommunicationLedger, Communicator, Pending
from boost_core.parallel.recompute import PURPOSE
from boost_core.parallel.shard import make_weights
from tests.numerics.sharded import run_sharded
from tests.numerics.storages import Made
from tests.numerics.test_collective_count import LENGTH, SEQUENCES, counted, model
from tests.ranks import Ranks


def kept_by_a_block(config: ModelConfig, parallelism: ParallelismConfig, sequences: int) -> int:
    """Bytes that live on after one block's forward, its input included and its output not."""
    collectives = Communicator(dist.group.WORLD, "tp", CommunicationLedger())
    network, axes = build(config, parallelism, collectives)
    make_weights(network, axes, collectives.rank, collectives.size, 7, torch.device("cpu"))
    rotation = Rotation(LENGTH, config.head_size, config.rope_theta, torch.device("cpu"))
    shard = config.hidden_size // collectives.size
    residual = residual_add(torch.randn(sequences * LENGTH, shard, requires_grad=True), None)
    network.through(["1"], residual, None, rotation)  # what is made once, such as the rotation's angles, is made here
    with Made() as made:
        out, _ = network.through(["1"], residual, None, rotation)
    kept, given_on = (each.inputs.nbytes + each.squares.nbytes for each in (residual, out))
    return made.alive_bytes() + kept - given_on


def kept_a_token(ranks: Ranks, size: int, config: ModelConfig, recompute: str) -> float:
    """fp32 elements that a block keeps of each token."""
    choice = ParallelismConfig.model_validate({"recompute": recompute})
    few, many = (ranks.run(size, kept_by_a_block, config, choice, sequences)[0] for sequences in (2, 6))
    return (many - few) / (4 * LENGTH * 4)


@pytest.mark.parametrize("family", ["svd", "cola"])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_latent_keeps_the_latents_and_the_residual_and_nothing_else(ranks: Ranks, size: int, family: str) -> None:
    config = model(family=family)
    # 7r of latents and two residual shards; the norms' two statistics travel in the latents' payload. A block's input
    # has this rank's sum of squares with it.
    latent = 7 * config.bottleneck_rank + 2 + 2 * config.hidden_size / size + 1
    assert kept_a_token(ranks, size, config, "latent") == latent
    # Of the latents a slice; statistics are whole.
    shared = (7 * config.bottleneck_rank + 2 * config.hidden_size) / size + 3
    assert kept_a_token(ranks, size, config, "shared") == shared
    assert kept_a_token(ranks, size, config, "full") == config.hidden_size / size + 1
    assert kept_a_token(ranks, size, config, "none") > 2 * latent


@pytest.mark.full
@pytest.mark.parametrize("family", ["cola", "lax"])
def test_latent_adds_no_collective_and_full_repeats_them_all(ranks: Ranks, family: str) -> None:
    config = model(family=family)
    none, latent, full = (
        ranks.run(
            2, run_sharded, config, ParallelismConfig.model_validate({"recompute": recompute}), SEQUENCES, LENGTH,
            torch.float32,
        )[0]
        for recompute in ("none", "latent", "full")
    )  # fmt: skip
    assert counted(latent.forward) == counted(none.forward) == counted(full.forward)
    assert counted(latent.backward) == counted(none.backward)
    again = {("all_reduce", "latent"): counted(none.forward)["all_reduce", "latent"]}
    assert counted(full.backward) == counted(none.backward) | again


@pytest.mark.full
@pytest.mark.parametrize("family", ["svd", "cola", "lax"])
@pytest.mark.parametrize("size", [pytest.param(1, marks=pytest.mark.nightly), 2])
def test_what_the_host_has_changes_no_bit_and_is_sent_as_it_is_shared(ranks: Ranks, size: int, family: str) -> None:
    config = model(family=family, num_hidden_layers=3)
    choices = [{"recompute": mode} for mode in ("shared", "offload")]
    if family == "cola":
        choices = [choice | {"split_micro_batch": True, "group_projections": False} for choice in choices]
    shared, offload = (
        ranks.run(
            size, run_sharded, config, ParallelismConfig.model_validate(choice), SEQUENCES, LENGTH, torch.bfloat16
        )[-1]
        for choice in choices
    )
    assert torch.equal(offload.loss, shared.loss)
    assert all(torch.equal(offload.gradients[name], gradient) for name, gradient in shared.gradients.items())
    assert counted(offload.forward) == counted(shared.forward)
    assert counted(offload.backward) == counted(shared.backward)


@pytest.mark.full
@pytest.mark.parametrize("family", ["svd", "cola", "lax"])
@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.nightly)])
def test_latents_that_are_shared_change_no_bit_and_are_gathered_once(ranks: Ranks, size: int, family: str) -> None:
    config = model(family=family, num_hidden_layers=3)
    choices = [{"recompute": mode} for mode in ("latent", "shared")]
    if size == 2:
        choices = [choice | {"split_micro_batch": True, "group_projections": False} for choice in choices]
    latent, shared = (
        ranks.run(
            size, run_sharded, config, ParallelismConfig.model_validate(choice), SEQUENCES, LENGTH, torch.bfloat16
        )[-1]
        for choice in choices
    )
    assert torch.equal(shared.loss, latent.loss)
    assert all(torch.equal(shared.gradients[name], gradient) for name, gradient in latent.gradients.items())
    assert counted(shared.forward) == counted(latent.forward)
    into, exchanges = (2 if family == "lax" else 0), counted(latent.forward)["all_reduce", "latent"][0]
    elements = (3 + into) * 7 * config.bottleneck_rank * SEQUENCES * LENGTH // size
    gathers = {("all_gather", "kept latent"): (exchanges + exchanges * into // 3, elements)}
    assert counted(shared.backward) == counted(latent.backward) | gathers


class Ordered(Communicator):
    """Notes when latents begin to be gathered, and when they are waited for."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        Ordered.notes: list[tuple[str, int]] = []

    def start_all_gather(self, gathered: torch.Tensor, shard: torch.Tensor, purpose: str) -> Pending:
        pending = super().start_all_gather(gathered, shard, purpose)
        if purpose != PURPOSE:
            return pending
        number = sum(note == "start" for note, _ in self.notes)
        self.notes.append(("start", number))
        return _Noted(pending, number)


@dataclass(frozen=True)
class _Noted:
    pending: Pending
    number: int

    def wait(self) -> None:
        Ordered.notes.append(("wait", self.number))
        self.pending.wait()


def order_of_gathers(config: ModelConfig) -> list[tuple[str, int]]:
    choice = ParallelismConfig(recompute="shared")
    run_sharded(config, choice, SEQUENCES, LENGTH, torch.float32, communicator=Ordered)
    return Ordered.notes


def test_latents_are_gathered_a_block_before_they_are_needed(ranks: Ranks) -> None:
    notes, blocks = ranks.run(2, order_of_gathers, model(num_hidden_layers=3))[0], 3
    segments = range(4 * blocks)
    expected = [("start", number) for number in segments[:4]]
    for number in segments:
        expected += [("start", number + 4)] if number + 4 in segments else []
        expected.append(("wait", number))
    assert notes == expected


def flops_of_products(config: ModelConfig, recompute: str) -> int:
    """What the matrix products of a step take on one rank, attention's own left out."""
    choice = ParallelismConfig.model_validate({"recompute": recompute})
    alone = Communicator(None, "tp", CommunicationLedger())
    network, axes = build(config, choice, alone)
    make_weights(network, axes, 0, 1, 7, torch.device("cpu"))
    tokens = torch.zeros(SEQUENCES * LENGTH, dtype=torch.int64)
    rotation = Rotation(LENGTH, config.head_size, config.rope_theta, torch.device("cpu"))
    with FlopCounterMode(display=False) as counter:
        network(tokens, tokens, rotation).sum().backward()
    return sum(
        flops for operator, flops in counter.get_flop_counts()["Global"].items() if "attention" not in str(operator)
    )


@pytest.mark.full
@pytest.mark.parametrize("family", ["svd", "cola", "lax"])
def test_latent_computes_no_latent_again(family: str) -> None:
    config = model(family=family, **({"lax": {"gate": "identity"}} if family == "lax" else {}))
    wide = sum(sum(group.wide_outs) for group in grouped_projections(config))
    up_projections = 2 * SEQUENCES * LENGTH * config.bottleneck_rank * wide * config.num_hidden_layers
    assert flops_of_products(config, "latent") - flops_of_products(config, "none") == up_projections
