"""What a block costs the host and a GPU's queue: ``python -m tests.benchmarks.host [--repeats N]``.

A GPU waits for the host where it launches kernels slower than they run, as at micro-batch 1. What a launch costs cannot
be seen without a GPU; how many there are to a block can, with the Python calls around them and the bytes that they
move (``tests/numerics/host_counts.py``), beside a block written plainly, as the published code has it. How long the
host takes is timed where there is next to nothing to compute; each of our kernels is then its reference, which takes
the time of all the operations that the kernel does in one.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import astuple

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from boost_core.bench.rank import LoneCommunicator, draw_weights
from boost_core.config import JobSpec
from boost_core.parallel.communicator import CommunicationLedger
from boost_core.train.state import TrainState
from tests.benchmarks.figures import FIGURES, write_table
from tests.gpu.published import PublishedRun
from tests.numerics import host_counts

CPU, LENGTH = torch.device("cpu"), 8
FEW, MANY = 2, 10  # blocks
HEADER = ("block", "pass", "launches", "Python calls", "memory traffic", "sliced gradients", "nested backward passes")
# Counted by ``host_counts`` on commit fdd8dcf, before gradients went to their sums without autograd.
EARLIER = [host_counts.Cost(27, 689, 4_790_784, 0, 0), host_counts.Cost(65, 555, 9_850_880, 4, 10)]
Pass = Callable[[], object]


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
        state.model(token_T, token_T, state.partitioner.rotation).sum().backward()
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


def of_a_block(make: Callable[[int], Pass], repeats: int) -> float:
    """Seconds of a block: the difference between models that differ by some."""
    runs = [make(layers) for layers in (FEW, MANY)]
    for run in runs:
        run()
        run()
    less, more = (seconds(run, repeats) for run in runs)
    return (more - less) / (MANY - FEW)


def rows_of(name: str, costs: list[host_counts.Cost]) -> list[list[str]]:
    rows = []
    for direction, cost in zip(("forward", "backward"), costs, strict=True):
        launches, calls, moved, slices, nested = astuple(cost)
        counts = [f"{launches:.0f}", f"{calls:.0f}", f"{moved / 1e6:.2f} MB", f"{slices:.0f}", f"{nested:.0f}"]
        rows.append([name, direction, *counts])
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=30)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    with host_counts.as_on_a_gpu():
        counted = {name: [*host_counts.of_a_block(make)] for name, make in host_counts.BLOCKS.items()}
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    ratio = of_a_block(ours, repeats) / of_a_block(published, repeats)
    dist.destroy_process_group()
    plain, *mine = [rows_of(name, costs) for name, costs in counted.items()]
    rows = [*plain, *rows_of("ours at fdd8dcf", EARLIER), *(row for each in mine for row in each)]
    rows.append(
        ["host time of ours with reference kernels, relative to the plain block", "both", f"{ratio:.2f}"] + [""] * 4
    )
    write_table(FIGURES / "host.md", HEADER, rows)
    sys.stdout.write((FIGURES / "host.md").read_text())


if __name__ == "__main__":
    main()
