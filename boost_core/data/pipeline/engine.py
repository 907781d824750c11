"""Who calls the pipeline's functions: this process, or others on this machine. Ray's engine is in ``ray_engine.py``."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Protocol, TypeVar

import numpy as np

from boost_core.data.pipeline.duplicates import Documents, KeyColumns, Ties, keys_of, ties
from boost_core.data.pipeline.signatures import Keys

T = TypeVar("T")
R = TypeVar("R")

_PARALLELISM = "TOKENIZERS_PARALLELISM"  # which tokenizers asks for at each call


class Engine(Protocol):
    """Calls functions, maybe many at once, maybe elsewhere. What they give does not depend on it."""

    def map(self, work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """What a function gives for each item, in any order; the first error ends it."""

    def ties(self, columns: KeyColumns) -> Iterator[Ties]:
        """The ties among all documents that share a key."""


class LocalEngine:
    """Processes on this machine, which stay until the engine is closed or this process ends, however it does.

    Args:
        workers: How many; 1 is this process, whose tokenizer then takes all cores.
    """

    def __init__(self, workers: int) -> None:
        self._pool: ProcessPoolExecutor | None = None
        if workers > 1:
            context = multiprocessing.get_context("spawn")  # threads of this process would be lost in a fork
            ours, self._held = context.Pipe(duplex=False)
            self._pool = ProcessPoolExecutor(workers, context, _begin_worker, (ours,))

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        if self._pool is not None:
            self._held.close()
            self._pool.shutdown(cancel_futures=True)

    def map(self, work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """What a function gives for each item, in any order; the first error ends it."""
        if self._pool is None:
            yield from map(work, items)
            return
        futures = [self._pool.submit(work, item) for item in items]
        try:
            for future in as_completed(futures):
                yield future.result()
        finally:
            for future in futures:
                future.cancel()

    def ties(self, columns: KeyColumns) -> Iterator[Ties]:
        """The ties among all documents that share a key, one partition of the keys after the other."""
        for partition in range(columns.partitions):
            found = [_of_partition(columns, run, partition) for run in columns.runs]
            yield ties(*(np.concatenate(each) for each in zip(*found, strict=True)))


def _of_partition(columns: KeyColumns, run: str, partition: int) -> tuple[Keys, Documents]:
    """A run's keys of one partition, and their documents."""
    keys, documents = keys_of(columns, run)
    chosen = keys % np.uint64(columns.partitions) == partition
    return keys[chosen], documents[chosen]


def _begin_worker(held: Connection) -> None:
    """Have a worker end with the other end of a pipe; the terminal's interrupt is for the process that holds it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    use_one_core()
    threading.Thread(target=_end_with, args=(held,), daemon=True).start()


def _end_with(held: Connection) -> None:
    with suppress(EOFError, OSError):
        held.recv()
    os._exit(1)  # without waiting for what is being written, of which only whole files count


def use_one_core() -> None:
    """Have this process tokenize on one core, because others take the others."""
    os.environ[_PARALLELISM] = "false"
