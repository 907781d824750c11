"""What runs while a collective is under way: told by the order of events, not by a clock."""

from typing import Any

import pytest
import torch
import torch.distributed as dist

from boost_core.config import ModelConfig, ParallelismConfig
from boost_core.model.attention import Rotation
from boost_core.model.decoder import build
from boost_core.parallel.communicator import CommunicationLedger, Communicator, Pending
from boost_core.parallel.shard import make_weights
from tests.numerics.sharded import batch
from tests.numerics.test_collective_count import LENGTH, model
from tests.ranks import Ranks

Event = tuple[str, str]


class Watched(Communicator):
    """Writes down when latents leave and when they are waited for."""

    def __init__(self, events: list[Event]) -> None:
        super().__init__(dist.group.WORLD, "tp", CommunicationLedger())
        self.events = events

    def start_all_reduce_(self, tensor: torch.Tensor, purpose: str, *how: Any, **named: Any) -> Pending:
        pending = super().start_all_reduce_(tensor, purpose, *how, **named)
        if purpose.startswith("latent"):
            self.events.append(("start", purpose))
        return WatchedPending(pending, purpose, self.events)


class WatchedPending:
    def __init__(self, pending: Pending, purpose: str, events: list[Event]) -> None:
        self.pending, self.purpose, self.events = pending, purpose, events

    def wait(self) -> None:
        if self.purpose.startswith("latent"):
            self.events.append(("wait", self.purpose))
        self.pending.wait()


def events_of_a_step(config: ModelConfig, parallelism: ParallelismConfig, sequences: int) -> list[Event]:
    events: list[Event] = []
    collectives = Watched(events)
    network, axes = build(config, parallelism, collectives)
    make_weights(network, axes, collectives.rank, collectives.size, 7, torch.device("cpu"))
    for name, weight in network.named_parameters():
        weight.register_post_accumulate_grad_hook(lambda _, name=name: events.append(("gradient", name)))
    tokens, targets = batch(config, sequences, LENGTH)
    rotation = Rotation(LENGTH, config.head_size, config.rope_theta, torch.device("cpu"))
    network(tokens.flatten(), targets.flatten(), rotation).sum().backward()
    return events


def waits(events: list[Event], purpose: str) -> list[list[Event]]:
    """For each wait, what happened since the start that it belongs to; first started, first waited for."""
    starts = [index for index, event in enumerate(events) if event == ("start", purpose)]
    ends = [index for index, event in enumerate(events) if event == ("wait", purpose)]
    return [events[start + 1 : end] for start, end in zip(starts, ends, strict=True)]


def test_weight_gradients_are_computed_while_a_latents_gradient_is_under_way(ranks: Ranks) -> None:
    for events in ranks.run(2, events_of_a_step, model(), ParallelismConfig(), 2):
        under_way = waits(events, "latent gradient")
        assert len(under_way) == 4 * 2
        assert all(meanwhile and {kind for kind, _ in meanwhile} == {"gradient"} for meanwhile in under_way)
        # B's gradient comes right behind its latent's; so does that of the A which follows it in the block.
        assert [name for _, name in under_way[0]] == ["blocks.1.down.up_0"]
        assert [name for _, name in under_way[1]] == ["blocks.1.down.down", "blocks.1.gate_up.up_0"]
        every = [name for kind, name in events if kind == "gradient"]
        assert len(every) == len(set(every))


def test_two_halves_that_are_recomputed_take_turns_forward_and_backward(ranks: Ranks) -> None:
    choice = ParallelismConfig.model_validate({"split_micro_batch": True, "recompute": "latent"})
    for events in ranks.run(2, events_of_a_step, model(), choice, 4):
        for purpose in ("latent", "latent gradient"):
            under_way = waits(events, purpose)
            assert len(under_way) == 2 * 4 * 2
            # Before one half is waited for, the other has come as far as its own exchange.
            assert all(("start", purpose) in meanwhile for meanwhile in under_way[:-1])


@pytest.mark.parametrize("sequences", [1, 3])
def test_halves_that_are_not_recomputed_take_turns_forward_alone(ranks: Ranks, sequences: int) -> None:
    choice = ParallelismConfig.model_validate({"split_micro_batch": True})
    for events in ranks.run(2, events_of_a_step, model(), choice, sequences):
        under_way = waits(events, "latent")
        assert len(under_way) == 2 * 4 * 2
        # In each of two blocks the second half's latents have only the other's queries, keys and values to hide behind.
        assert sum(("start", "latent") not in meanwhile for meanwhile in under_way[:-1]) == 2
        # One backward pass: gradients are exchanged, and those of weights computed, once for both halves.
        under_way = waits(events, "latent gradient")
        assert len(under_way) == 4 * 2
        assert all(meanwhile and {kind for kind, _ in meanwhile} == {"gradient"} for meanwhile in under_way)


def test_without_a_split_nothing_else_runs_forward(ranks: Ranks) -> None:
    events = ranks.run(2, events_of_a_step, model(), ParallelismConfig(), 4)[0]
    assert all(meanwhile == [] for meanwhile in waits(events, "latent"))
