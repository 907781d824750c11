"""What the ledger keeps of a GPU's collectives, with NCCL's work played as torch 2.8 and newer have it.

Such a work holds what it writes for as long as it lives, and what it reads, its stash, until it is first waited for.
"""

from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.reductions import StorageWeakRef
from torch.testing._internal.distributed.fake_pg import FakeStore

from boost_core.data.corpus import Sampler, load_corpus
from boost_core.parallel import communicator
from boost_core.parallel.communicator import CommunicationLedger, Entry, Part
from boost_core.train.state import TrainState
from boost_core.train.step import training_step
from tests.jobs import tiny_job, write_corpus
from tests.numerics.storages import Made

CPU = torch.device("cpu")
ENTRY = Entry("all_reduce", "tp", "latent")


class PlayedEvent:
    """An event that the device reaches a second after the one before."""

    reached = 0.0

    def __init__(self) -> None:
        PlayedEvent.reached += 1
        self.at = PlayedEvent.reached

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: "PlayedEvent") -> float:
        return 1000 * (later.at - self.at)


class PlayedWork:
    """A collective that reads what it is given at the time at which it is waited for."""

    def __init__(self, outputs: list[torch.Tensor], inputs: list[torch.Tensor], run: Callable[[], None]) -> None:
        self._outputs, self._stash, self._run = outputs, inputs, run

    def wait(self) -> None:
        self._run()
        self._stash.clear()

    def is_completed(self) -> bool:
        raise AssertionError("asking NCCL takes a lock")


@pytest.fixture
def on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    """All that the ledger starts counts as a GPU's."""
    monkeypatch.setattr(communicator, "timed_event", PlayedEvent)

    def start(
        ledger: CommunicationLedger, entry: Entry, payload: torch.Tensor, launch: Callable[[], PlayedWork]
    ) -> communicator._OnCuda:
        ledger.count(entry, payload)
        return communicator._OnCuda(launch, payload, entry, ledger)

    monkeypatch.setattr(CommunicationLedger, "start", start)


def is_alive(storage: StorageWeakRef) -> bool:
    return not storage.expired()


@pytest.mark.usefixtures("on_cuda")
def test_the_payload_is_alive_until_the_wait_and_the_result_no_longer_than_its_reader() -> None:
    ledger, seen = CommunicationLedger(), []
    payload, received = torch.ones(4), torch.empty(4)
    sent, got = StorageWeakRef(payload.untyped_storage()), StorageWeakRef(received.untyped_storage())
    # Without a stash of its own, as torch before 2.8: what is handed over is kept by the ledger itself.
    works = [PlayedWork([received], [], lambda: seen.append(is_alive(sent)))]
    pending = ledger.start(ENTRY, payload, works.pop)
    del payload, received
    assert is_alive(sent) and is_alive(got)
    ledger.part = Part.BACKWARD
    pending.wait()
    assert seen == [True]
    assert not is_alive(sent) and not is_alive(got)
    with pytest.raises(AssertionError, match="waited for already"):
        pending.wait()


@pytest.mark.usefixtures("on_cuda")
def test_times_are_read_from_the_computing_streams_events() -> None:
    ledger = CommunicationLedger()
    pending = ledger.start(ENTRY, torch.ones(4), lambda: PlayedWork([], [], lambda: None))
    for _ in range(5):  # computation that hides it
        PlayedEvent()
    ledger.part = Part.BACKWARD
    pending.wait()
    ledger.part = Part.OPTIMIZER
    line = ledger.totals()[ENTRY]
    assert (line.seconds, line.exposed_seconds) == (7, 1)
    assert ledger.exposed_seconds == {Part.BACKWARD: 1}
    assert ledger.totals()[ENTRY] == line
    ledger.clear()
    assert ledger.totals() == {}


@pytest.mark.usefixtures("on_cuda")
def test_captured_collectives_count_at_each_replay() -> None:
    ledger = CommunicationLedger()
    recordings = []
    for timed in (False, True):
        with ledger.recorded(timed) as recording:
            ledger.part = Part.FORWARD
            ledger.start(ENTRY, torch.ones(4), lambda: PlayedWork([], [], lambda: None)).wait()
        recordings.append(recording)
    assert ledger.totals() == {}
    (untimed, no_times), (timed_too, _) = recordings
    assert not no_times and untimed == timed_too
    for _ in range(2):
        ledger.clear()
        ledger.replay(recording)
        ledger.replay(recording)
        line = ledger.totals()[ENTRY]
        assert (line.calls, line.elements, line.seconds, line.exposed_seconds) == (2, 8, 4, 2)
        assert ledger.exposed_seconds == {Part.FORWARD: 2}


def test_no_stream_is_taken_from_torchs_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(communicator, "timed_event", PlayedEvent)

    class OnGpu(torch.Tensor):
        is_cuda = True

    with (
        patch.object(torch.cuda, "Stream", side_effect=AssertionError),
        patch.object(torch.cuda, "stream", side_effect=AssertionError),
    ):
        payload = torch.ones(4).as_subclass(OnGpu)
        pending = CommunicationLedger().start(ENTRY, payload, lambda: PlayedWork([], [], lambda: None))
        pending.wait()


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield
    dist.destroy_process_group()


def played(collective: Callable[..., object], *tensors: torch.Tensor, **_: object) -> PlayedWork:
    """A collective of two ranks that hold the same."""

    def run() -> None:
        if len(tensors) == 1:
            return
        out, given = tensors[0].view(-1), tensors[1].reshape(-1)
        out.copy_(given.repeat(2)[: len(out)])

    return PlayedWork([tensors[0]], list(tensors[1:]), run)


@pytest.mark.full
@pytest.mark.parametrize(
    "choice",
    [
        {"tensor_parallel_size": 2},
        {"tensor_parallel_size": 2, "norm": "online_paper", "recompute": "latent"},
        {"tensor_parallel_size": 1, "data_parallel_size": 2, "zero_stage": 2},
    ],
)
@pytest.mark.usefixtures("on_cuda", "alone")
def test_no_micro_batch_leaves_memory_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, choice: dict[str, object]
) -> None:
    replicas = int(str(choice.get("data_parallel_size", 1)))
    spec = tiny_job(
        write_corpus(tmp_path / "corpus"), tmp_path / "job", parallelism=choice,
        training={"global_batch_size": 4 * replicas, "micro_batch_size": 1, "steps": 10},
    )  # fmt: skip
    state = TrainState.initial(spec, CPU)
    sampler = Sampler(load_corpus(spec.data, spec.training.sequence_length), spec.training.sequence_length, 0)
    monkeypatch.setattr(communicator.dist, "all_reduce", lambda tensor, *_, **__: played(dist.all_reduce, tensor))
    for name in ("_all_gather", "_reduce_scatter"):
        monkeypatch.setattr(communicator, name, partial(played, getattr(communicator, name)))
    training_step(state, sampler)
    alive: list[int] = []
    enter = state.clock.enter

    def note(part: Part) -> None:
        enter(part)
        if part in (Part.FORWARD, Part.OPTIMIZER):
            alive.append(sum(size for storage, size in made.sizes.items() if is_alive(storage)))

    with Made() as made:
        monkeypatch.setattr(state.clock, "enter", note)
        training_step(state, sampler)
    # The first micro-batch is the first to write the sums of gradients. Without replicas the last one also writes the
    # norms of the largest group's. Both are there all along.
    assert len(alive) == 5
    alive[4] -= max(group._norms.nbytes for group in state.optimizer.groups) if replicas == 1 else 0
    assert max(alive[1:]) - min(alive[1:]) < 64, alive
