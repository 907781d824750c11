"""What the host does in and between steps: it reads once a step, and collects garbage only between two."""

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.peer_memory import Snapshot
from boost_core.data.corpus import Sampler, load_corpus
from boost_core.optim.zero import Gradients, adds_products
from boost_core.train import step
from boost_core.train.profiling import FULL_EVERY_STEPS, collected_between_steps, release_broken_step
from boost_core.train.state import TrainState
from boost_core.train.step import training_step
from tests.distributed.recording import train_and_record
from tests.jobs import tiny_job, write_corpus
from tests.numerics.lengths_on_device import lengths_on_device
from tests.unit.test_product_sums import AddingProducts

CPU = torch.device("cpu")
# What makes the host wait for a GPU: reading a number, finding out a shape, copying one number to it.
WAITS = {"_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "_unique2", "lift_fresh"}


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Waits(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        name = function.overloadpacket.__name__
        if name in WAITS:
            self.found.append(name)
        return function(*arguments, **(keywords or {}))


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("apart", [False, True])
def test_the_host_reads_once_a_step(tmp_path: Path, apart: bool) -> None:
    spec = tiny_job(
        write_corpus(tmp_path / "corpus"), "unused", parallelism={"tensor_parallel_size": 1},
        data={"documents_apart": apart},
    )  # fmt: skip
    state = TrainState.initial(spec, CPU)
    sampler = Sampler(load_corpus(spec.data, 32), 32, 0)
    training_step(state, sampler)
    # The update on CPU is torch's own, which makes a tensor of the step's number.
    reads, tolist = [], torch.Tensor.tolist

    def read(tensor: torch.Tensor) -> Any:
        reads.append(tensor.shape)
        return tolist(tensor)

    with (
        lengths_on_device(), patch.object(state.optimizer, "step"), patch.object(torch.Tensor, "tolist", read),
        Waits() as waits,
    ):  # fmt: skip
        training_step(state, sampler)
        step_waits = waits.found[:]
        torch.as_tensor(True)  # the count sees what it is for
        assert len(waits.found) == len(step_waits) + 1
    assert len(reads) == 1
    assert step_waits == []


@pytest.mark.full
def test_garbage_is_collected_between_steps_alone() -> None:
    class Node:
        alive = 0

        def __init__(self) -> None:
            self.itself = self
            Node.alive += 1

        def __del__(self) -> None:
            Node.alive -= 1

    assert gc.isenabled()
    with collected_between_steps() as collect:
        for step in range(2, 5):
            for _ in range(5_000):  # many more than the collector would wait for
                Node()
            assert Node.alive == 5_000
            collect(step)
            assert Node.alive == 0
        old = Node()
        collect(FULL_EVERY_STEPS)  # it has come through a full pass, and only another one looks at it
        del old
        collect(FULL_EVERY_STEPS + 1)
        assert Node.alive == 1
        collect(2 * FULL_EVERY_STEPS)
        assert Node.alive == 0
    assert gc.isenabled()


@pytest.mark.full
@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("broken", [(Gradients, "_has_come"), (Gradients, "_unscale"), (step, "_reduced"), None])
def test_nothing_holds_a_state_that_is_let_go(tmp_path: Path, broken: tuple[object, str] | None) -> None:
    """Or its memory would be missing, and its connections open: others would wait for one that waits no more."""
    corpus = write_corpus(tmp_path / "corpus")
    spec = tiny_job(corpus, "unused", parallelism={"tensor_parallel_size": 1}, training={"precision": "bf16"})
    adds_products.cache_clear()
    with AddingProducts():
        state, sampler = TrainState.initial(spec, CPU), Sampler(load_corpus(spec.data, 32), 32, 0)
        training_step(state, sampler)
        left = weakref.ref(state.gradients), weakref.ref(state.ledger), weakref.ref(state.model.head.weight)
        if broken:
            with patch.object(*broken, side_effect=ConnectionError), pytest.raises(ConnectionError) as error:
                training_step(state, sampler)
            release_broken_step(error.value)
            del error
    adds_products.cache_clear()
    del state, sampler
    gc.collect()
    assert [reference() for reference in left] == [None] * len(left)


@pytest.mark.usefixtures("alone")
def test_a_pipelines_inputs_are_gone_when_gradients_are_reduced(tmp_path: Path) -> None:
    spec = tiny_job(write_corpus(tmp_path / "corpus"), "unused", parallelism={"tensor_parallel_size": 1})
    state = TrainState.initial(spec, CPU)
    inputs, left = list[weakref.ref[torch.Tensor]](), list[bool]()

    def train(*tensors: Any) -> torch.Tensor:
        inputs.extend(map(weakref.ref, tensors[:3]))
        return torch.zeros((), dtype=torch.float64)

    def finish() -> None:
        left.extend(each() is not None for each in inputs)

    state.pipeline = SimpleNamespace(train=train)  # type: ignore[assignment]
    with patch.object(state.gradients, "finish", finish):
        step._reduced(state, spec.training.global_batch_size, 1)
    assert left == [False, False, False]


@pytest.mark.usefixtures("alone")
def test_a_job_without_copies_in_memory_makes_no_snapshots(tmp_path: Path) -> None:
    corpus, url = write_corpus(tmp_path / "corpus"), tmp_path / "checkpoints"
    spec = tiny_job(corpus, url, parallelism={"tensor_parallel_size": 1}, training={"steps": 2})
    with patch.object(Snapshot, "of", side_effect=AssertionError):
        train_and_record(spec)
    assert CheckpointFolder(str(url)).steps() == [2]


def test_nccls_streams_have_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    from service.gang.worker import worker as worker_module

    monkeypatch.delenv("TORCH_NCCL_HIGH_PRIORITY", raising=False)
    seen: list[str | None] = []
    worker = worker_module.Worker.__new__(worker_module.Worker)
    worker._store, worker.place = SimpleNamespace(), SimpleNamespace(address="127.0.0.1", accelerators=("3",))
    worker._visible = ()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    monkeypatch.setattr(worker_module.torch.cuda, "set_device", lambda _: None)
    worker._transport = SimpleNamespace(ask=lambda: None, begin=lambda *_: None)
    assignment = SimpleNamespace(
        spec=SimpleNamespace(
            resources=SimpleNamespace(gpus_per_worker=1), parallelism=SimpleNamespace(world_size=1)
        ),
        rank=0, rendezvous=SimpleNamespace(prefix="x"), gpus=("3",),
    )  # fmt: skip
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", "1")
    monkeypatch.setattr(worker_module, "PrefixStore", lambda *_: None)
    monkeypatch.setattr(worker_module.torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(
        worker_module.dist, "init_process_group",
        lambda *_, **__: seen.append(worker_module.os.environ.get("TORCH_NCCL_HIGH_PRIORITY")),
    )  # fmt: skip
    monkeypatch.setattr(worker_module.dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(worker_module.dist, "get_world_size", lambda: 1)
    worker._meet(assignment)
    monkeypatch.setenv("TORCH_NCCL_HIGH_PRIORITY", "0")  # an operator's word counts
    worker._meet(assignment)
    assert seen == ["1", "0"]
