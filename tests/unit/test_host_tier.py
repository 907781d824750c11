"""State that passes through the device's buffers, on a stand-in of a GPU's streams that run in any order."""

import random

import pytest
import torch

from boost_core.optim.zero import Staging
from tests.unit.stand_in_gpu import Gpu, stand_in

CHUNKS, STEPS = 5, 3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu, empty = stand_in(monkeypatch), torch.empty
    monkeypatch.setattr(torch, "empty", lambda *sizes, dtype, device: empty(*sizes, dtype=dtype))
    copy = torch.Tensor.copy_
    monkeypatch.setattr(
        torch.Tensor, "copy_", lambda to, source, **named: gpu.current.queue(lambda: copy(to, source, **named))
    )
    return gpu


@pytest.mark.parametrize("seed", range(20))
def test_chunks_are_updated_in_turns_whichever_stream_runs_ahead(gpu: Gpu, seed: int) -> None:
    state = torch.arange(64 * CHUNKS, dtype=torch.float32)
    expected, staging = state.clone(), Staging(torch.device("cuda"))
    staging.elements = 64
    for _ in range(STEPS):
        expected.mul_(2).add_(1)
        coming = staging.load([[state[:64]]])
        for number in range(CHUNKS):
            staged = coming
            if number + 1 < CHUNKS:
                coming = staging.load([[state[64 * (number + 1) : 64 * (number + 2)]]])
            (chunk,) = staging.use(staged)
            gpu.current.queue(lambda chunk=chunk: chunk.mul_(2).add_(1))
            staging.store(staged)
    gpu.run(random.Random(seed))
    assert torch.equal(state, expected)


@pytest.mark.parametrize("seed", range(20))
def test_a_buffer_that_is_only_read_is_not_overwritten_before(gpu: Gpu, seed: int) -> None:
    state, staging = torch.arange(64 * CHUNKS, dtype=torch.float32), Staging(torch.device("cuda"))
    staging.elements = 64
    rounded = torch.zeros_like(state)
    for here, weight in zip(state.split(64), rounded.split(64), strict=True):
        (chunk,) = staging.use(staging.load([[here]]))
        weight.copy_(chunk)
    gpu.run(random.Random(seed))
    assert torch.equal(rounded, state)


@pytest.mark.parametrize("seed", range(20))
def test_two_weights_at_a_time_are_seen_by_the_next_two(gpu: Gpu, seed: int) -> None:
    state = torch.ones(2, 64)
    staging = Staging(torch.device("cuda"))
    staging.elements = 64
    for _ in range(STEPS):
        one, other = (staging.load([[row]]) for row in state)
        (first,), (second,) = staging.use(one), staging.use(other)
        gpu.current.queue(lambda first=first, second=second: first.add_(second))
        staging.store(other)
        staging.store(one)
    gpu.run(random.Random(seed))
    assert state[:, 0].tolist() == [1 + STEPS, 1]
