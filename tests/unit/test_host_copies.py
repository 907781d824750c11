"""Copies in page-locked memory, on a driver that is a stand-in: exact sizes, locked once, ahead of the loop."""

import gc
import logging
import mmap
from types import SimpleNamespace

import pytest
import torch

from boost_core.checkpoint import host_copies as host_copies_module
from boost_core.checkpoint.chunks import Chunk
from boost_core.checkpoint.host_copies import HostCopies
from boost_core.checkpoint.locked_memory import locked_like


class Driver:
    """CUDA's, which locks memory or does not."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.locked = status, dict[int, int]()
        self.registered = 0

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802, CUDA's name
        assert address % mmap.PAGESIZE == size % mmap.PAGESIZE == flags == 0
        self.registered += 1
        if self.status == 0:
            self.locked[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    return driver


def test_locked_memory_is_as_large_as_what_is_in_it(driver: Driver) -> None:
    tensors = [torch.randn(3, 5), torch.arange(70_000), torch.zeros(1, dtype=torch.bfloat16)]
    made = locked_like(tensors)
    ((address, size),) = driver.locked.items()
    assert size - mmap.PAGESIZE < sum(tensor.nbytes + 255 for tensor in tensors)
    for tensor, copy in zip(tensors, made, strict=True):
        assert (copy.shape, copy.dtype) == (tensor.shape, tensor.dtype)
        assert copy.untyped_storage().nbytes() == tensor.nbytes and copy.is_contiguous()
        assert address <= copy.data_ptr() <= address + size - tensor.nbytes
        copy.copy_(tensor)
    assert all(torch.equal(*pair) for pair in zip(tensors, made, strict=True))


def test_memory_is_locked_as_long_as_a_tensor_is_in_it(driver: Driver) -> None:
    made = locked_like([torch.zeros(2000), torch.zeros(4)])
    last = made[1]
    del made
    gc.collect()
    assert driver.locked
    last.fill_(1.0)
    del last
    gc.collect()
    assert not driver.locked


def chunks(value: float) -> list[Chunk]:
    """One that says that it is on a GPU."""

    class OnGpu(torch.Tensor):
        is_cuda = True

    tensor = torch.full((100,), value).as_subclass(OnGpu)
    return [Chunk.of_shard("w.master", (100,), (0,), tensor, None, 0, 1)]


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, driver: Driver) -> Driver:
    stream = SimpleNamespace(synchronize=lambda: None)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    return driver


def test_a_prepared_copy_locks_nothing_in_the_loop(device: Driver) -> None:
    copies = HostCopies(1)
    copies.prepare(chunks(0.0))
    copies.prepare(chunks(0.0))
    assert device.registered == 1
    for value in (1.0, 2.0):
        (copy,) = copies.take(chunks(value))
        assert copy.tensor.eq(value).all()
    assert device.registered == 1


def test_memory_that_cannot_be_locked_at_once_is_torchs(
    device: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device.status, asked = 2, []
    monkeypatch.setattr(
        host_copies_module.torch, "empty_like",
        lambda tensor, device, pin_memory: asked.append(pin_memory) or torch.zeros(tensor.shape),
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        (copy,) = HostCopies(1).take(chunks(3.0))
    assert copy.tensor.eq(3.0).all() and asked == [True]
    assert "CUDA does not lock 4,096 bytes of the host's memory (error 2)" in caplog.text


def test_on_cpu_nothing_is_locked_or_taken_ahead(driver: Driver) -> None:
    copies = HostCopies(1)
    here = [Chunk.of_shard("w.master", (100,), (0,), torch.ones(100), None, 0, 1)]
    copies.prepare(here)
    assert copies.take(here)[0].tensor.eq(1.0).all()
    assert driver.registered == 0
