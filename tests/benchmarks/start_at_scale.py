"""What the start of a gang costs as it grows, up to 4,096 ranks: requests to the store of objects, sockets, seconds.

``python -m tests.benchmarks.start_at_scale`` writes docs/figures/start_at_scale.md; it takes some minutes on two cores.
No machine here holds such a gang, so each phase is played by what can be run of it:

- The ranks meet at torch's own TCPStore, a process by itself, with a connection for each rank.
- torch's gloo connects groups of up to 96 ranks, which are threads of one process.
- The first and the last rank run the trainer's own code for the data's index and for listing and restoring a
  checkpoint that as many ranks wrote. What the others would tell them is known beforehand. Each request to the store
  counts: its seconds are those of the rank that makes most, one after the other, at the first byte of Amazon S3, and at
  least those in which S3 answers all ranks' (its published performance guidelines: 100 to 200 ms, and 5,500 a second
  for each prefix). The tensors are small, as the time for their bytes depends on the network alone.
"""

import argparse
import math
import os
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack
from datetime import timedelta
from functools import partial
from typing import Any, ClassVar, cast
from unittest.mock import patch

import fsspec
import psutil
import torch
import torch.distributed as dist
from fsspec.implementations.memory import MemoryFileSystem
from torch._C._distributed_c10d import PrefixStore, ProcessGroupGloo, TCPStore
from torch.testing._internal.distributed.fake_pg import FakeStore

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.resharding import load_chunks
from boost_core.checkpoint.shards import ChecksummingWriter, Chunk, SaveChunks, on_first_rank, read_on_first_rank
from boost_core.config import JobSpec
from boost_core.config.data_files import INDEX, Shard, TokenIndex, check_data
from boost_core.config.training import DataConfig, SourceConfig
from boost_core.parallel.mesh import ParallelMesh
from boost_core.train.checkpoint_manager import load_newest
from tests.benchmarks.figures import FIGURES, write_table

RANKS = (64, 512, 4096)
FIRST_BYTE_SECONDS, REQUESTS_PER_SECOND, KEYS_PER_LIST = 0.15, 5_500, 1_000
TENSORS = 6  # of which a rank has a part
SHARDS = 1_024  # of tokens
GLOO_RANKS = (24, 48, 96)
HEADER = ["phase", *(f"{ranks:,} ranks" for ranks in RANKS), "grows with"]


class CountedStore(MemoryFileSystem):  # type: ignore[misc]  # fsspec has no types
    """Objects in memory; counts what a client of S3 would send."""

    protocol = "counted"
    store: ClassVar[dict[str, Any]] = {}
    pseudo_dirs: ClassVar[list[str]] = [""]
    requests: ClassVar[Counter[str]] = Counter()
    read = 0

    def ls(self, path: str, detail: bool = True, **named: Any) -> list[Any]:
        """List a folder, a thousand names at a time."""
        found: list[Any] = super().ls(path, detail=detail, **named)
        self.requests["list"] += max(1, math.ceil(len(found) / KEYS_PER_LIST))
        return found

    def info(self, path: str, **named: Any) -> dict[str, Any]:
        """Describe an object."""
        self.requests["head"] += 1
        return cast(dict[str, Any], super().info(path, **named))

    def cat_file(self, path: str, *arguments: Any, **named: Any) -> bytes:
        """Read an object."""
        content = cast(bytes, super().cat_file(path, *arguments, **named))
        self.requests["get"] += 1
        type(self).read += len(content)
        return content

    def _open(self, path: str, mode: str = "rb", *arguments: Any, **named: Any) -> Any:
        if mode == "rb":
            self.requests["head"] += 1
            self.requests["get"] += 1
            type(self).read += super().info(path)["size"]
        return super()._open(path, mode, *arguments, **named)


def play(ranks: int, rank: int, told: dict[int, list[Any]]) -> AbstractContextManager[Any]:
    """A gang of which this process is one rank; what the first tells the others is kept for them."""
    turns = iter(range(1_000))

    def broadcast(objects: list[Any], src: int = 0, **_: Any) -> None:
        turn = next(turns)
        if rank == 0:
            told[turn] = list(objects)
        else:
            objects[:] = told[turn]

    def gather(everyones: list[Any], own: Any, **_: Any) -> None:
        # All but the first have read their own part, as this one has.
        everyones[:] = [_verified_by(number) if isinstance(own, list) and own else own for number in range(ranks)]
        everyones[rank] = own

    stack = ExitStack()
    stack.enter_context(patch.object(dist, "broadcast_object_list", broadcast))
    stack.enter_context(patch.object(dist, "all_gather_object", gather))
    dist.init_process_group("fake", rank=rank, world_size=ranks, store=FakeStore())
    stack.callback(dist.destroy_process_group)
    return stack


def _verified_by(rank: int) -> list[str]:
    return [f"__{rank}_0.distcp"]


def chunks_of(rank: int, ranks: int) -> list[Chunk]:
    """A row of each tensor."""
    return [Chunk(f"tensor_{number}", (ranks, 16), (rank, 0), torch.zeros(1, 16)) for number in range(TENSORS)]


def write_checkpoint(folder: CheckpointFolder, ranks: int, spec: JobSpec) -> None:
    """What as many ranks would write, by the trainer's own planner and writer."""
    planners = [SaveChunks(chunks_of(rank, ranks)) for rank in range(ranks)]
    for number, planner in enumerate(planners):
        planner.set_up_planner({}, None, is_coordinator=number == 0)
    folder.prepare(1)
    writer = ChecksummingWriter(folder.step_url(1), folder.is_local, single_file=True, **folder.storage_options)
    writer.set_up_storage_writer(is_coordinator=True)
    plans, index = planners[0].create_global_plan([planner.create_local_plan() for planner in planners])
    results = [
        writer.write_data(planner.finish_plan(plan), planner).wait()
        for plan, planner in zip(writer.prepare_global_plan(plans), planners, strict=True)
    ]
    writer.finish(index, results)
    folder.commit_written(spec, spec.parallelism, 1, 1, writer.checksums)


def counted(action: Callable[[], Any]) -> tuple[Counter[str], int, float]:
    """Requests, bytes and CPU seconds of an action."""
    CountedStore.requests.clear()
    CountedStore.read, before = 0, time.process_time()
    action()
    return Counter(CountedStore.requests), CountedStore.read, time.process_time() - before


def restore(ranks: int, spec: JobSpec) -> dict[str, tuple[int, int, float, float]]:
    """For each phase: requests of all ranks and of the one with most, bytes that all read, and CPU seconds of one."""
    folder = CheckpointFolder(f"counted://checkpoints/{ranks}")
    write_checkpoint(folder, ranks, spec)
    told: dict[str, dict[int, list[Any]]] = {"list": {}, "load": {}}
    costs: dict[str, list[tuple[Counter[str], int, float]]] = {"list": [], "load": []}
    for rank in (0, ranks - 1):
        with play(ranks, rank, told["list"]):
            costs["list"].append(counted(partial(load_newest, lambda _: None, folder)))
        with play(ranks, rank, told["load"]):

            def load(own: int = rank) -> None:
                manifest = read_on_first_rank(partial(folder.manifest, 1))
                load_chunks(folder, manifest, chunks_of(own, ranks))

            costs["load"].append(counted(load))
    return {name: _of_gang(ranks, *both) for name, both in costs.items()}


def _of_gang(
    ranks: int, first: tuple[Counter[str], int, float], last: tuple[Counter[str], int, float]
) -> tuple[int, int, float, float]:
    each = [sum(requests.values()) for requests, _, _ in (first, last)]
    return each[0] + (ranks - 1) * each[1], max(each), first[1] + (ranks - 1) * last[1], max(first[2], last[2])


def data_index(ranks: int) -> tuple[int, int, float, float]:
    """The same for the index of the tokens."""
    shards = tuple(
        Shard(part="training" if number else "validation", name=f"{number:06}.bin", tokens=10**8)
        for number in range(SHARDS)
    )
    index = TokenIndex(
        dtype="uint16", vocabulary=32_000, end_of_document=0, shards=shards, source="benchmark", complete=True
    )
    fsspec.filesystem("counted").pipe_file(f"counted://tokens/{INDEX}", index.model_dump_json().encode())
    told: dict[int, list[Any]] = {}
    costs = []
    # Unchecked, as no job may name this scheme.
    data = DataConfig.model_construct(
        source=SourceConfig.model_construct(kind="tokenized", paths=("counted://tokens",))
    )
    for rank in (0, ranks - 1):
        with play(ranks, rank, told):
            costs.append(counted(lambda: on_first_rank(partial(check_data, data, 32_000, 4_096, new=False))))
    return _of_gang(ranks, *costs)


_SERVER = """
import sys, time
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def meet(ranks: int) -> float:
    """Seconds in which as many clients connect to the store, and each leaves its address and reads the first one's."""
    with subprocess.Popen([sys.executable, "-c", _SERVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as server:
        assert server.stdout is not None
        assert server.stdin is not None
        port, began = int(server.stdout.readline()), time.monotonic()
        clients = []
        for number in range(ranks):
            clients.append(TCPStore("127.0.0.1", port))
            clients[-1].set(f"address/{number}", "10.0.0.1:12345")
            clients[-1].get("address/0")
        seconds = time.monotonic() - began
        server.stdin.close()
    return seconds


def gloo(ranks: int, lazily: bool) -> tuple[int, int]:
    """Sockets of a rank in a group of gloo, and bytes that it reads from the store."""
    with patch.dict(os.environ, {"TORCH_GLOO_LAZY_INIT": str(int(lazily))}):
        store, groups = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), {}

        def connect(rank: int) -> None:
            own = TCPStore("127.0.0.1", store.port)
            groups[rank] = own, ProcessGroupGloo(PrefixStore("group", own), rank, ranks, timedelta(seconds=120))

        before = psutil.Process().num_fds()
        threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        values = sum(len(store.get(key)) for key in store.list_keys())
        return (psutil.Process().num_fds() - before) // ranks, values


def mesh(ranks: int) -> float:
    """Seconds in which a rank lays out the mesh, where each group of ranks is created by itself (without NCCL)."""
    spec = job_of(ranks)
    dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        began = time.process_time()
        ParallelMesh.build(spec.parallelism, torch.device("cpu"))
        return time.process_time() - began
    finally:
        dist.destroy_process_group()


def job_of(ranks: int) -> JobSpec:
    """A job of tp 8 × dp."""
    model = {
        "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 8, "vocab_size": 256, "rank": 16,
        "num_hidden_layers": 1,
    }  # fmt: skip
    training = {"steps": 1, "global_batch_size": ranks // 8, "micro_batch_size": 1, "sequence_length": 16}
    sizes = {"tensor_parallel_size": 8, "data_parallel_size": ranks // 8}
    return JobSpec.model_validate({"name": "large", "model": model, "training": training, "parallelism": sizes})


def main() -> None:
    """Play all phases, and write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    fsspec.register_implementation("counted", CountedStore, clobber=True)
    rows = []
    met = [meet(ranks) for ranks in RANKS]
    rows.append(["ranks meet at the store", *(f"{seconds:.2f} s" for seconds in met), "n"])
    groups = [mesh(ranks) for ranks in RANKS]
    rows.append(["a rank's mesh, group by group (gloo)", *(f"{seconds:.2f} s of CPU" for seconds in groups), "n"])
    for lazily in (False, True):
        of = [gloo(ranks, lazily) for ranks in GLOO_RANKS]
        rows.append(_gloo_row(of, lazily))
    restored = [restore(ranks, job_of(ranks)) for ranks in RANKS]
    phases = {
        "the index of the data": ([data_index(ranks) for ranks in RANKS], "nothing"),
        "listing checkpoints": ([each["list"] for each in restored], "n, a page of names for 1,000 files"),
        "restoring one": ([each["load"] for each in restored], "n, by the store's limit"),
    }
    for name, (costs, growth) in phases.items():
        rows.append([name, *map(_in_words, costs), growth])
    write_table(FIGURES / "start_at_scale.md", HEADER, rows)


def _gloo_row(of: list[tuple[int, int]], lazily: bool) -> list[str]:
    """What was measured of small groups, continued to large ones as it grows: sockets and bytes by a line."""
    (small, large), between = (of[0], of[-1]), GLOO_RANKS[-1] - GLOO_RANKS[0]
    sockets = (large[0] - small[0]) / between
    value = [each[1] / ranks for each, ranks in zip(of, GLOO_RANKS, strict=True)]  # bytes of a rank's addresses
    longer = (value[-1] - value[0]) / between
    cells = []
    for ranks in RANKS:
        read = ranks * (value[0] + longer * (ranks - GLOO_RANKS[0]))
        cells.append(f"{small[0] + sockets * (ranks - GLOO_RANKS[0]):,.0f} sockets, {read / 1e6:,.3g} MB a rank")
    how = "as ranks first speak to each other" if lazily else "all with all"
    return [f"the savers' gloo group, {how}", *cells, "n a rank" if lazily else "n² a rank"]


def _in_words(cost: tuple[int, int, float, float]) -> str:
    requests, most, read, worked = cost
    seconds = max(most * FIRST_BYTE_SECONDS, requests / REQUESTS_PER_SECOND) + worked
    return f"{seconds:.2f} s: {requests:,} requests, {read / 1e6:,.3g} MB"


if __name__ == "__main__":
    main()
