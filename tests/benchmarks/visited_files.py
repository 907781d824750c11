"""The files of ours that a reader visits to follow one flow: those whose functions are called while it runs.

``python -m tests.benchmarks.visited_files plan`` runs a flow in this process and prints each file with the functions
called in it, in the order of first calls. Modules are imported before; what runs while they are is not counted.
"""

import sys
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import redirect_stdout
from functools import partial
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType
from typing import Any

ROOT = Path(__file__).parents[2]
_PACKAGES = tuple(f"{ROOT / package}/" for package in ("boost_core", "service"))


def plan() -> Callable[[], object]:
    """``boost plan`` of the example with 7B parameters."""
    from service.cli.main import app

    return lambda: app(["plan", str(ROOT / "examples/cola-7b.yaml")], standalone_mode=False)


def reshard() -> Callable[[], object]:
    """A checkpoint saved by two tensor parallel ranks' shards, and loaded as whole tensors."""
    import torch
    import torch.distributed as dist

    from boost_core.checkpoint.folder import CheckpointFolder
    from boost_core.checkpoint.resharding import load_chunks
    from boost_core.checkpoint.shards import Chunk, save_chunks
    from boost_core.config import load_job

    with TemporaryDirectory() as path:
        dist.init_process_group("gloo", init_method=f"file://{path}/store", rank=0, world_size=1)
    job = load_job(ROOT / "examples/cola-7b.yaml")

    def flow() -> None:
        with TemporaryDirectory() as path:
            folder = CheckpointFolder(path)
            shards = [Chunk.of_shard("weight", (2, 3), (0, 0), torch.ones(2, 3), 0, rank, 2) for rank in range(2)]
            folder.commit_written(job, job.parallelism, 1, 1, save_chunks(folder, 1, shards))
            (stored,) = folder.checkpoints()
            load_chunks(folder, folder.manifest(stored.step), [Chunk.whole("weight", torch.zeros(4, 3))])

    return flow


def block(**layout: int) -> Callable[[], object]:
    """A CoLA block's forward and backward pass with latent recomputation on one of two ranks; a fork is the other."""
    import os

    import torch
    import torch.distributed as dist

    from boost_core.parallel.recompute import Lookahead, run_in_turns
    from boost_core.train.batch import Batch
    from boost_core.train.state import TrainState
    from tests.jobs import tiny_job

    with TemporaryDirectory() as folder:
        rank = 0 if os.fork() else 1
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
        dist.barrier()
        job = tiny_job(Path("/corpus"), "/checkpoints", parallelism={"recompute": "latent", **layout})
        state = TrainState.initial(job, torch.device("cpu"))
        dist.barrier()
    sequences = torch.arange(33).view(1, 33).numpy()
    batch = Batch.of(sequences, None, torch.device("cpu"))
    local = state.partitioner.partition(batch, sequences)
    residual = state.model.embed(local.of(batch.tokens))

    def flow() -> None:
        passed = state.model.blocks["0"](residual, local.rotation.for_layer(), None, Lookahead())
        result, _ = run_in_turns([passed])[0]
        result.inputs.sum().backward()

    if rank:
        flow()
        os._exit(0)
    return flow


# Each imports what its flow needs and returns the flow.
FLOWS: Mapping[str, Callable[[], Callable[[], object]]] = {
    "plan": plan,
    "reshard": reshard,
    "block": partial(block, tensor_parallel_size=2),
    "context_block": partial(block, tensor_parallel_size=1, context_parallel_size=2),
}


def visited(flow: Callable[[], object]) -> dict[str, list[str]]:
    """Run a flow and return the functions that it calls, by file, without comprehensions and lambdas."""
    functions: dict[str, dict[str, None]] = {}

    def note(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(_PACKAGES) and not code.co_name.startswith("<"):
            functions.setdefault(str(Path(code.co_filename).relative_to(ROOT)), {})[code.co_qualname] = None

    sys.setprofile(note)
    try:
        with redirect_stdout(StringIO()):
            flow()
    finally:
        sys.setprofile(None)
    return {file: list(names) for file, names in functions.items()}


def main(name: str) -> None:
    """Print the files that a flow visits, with their functions, and both numbers."""
    functions = visited(FLOWS[name]())
    for file, names in functions.items():
        sys.stdout.write(f"{file}: {', '.join(names)}\n")
    folders = Counter(file.rpartition("/")[0] for file in functions)
    sys.stdout.write(", ".join(f"{count} in {folder}" for folder, count in folders.most_common()) + "\n")
    sys.stdout.write(f"{len(functions)} files, {sum(map(len, functions.values()))} functions\n")


if __name__ == "__main__":
    main(*sys.argv[1:])
