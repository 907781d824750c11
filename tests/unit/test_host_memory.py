"""What blocks keep on the host, on a stand-in of a GPU's streams that run in any order."""

import random
from math import nan

import pytest
import torch

from boost_core.parallel import activation_offload
from boost_core.parallel.activation_offload import HostCopy, HostMemory
from tests.unit.stand_in_gpu import Gpu, stand_in

SEGMENTS, ON_THE_WAY, STEPS = 9, 4, 3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    gpu, copy = stand_in(monkeypatch), activation_offload._copy
    monkeypatch.setattr(HostCopy, "_copies_later", True)
    monkeypatch.setattr(activation_offload, "_copy", lambda *tensors: gpu.current.queue(lambda: copy(*tensors)))
    return gpu


@pytest.mark.parametrize("seed", range(20))
def test_memory_is_used_again_only_once_it_was_copied(gpu: Gpu, seed: int) -> None:
    host, values, found = HostMemory(), iter(range(100)), list[tuple[int, torch.Tensor]]()
    for _ in range(STEPS):
        kept = list[tuple[int, torch.Tensor, HostCopy]]()
        for number in range(SEGMENTS):
            host.segment()
            if number >= ON_THE_WAY:
                _overwrite(gpu, kept[number - ON_THE_WAY][1])
            value, tensor = next(values), torch.empty(8)
            gpu.current.queue(lambda tensor=tensor, value=value: tensor.fill_(value))
            copy = host.put(tensor)
            copy.keepers += 1
            kept.append((value, tensor, copy))
        while kept:
            value, _, copy = kept.pop()
            for _, _, ahead in kept[-2:]:
                ahead.fetch()
            come, read = copy.take(), torch.zeros(8)
            gpu.current.queue(lambda come=come, read=read: read.copy_(come))
            _overwrite(gpu, come)
            found.append((value, read))
    gpu.run(random.Random(seed))
    assert all((read == value).all() for value, read in found)
    assert len(host.free[32]) == SEGMENTS  # as many buffers as there were copies at a time


@pytest.mark.parametrize("seed", range(20))
def test_what_comes_back_does_not_overwrite_memory_that_is_still_read(
    gpu: Gpu, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The allocator gives memory out as soon as its last user is queued."""
    host = HostMemory()
    host.segment()
    copy = host.put(torch.ones(8))
    copy.keepers += 1
    for _ in range(ON_THE_WAY):
        host.segment()
    used, read, found = torch.zeros(8), torch.zeros(8), torch.zeros(8)
    gpu.current.queue(lambda: used.fill_(7))
    gpu.current.queue(lambda: read.copy_(used))
    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", lambda *_, **__: used)
        copy.fetch()
    come = copy.take()
    gpu.current.queue(lambda: found.copy_(come))
    gpu.run(random.Random(seed))
    assert (read == 7).all() and (found == 1).all()


def test_what_is_abandoned_leaves_its_buffer_to_others() -> None:
    host = HostMemory()
    host.segment()
    copy = host.put(torch.ones(8))
    copy.keepers += 1
    del copy
    host.leaving.clear()
    assert len(host.free[32]) == 1


def _overwrite(gpu: Gpu, tensor: torch.Tensor) -> None:
    """As who is given its memory next."""
    gpu.current.queue(lambda: tensor.fill_(nan))
