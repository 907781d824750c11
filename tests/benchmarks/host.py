"""What a block costs the host: ``python -m tests.benchmarks.host [--repeats N]``.

A GPU waits for the host where it launches kernels slower than they run, as at micro-batch 1. What a launch costs cannot
be seen without a GPU; how many operations and Python calls there are to a block can, and how long they take where there
is next to nothing to compute. Ours is beside a block written plainly, as the published code has it; both forward and
backward with the sums of gradients, among ranks that are not there. Without a GPU each of our kernels is its reference,
which counts with all the operations that the kernel does in one: compare ours with ours of another day.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from boost_core.bench.published import PublishedRun
from boost_core.bench.rank import LoneCommunicator, draw_weights
from boost_core.config import JobSpec
from boost_core.parallel.ledger import CommunicationLedger
from boost_core.train.state import TrainState

CPU, LENGTH = torch.device("cpu"), 8
VIEWS = {"view", "transpose", "t", "permute", "unsqueeze", "squeeze", "slice", "select", "split", "unbind", "expand",
         "as_strided", "detach", "alias", "_unsafe_view", "split_with_sizes", "empty", "empty_like"}  # fmt: skip
Pass = Callable[[], object]


@dataclass(frozen=True)
class Cost:
    """Of one block, forward and backward."""

    launches: float
    calls: float
    seconds: float


class Launches(TorchDispatchMode):
    """Counts operations that a GPU would be given."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), keywords=None):
        self.count += function.overloadpacket.__name__ not in VIEWS
        return function(*arguments, **(keywords or {}))


def job(layers: int) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "host",
            "model": {
                "family": "cola", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": layers,
                "num_attention_heads": 4, "rank": 16, "vocab_size": 256, "tie_embeddings": True,
            },
            "parallelism": {"tensor_parallel_size": 2},
            "training": {"steps": 10, "sequence_length": LENGTH, "global_batch_size": 1, "micro_batch_size": 1},
        }
    )  # fmt: skip


def ours(layers: int) -> Pass:
    state = TrainState.initial(job(layers), CPU, draw_weights, communicator=LoneCommunicator)
    token_T = torch.arange(LENGTH)

    def run() -> None:
        state.ledger.clear()
        state.gradients.begin()
        state.model(token_T, token_T, state.rotation).sum().backward()
        state.gradients.finish()

    return run


def published(layers: int) -> Pass:
    ranks = LoneCommunicator(dist.group.WORLD, "tp", CommunicationLedger())
    run = PublishedRun(job(layers).model, ranks, LENGTH, torch.float32, CPU)
    token_T = torch.arange(LENGTH)

    def both() -> None:
        run.model(token_T, token_T).sum().backward()
        run._accumulate()

    return both


def launches(run: Pass) -> int:
    with Launches() as counted:
        run()
    return counted.count


def calls(run: Pass) -> int:
    """Python functions that are entered, in whatever thread."""
    found = 0

    def note(_frame: object, event: str, _argument: object) -> None:
        nonlocal found
        found += event == "call"

    sys.setprofile(note)
    try:
        run()
    finally:
        sys.setprofile(None)
    return found


def seconds(run: Pass, repeats: int) -> float:
    """The least of several medians: what others on the machine take is not the block's."""
    found = []
    for _ in range(5):
        times = []
        for _ in range(repeats):
            started = time.process_time()
            run()
            times.append(time.process_time() - started)
        found.append(statistics.median(times))
    return min(found)


def of_a_block(make: Callable[[int], Pass], repeats: int) -> Cost:
    """The difference between models that differ by some blocks."""
    few, many = 2, 10
    runs = [make(layers) for layers in (few, many)]
    for run in runs:
        run()
        run()
    found = [(launches(run), calls(run), seconds(run, repeats)) for run in runs]
    return Cost(*((more - less) / (many - few) for less, more in zip(*found, strict=True)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    costs = {"ours": of_a_block(ours, repeats), "as the published code": of_a_block(published, repeats)}
    dist.destroy_process_group()
    lines = [f"{'a block, forward and backward':32}{'operations':>12}{'calls':>8}{'host, µs':>12}"]
    for name, cost in costs.items():
        lines.append(f"{name:32}{cost.launches:12.1f}{cost.calls:8.1f}{cost.seconds * 1e6:12.0f}")
    lines.append(f"host time as a ratio: {costs['ours'].seconds / costs['as the published code'].seconds:.2f}")
    sys.stdout.write("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
