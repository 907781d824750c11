"""What saving costs the training loop, the store and the host: ``python -m tests.benchmarks.checkpoint``.

The loop runs on one core of two, so that the saver's thread has the other, as a GPU's host has many. Throughput is
against a plain put of the same bytes by s3fs into the same S3 server, in turns.
"""

import os
import statistics
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fsspec
import psutil
import torch

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.peer_memory import SnapshotStore
from boost_core.checkpoint.saver import HostCopies, Saver, SaveRequest
from boost_core.checkpoint.shards import Chunk, save_chunks
from boost_core.data.corpus import Sampler, load_corpus
from boost_core.train.state import TrainState
from boost_core.train.step import training_step
from tests.benchmarks.figures import FIGURES, write_table
from tests.jobs import tiny_job, write_corpus
from tests.ranks import Ranks
from tests.s3 import BUCKET, s3_server

CPU = torch.device("cpu")
EVERY, SAVES, ROUNDS = 10, 3, 5
STORED_MIB, PUTS = 256, 5
MODEL = {
    "hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 8, "num_attention_heads": 8, "rank": 64,
}  # fmt: skip


def loop_seconds(corpus: Path, folder: Path) -> dict[str, Any]:
    """Seconds of thirty steps with three saves over those without, a list over rounds; and memory in MiB."""
    spec = tiny_job(
        corpus, folder, model=MODEL, parallelism={"tensor_parallel_size": 1},
        training={"sequence_length": 64, "global_batch_size": 4, "micro_batch_size": 4, "steps": 100_000},
    )  # fmt: skip
    state = TrainState.initial(spec, CPU)
    sampler = Sampler(load_corpus(spec.data, 64), 64, 0)
    checkpoints = CheckpointFolder(str(folder))
    copies = HostCopies(1)
    saver = Saver(checkpoints, spec.checkpoint, SnapshotStore(), (), lambda: None, lambda _: None, lambda: None)
    state_bytes = sum(chunk.tensor.nbytes for chunk in state.chunks())

    def steps(saves: bool) -> tuple[float, float]:
        held, started = 0.0, time.perf_counter()
        for number in range(1, EVERY * SAVES + 1):
            training_step(state, sampler)
            if saves and number % EVERY == 0:
                since = time.perf_counter()
                saver.outcome(wait=True)
                saver.start(
                    state.step, copies.take(state.chunks()), None, SaveRequest(state.manifest_writer(checkpoints))
                )
                held += time.perf_counter() - since
        seconds = time.perf_counter() - started
        saver.outcome(wait=True)
        return seconds, held

    steps(saves=True)  # the first copy takes its memory
    ratios, held = [], []
    for _ in range(ROUNDS):
        plain, (saving, stood_still) = steps(saves=False)[0], steps(saves=True)
        ratios.append(saving / plain)
        held.append(stood_still / saving)
    with _peak() as grown:
        saver.start(state.step, copies.take(state.chunks()), None, SaveRequest(state.manifest_writer(checkpoints)))
        saver.outcome(wait=True)
    return {"ratios": ratios, "held": held, "state": state_bytes / 2**20, "grown": grown[0]}


@contextmanager
def _peak() -> Iterator[list[float]]:
    """By how many MiB this process grows meanwhile, at most."""
    process, grown, ended = psutil.Process(), [0.0], threading.Event()
    before = process.memory_info().rss

    def watch() -> None:
        while not ended.wait(0.005):
            grown[0] = max(grown[0], (process.memory_info().rss - before) / 2**20)

    watcher = threading.Thread(target=watch)
    watcher.start()
    try:
        yield grown
    finally:
        ended.set()
        watcher.join()


def store_seconds(environment: dict[str, str], local: str) -> list[tuple[float, float]]:
    """Seconds of a checkpoint of the size given and of a plain put of as many bytes, in turns."""
    os.environ.update(environment)
    count = STORED_MIB << 18
    chunks = [Chunk.whole(f"tensor {number}", torch.randn(count // 8)) for number in range(8)]
    Path(local).write_bytes(b"".join(chunk.tensor.numpy().tobytes() for chunk in chunks))
    folder, filesystem = CheckpointFolder(f"s3://{BUCKET}/checkpoints"), fsspec.filesystem("s3")
    pairs = []
    for step in range(PUTS + 1):
        started = time.perf_counter()
        save_chunks(folder, step, chunks)
        middle = time.perf_counter()
        filesystem.put(local, f"{BUCKET}/plain-{step}")
        pairs.append((middle - started, time.perf_counter() - middle))
    return pairs[1:]


def main() -> None:
    """Measure and write the table."""
    ranks = Ranks()
    with tempfile.TemporaryDirectory() as folder, s3_server(_new(Path(folder) / "s3")) as server:
        corpus = write_corpus(Path(folder) / "corpus")
        loop = ranks.run(1, loop_seconds, corpus, Path(folder) / "checkpoints")[0]
        (pairs,) = ranks.run(1, store_seconds, server.environment, f"{folder}/bytes")
    ranks.close()
    of_put = [put / saved for saved, put in pairs]
    rows = [
        _row(
            f"time of {EVERY * SAVES} steps with a checkpoint every {EVERY}, relative to none", loop["ratios"], "{:.3f}"
        ),
        _row("share of it for which the loop was blocked", loop["held"], "{:.2%}"),
        [
            f"memory on top of the copy while a state of {loop['state']:.0f} MiB is written",
            f"{loop['grown']:.0f} MiB",
            "at most",
        ],
        _row(f"throughput of {STORED_MIB} MiB to S3, relative to a plain put", of_put, "{:.2f}"),
    ]
    write_table(FIGURES / "checkpoint.md", ["", "median", "p20 – p80"], rows)


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


def _row(name: str, values: list[float], form: str) -> list[str]:
    low, *_, high = statistics.quantiles(values, n=5)
    return [name, form.format(statistics.median(values)), f"{form.format(low)} – {form.format(high)}"]


if __name__ == "__main__":
    main()
