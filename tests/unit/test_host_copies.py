"""Copies in page-locked memory, on a stand-in of a driver and of a device's streams: exact sizes, locked once, ahead of
the loop, each of one step's state whichever stream runs ahead."""

import gc
import logging
import mmap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from boost_core.checkpoint import saver
from boost_core.checkpoint.saver import HostCopies
from boost_core.checkpoint.shards import Chunk
from boost_core.optim.adamw import MasterWeightAdamW
from boost_core.parallel.activation_offload import page_locked_like
from boost_core.train import Membership, train
from tests.distributed.recording import Recorder
from tests.jobs import tiny_job, write_corpus


class Driver:
    """CUDA's, which locks memory or does not."""

    def __init__(self, status: int = 0) -> None:
        self.status, self.locked = status, dict[int, int]()
        self.registered, self.device = 0, 1

    @contextmanager
    def on(self, device: int) -> Iterator[None]:
        before, self.device = self.device, device
        yield
        self.device = before

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802, CUDA's name
        assert address % mmap.PAGESIZE == size % mmap.PAGESIZE == flags == 0
        self.registered += 1
        if self.status == 0:
            self.locked[address] = size
        return self.status

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        assert self.device == 1  # on another it would take that one's memory
        del self.locked[address]
        return 0


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    driver = Driver()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: driver.device)
    monkeypatch.setattr(torch.cuda, "device", driver.on)
    return driver


def test_locked_memory_is_as_large_as_what_is_in_it(driver: Driver) -> None:
    tensors = [torch.randn(3, 5), torch.arange(70_000), torch.zeros(1, dtype=torch.bfloat16)]
    made = page_locked_like(tensors)
    ((address, size),) = driver.locked.items()
    assert size - mmap.PAGESIZE < sum(tensor.nbytes + 255 for tensor in tensors)
    for tensor, copy in zip(tensors, made, strict=True):
        assert (copy.shape, copy.dtype) == (tensor.shape, tensor.dtype)
        assert copy.untyped_storage().nbytes() == tensor.nbytes and copy.is_contiguous()
        assert address <= copy.data_ptr() <= address + size - tensor.nbytes
        copy.copy_(tensor)
    assert all(torch.equal(*pair) for pair in zip(tensors, made, strict=True))


@pytest.mark.full
def test_memory_is_locked_as_long_as_a_tensor_is_in_it(driver: Driver) -> None:
    made = page_locked_like([torch.zeros(2000), torch.zeros(4)])
    last = made[1]
    del made
    gc.collect()
    assert driver.locked
    last.fill_(1.0)
    driver.device = 0  # as in a thread that has chosen none
    del last
    gc.collect()
    assert not driver.locked


class PlayedStream:
    """Work that a device has been given in order, and done up to some place."""

    def __init__(self, device: "PlayedDevice") -> None:
        self._device, self._queue = device, list[object]()

    def __enter__(self) -> None:
        self._before, self._device.current = self._device.current, self

    def __exit__(self, *_: object) -> None:
        self._device.current = self._before

    def queue(self, name: str, work: Callable[[], object]) -> None:
        self._queue.append((name, work))

    def wait_event(self, event: "PlayedEvent") -> None:
        self._queue.append(event)

    def wait_stream(self, other: "PlayedStream") -> None:
        event = PlayedEvent(self._device)
        event.record(other)
        self.wait_event(event)

    def advance(self) -> bool:
        """Do what can be done; whether that was anything."""
        advanced = False
        while self._queue and not (isinstance(self._queue[0], PlayedEvent) and not self._queue[0].reached):
            first, advanced = self._queue.pop(0), True
            if isinstance(first, tuple):
                self._device.done.append(first[0])
                first[1]()
        return advanced


class PlayedEvent:
    def __init__(self, device: "PlayedDevice") -> None:
        self._device, self.reached = device, False

    def record(self, stream: PlayedStream) -> None:
        stream.queue("event", lambda: setattr(self, "reached", True))

    def synchronize(self) -> None:
        while not self.reached:
            assert self._device.advance(), "waits for ever"


class PlayedDevice:
    """Does nothing until it has to, and then as much as it can of one stream before it looks at the other."""

    def __init__(self) -> None:
        self.computing = self.current = PlayedStream(self)
        self.streams, self.done, self.recorded = [self.computing], list[str](), list[PlayedStream]()

    def new_stream(self) -> PlayedStream:
        self.streams.append(PlayedStream(self))
        return self.streams[-1]

    def advance(self) -> bool:
        return any(stream.advance() for stream in self.streams)

    def prefer_the_newest(self) -> None:
        self.streams.reverse()


def chunks(value: float, played: PlayedDevice) -> list[Chunk]:
    """One that says that it is on a GPU."""

    class OnGpu(torch.Tensor):
        is_cuda = True

        def record_stream(self, stream: PlayedStream) -> None:
            played.recorded.append(stream)

        @classmethod
        def __torch_function__(cls, function, types, arguments=(), named=None):
            if function is torch.Tensor.copy_:
                copy, tensor = arguments[:2]
                assert named == {"non_blocking": True}
                played.current.queue("copy", lambda: copy.numpy().__setitem__(..., tensor.numpy()))
                return copy
            return super().__torch_function__(function, types, arguments, named or {})

    tensor = torch.full((100,), value).as_subclass(OnGpu)
    return [Chunk.of_shard("w.master", (100,), (0,), tensor, None, 0, 1)]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> PlayedDevice:
    played = PlayedDevice()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: played.current)
    monkeypatch.setattr(torch.cuda, "Stream", played.new_stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: stream)
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: PlayedEvent(played))
    return played


@pytest.fixture
def device(played: PlayedDevice, driver: Driver) -> Driver:
    return driver


def updated_around_a_copy(played: PlayedDevice, copies: HostCopies) -> tuple[Chunk, torch.Tensor]:
    """Queue an update to 2, a copy, work that leaves the state alone, and an update to 3."""
    here = chunks(1.0, played)
    state = here[0].tensor.numpy()
    played.computing.queue("update", lambda: state.fill(2.0))
    (copy,) = copies.take(here)
    played.computing.queue("forward", lambda: None)
    copies.before_update()
    played.computing.queue("update", lambda: state.fill(3.0))
    return copy, here[0].tensor


@pytest.mark.parametrize("copying_first", [False, True])
def test_a_copy_is_of_the_update_before_it_whichever_stream_is_ahead(
    played: PlayedDevice, device: Driver, copying_first: bool
) -> None:
    copies = HostCopies(1)
    copy, state = updated_around_a_copy(played, copies)
    if copying_first:
        played.prefer_the_newest()
    while played.advance():
        pass
    assert copy.tensor.eq(2.0).all() and state.numpy().max() == 3.0
    assert played.recorded == [stream for stream in played.streams if stream is not played.computing]
    if not copying_first:  # the copy has held nothing up but the update
        assert [name for name in played.done if name != "event"] == ["update", "forward", "copy", "update"]


def test_a_copy_is_there_once_it_was_waited_for(played: PlayedDevice, device: Driver) -> None:
    copies = HostCopies(1)
    copies.wait()
    copies.before_update()
    copy, _ = updated_around_a_copy(played, copies)
    assert "copy" not in played.done
    copies.wait()
    assert copy.tensor.eq(2.0).all()


@pytest.fixture
def order(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a run does with its state and the copies of it."""
    order: list[str] = []

    def noted(owner: object, name: str, what: str) -> None:
        function = getattr(owner, name)
        monkeypatch.setattr(owner, name, lambda *given, **named: (order.append(what), function(*given, **named))[1])

    noted(HostCopies, "take", "take")
    noted(HostCopies, "wait", "wait")
    noted(HostCopies, "before_update", "device waits")
    noted(MasterWeightAdamW, "step", "update")
    noted(saver, "save_chunks", "read")
    return order


def run(folder: Path, membership: Membership) -> None:
    """Two steps, and a checkpoint of the second."""
    spec = tiny_job(
        write_corpus(folder / "corpus"), folder / "job", parallelism={"tensor_parallel_size": 1},
        training={"steps": 2}, checkpoint={"every_steps": 2},
    )  # fmt: skip
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
    try:
        train(spec, Recorder(), membership)
    finally:
        dist.destroy_process_group()


def test_updates_wait_for_copies_and_what_reads_these_does(order: list[str], tmp_path: Path) -> None:
    run(tmp_path, Membership())
    assert order == ["device waits", "update", "device waits", "update", "take", "wait", "read"]


def test_no_copy_counts_that_an_abort_may_have_come_before(
    order: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    membership = Membership()
    monkeypatch.setattr(HostCopies, "wait", lambda _: membership.aborted.set())
    with pytest.raises(dist.DistError, match="aborted"):
        run(tmp_path, membership)
    assert "take" in order and "read" not in order


def test_a_prepared_copy_locks_nothing_in_the_loop(played: PlayedDevice, device: Driver) -> None:
    copies = HostCopies(1)
    copies.prepare(chunks(0.0, played))
    copies.prepare(chunks(0.0, played))
    assert device.registered == 1
    for value in (1.0, 2.0):
        (copy,) = copies.take(chunks(value, played))
        copies.wait()
        assert copy.tensor.eq(value).all()
    assert device.registered == 1


def test_memory_that_cannot_be_locked_at_once_is_torchs(
    played: PlayedDevice, device: Driver, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    device.status, asked = 2, []
    monkeypatch.setattr(
        saver.torch, "empty_like",
        lambda tensor, device, pin_memory: asked.append(pin_memory) or torch.zeros(tensor.shape),
    )  # fmt: skip
    with caplog.at_level(logging.WARNING):
        copies = HostCopies(1)
        (copy,) = copies.take(chunks(3.0, played))
    copies.wait()
    assert copy.tensor.eq(3.0).all() and asked == [True]
    assert "CUDA does not lock 4,096 bytes of the host's memory (error 2)" in caplog.text


def test_on_cpu_nothing_is_locked_or_taken_ahead(driver: Driver) -> None:
    copies = HostCopies(1)
    here = [Chunk.of_shard("w.master", (100,), (0,), torch.ones(100), None, 0, 1)]
    copies.prepare(here)
    assert copies.take(here)[0].tensor.eq(1.0).all()
    assert driver.registered == 0
