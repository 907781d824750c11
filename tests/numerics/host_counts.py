"""What a block gives a GPU to do and the host to run, counted without a GPU, beside a block written plainly.

Ours runs as on a GPU: each of Triton's kernels is one launch that does nothing, sums of weight gradients are added to
by torch's operation for that, and attention reads lengths from the device. The other is the published code's kind of
block (``tests.gpu.published``), operation by operation. Both are one rank of two, in bf16, of as many tokens as the
model is wide, forward and backward with the sums of weight gradients; a block is the difference between models that
differ by some.
"""

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from triton.runtime.jit import KernelInterface

from boost_core.bench.rank import LoneCommunicator, draw_weights
from boost_core.config import JobSpec
from boost_core.kernels.launch import always
from boost_core.optim import zero
from boost_core.parallel.communicator import CommunicationLedger
from boost_core.train.batch import Batch
from boost_core.train.state import TrainState
from tests.gpu.published import PublishedRun
from tests.numerics.lengths_on_device import lengths_on_device

CPU, LENGTH, RANKS = torch.device("cpu"), 256, 2
FEW, MANY = 2, 6  # blocks
VIEWS = {"view", "transpose", "t", "permute", "unsqueeze", "squeeze", "slice", "select", "split", "unbind", "expand",
         "as_strided", "detach", "alias", "_unsafe_view", "split_with_sizes", "empty", "empty_like", "new_empty",
         "empty_strided", "new_empty_strided", "lift_fresh"}  # fmt: skip
SLICED = {"slice_backward", "select_backward"}

Forward = Callable[[], torch.Tensor]
Backward = Callable[[torch.Tensor], None]


@dataclass(frozen=True)
class Model:
    """A micro-batch's forward pass to a number, and its backward pass with the sums of weight gradients."""

    forward: Forward
    backward: Backward


@dataclass(frozen=True)
class Cost:
    """Of a block in one direction.

    Attributes:
        launches: Operations and kernels that a GPU is given.
        calls: Python functions that are entered.
        moved: Bytes of the tensors that these are given and give, each once.
        slices: Gradients of parts that are filled up with zeros.
        nested: Backward passes within the backward pass.
    """

    launches: float
    calls: float
    moved: float
    slices: float
    nested: float


class Given(TorchDispatchMode):
    """Counts what a GPU is given."""

    def __init__(self) -> None:
        super().__init__()
        self.found = Counter[str]()
        self.moved = 0

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        keywords, name = keywords or {}, function.overloadpacket.__name__
        result = function(*arguments, **keywords)
        if name not in VIEWS:
            self.note(name, (arguments, result))
        return result

    def note(self, name: str, operands: Any) -> None:
        self.found[name] += 1
        tensors = [each for each in tree_leaves(operands) if isinstance(each, torch.Tensor)]
        self.moved += sum({each.data_ptr(): each.nbytes for each in tensors}.values())


def job(layers: int, **changes: Any) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "host",
            "model": {
                "family": "cola", "hidden_size": 256, "intermediate_size": 704, "num_hidden_layers": layers,
                "num_attention_heads": 4, "rank": 64, "vocab_size": 512, "tie_embeddings": True,
            },
            "parallelism": {"tensor_parallel_size": RANKS},
            "training": {
                "steps": 10, "sequence_length": LENGTH, "global_batch_size": 1, "micro_batch_size": 1,
                "precision": "bf16",
            },
            "resources": {"gpus_per_worker": 1},
        } | changes
    )  # fmt: skip


def ours(layers: int, **changes: Any) -> Model:
    """Ours, once it has learnt how often gradients come."""
    state = TrainState.initial(job(layers, **changes), CPU, draw_weights, communicator=LoneCommunicator)
    token_bt = torch.arange(LENGTH + 1).unsqueeze(0).remainder(40)
    batch = Batch.of_tokens(token_bt, state.end_of_document, 16)

    def forward() -> torch.Tensor:
        state.ledger.clear()
        state.gradients.begin()
        rotation = state.partitioner.rotation.with_documents(batch.starts)
        loss: torch.Tensor = state.model(batch.tokens, batch.targets, rotation).sum()
        return loss

    def backward(loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        state.gradients.finish()

    return Model(forward, backward)


def published(layers: int) -> Model:
    """As the published code, whose sums are added to once a micro-batch."""
    ranks = LoneCommunicator(dist.group.WORLD, "tp", CommunicationLedger())
    run = PublishedRun(job(layers).model, ranks, LENGTH, torch.bfloat16, CPU)
    token_T = torch.arange(LENGTH)

    def backward(loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]
        run._accumulate()

    return Model(lambda: run.model(token_T, token_T).sum(), backward)


BLOCKS: dict[str, Callable[[int], Model]] = {
    "as the published code": published,
    "ours": ours,
    "ours, documents apart": partial(ours, data={"documents_apart": True}),
}


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """One rank of two, in a group whose other one is not there, with kernels that do nothing."""
    dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    try:
        with (
            always("triton"), lengths_on_device(), patch.object(zero, "adds_products", lambda *_: True),
            torch.library._scoped_library("aten", "IMPL") as cpu,
            patch.object(KernelInterface, "__getitem__", lambda *_: lambda *_, **__: None),
        ):  # fmt: skip
            for name in ("addmm.dtype_out", "baddbmm.dtype_out"):  # which a CPU lacks
                cpu.impl(name, lambda *_, out, **__: out, "CPU")
            yield
    finally:
        dist.destroy_process_group()


def of_a_block(make: Callable[[int], Model]) -> tuple[Cost, Cost]:
    """Forward and backward."""
    few, many = (_of(make(layers)) for layers in (FEW, MANY))
    forward, backward = (
        Cost(*((more - less) / (MANY - FEW) for less, more in zip(one, other, strict=True)))
        for one, other in zip(few, many, strict=True)
    )
    return forward, backward


def _of(model: Model) -> list[tuple[float, ...]]:
    """Each direction's launches, calls, bytes, slices and nested backward passes, in a micro-batch after two others."""
    for _ in range(2):
        model.backward(model.forward())
    losses: list[torch.Tensor] = []
    directions = (lambda: losses.append(model.forward()), lambda: model.backward(losses.pop()))
    counts = []
    for direction in directions:
        given = Given()

        def launch(_kernel: Any, _grid: Any, given: Given = given) -> Callable[..., None]:
            return lambda *arguments, **keywords: given.note("triton", (arguments, keywords))

        with (
            given, patch.object(KernelInterface, "__getitem__", launch),
            patch.object(torch.autograd, "backward", wraps=torch.autograd.backward) as passes,
        ):  # fmt: skip
            direction()
        slices = sum(given.found[name] for name in SLICED)
        counts.append((given.found.total(), given.moved, slices, max(0, passes.call_count - 1)))
    calls = [_calls(direction) for direction in directions]
    return [(launches, called, *rest) for (launches, *rest), called in zip(counts, calls, strict=True)]


def _calls(work: Callable[[], None]) -> int:
    """Python functions that are entered, in whatever thread."""
    found = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal found
        found += event == "call"

    gc.collect()  # what it finalizes would be counted
    gc.disable()
    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
        gc.enable()
    return found
