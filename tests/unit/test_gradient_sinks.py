"""Gradients of the bottlenecks' weights go straight into their sums, and are those that autograd would have added."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from boost_core.data.corpus import Sampler, load_corpus
from boost_core.parallel.btp import GradientSinks, WeightPart
from boost_core.train.batch import Batch
from boost_core.train.state import TrainState
from tests.jobs import tiny_job, write_corpus

CPU = torch.device("cpu")
GROUPED, APART = {}, {"group_projections": False}


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def loss_of(tmp_path: Path, choice: dict[str, Any]) -> tuple[TrainState, torch.Tensor]:
    """A state and the loss of one micro-batch, before its backward pass."""
    spec = tiny_job(
        write_corpus(tmp_path / "corpus"), "unused",
        model={"num_key_value_heads": 2}, parallelism={"tensor_parallel_size": 1, **choice},
    )  # fmt: skip
    state = TrainState.initial(spec, CPU)
    sampler = Sampler(load_corpus(spec.data, 32), 32, 0)
    batch = Batch.of(sampler.sequences(0, 2), None, CPU)
    state.gradients.begin()
    return state, state.model(batch.tokens, batch.targets, state.partitioner.rotation).sum()


def sums(state: TrainState) -> dict[str, torch.Tensor]:
    return {name: each for group in state.optimizer.groups for name, each in group.summed_gradients().items()}


@pytest.mark.full
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("choice", [GROUPED, APART, {"recompute": "latent"}, {"recompute": "full"}], ids=str)
def test_a_backward_pass_has_no_other_within_it(tmp_path: Path, choice: dict[str, Any]) -> None:
    found = []
    for through_autograd in (False, True):
        state, loss = loss_of(tmp_path, choice)
        if through_autograd:
            state.model.strategy.deferred.sinks.gradients.clear()
        with patch.object(torch.autograd, "backward", wraps=torch.autograd.backward) as backward:
            loss.backward()
        assert (backward.call_count == 1) is not through_autograd
        assert all(weight.grad is None for weight in state.model.parameters())
        found.append(
            {name: each for group in state.optimizer.groups for name, each in group.summed_gradients().items()}
        )
    straight, through = found
    assert all(straight[name].norm() > 0 and torch.equal(straight[name], through[name]) for name in through)


def names_of(gradient_function: Any) -> set[str]:
    """Names of all of autograd's nodes behind one."""
    seen, found = {gradient_function}, [gradient_function]
    for node in found:
        new = {after for after, _ in node.next_functions if after is not None} - seen
        seen |= new
        found += new
    return {node.name() for node in found}


@pytest.mark.usefixtures("alone")
def test_no_weight_is_sliced_as_a_whole(tmp_path: Path) -> None:
    sliced = []
    add = GradientSinks.add

    def note(self: GradientSinks, weight: torch.Tensor, gradient: torch.Tensor) -> None:
        sliced.append("SliceBackward0" in (names_of(weight.grad_fn) if weight.grad_fn is not None else set()))
        add(self, weight, gradient)

    for choice, expected in ((GROUPED, False), (APART, True)):
        _, loss = loss_of(tmp_path, choice)
        sliced.clear()
        with patch.object(GradientSinks, "add", note):
            loss.backward()
        assert any(sliced) is expected


def test_a_part_is_where_its_view_is() -> None:
    taken: list[tuple[torch.Tensor, WeightPart | None]] = []
    weight = nn.Parameter(torch.empty(0))
    weight.data = torch.zeros(100)[7:31].view(4, 3, 2)
    sinks = GradientSinks()
    sinks.gradients[id(weight)] = lambda gradient, part: taken.append((gradient, part))
    for view in (lambda x: x, lambda x: x.flatten(1), lambda x: x[1:3], lambda x: x[:, 1:2].flatten(1), lambda x: x.mT):
        gradient = torch.randn_like(view(weight.detach()))
        sinks.add(view(weight), gradient)
        got, part = taken.pop()
        sums = torch.zeros(50)[3:27].view(4, 3, 2)
        if part is None:
            sums += got.reshape(sums.shape)
        else:
            part.of(sums).add_(got)
        expected = torch.zeros(4, 3, 2)
        view(expected).add_(gradient)
        assert torch.equal(sums, expected)
