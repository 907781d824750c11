"""Runs the pipeline's functions in this process or others on this machine. ``ray_engine.py`` has the engine for Ray."""

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import suppress
from multiprocessing.connection import Connection

from boost_core.data.pipeline.build import KeyColumns, R, T, keys_of
from boost_core.data.pipeline.duplicates import Ties, ties


class LocalEngine:
    """Processes on this machine, which live until the engine is closed or this process ends in any way.

    Args:
        workers: Number of processes; 1 means this process, whose tokenizer then uses all cores.
    """

    def __init__(self, workers: int) -> None:
        self._pool: ProcessPoolExecutor | None = None
        if workers > 1:
            context = multiprocessing.get_context("spawn")  # a fork would lose this process's threads
            ours, self._end_of_workers = context.Pipe(duplex=False)
            self._pool = ProcessPoolExecutor(workers, context, _begin_worker, (ours,))

    def close(self) -> None:
        """End the processes, whatever they are doing."""
        if self._pool is not None:
            self._end_of_workers.close()
            self._pool.shutdown(cancel_futures=True)

    def map(self, work: Callable[[T], R], items: Sequence[T], sizes: Sequence[int] | None = None) -> Iterator[R]:
        """Yield a function's result for each item, in any order; the first error ends it."""
        del sizes  # tasks cost next to nothing
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
        """Yield the ties between all documents that share a key, one partition of the keys at a time."""
        for partition in range(columns.partitions):
            yield ties(*keys_of(columns, columns.runs, partition))


def _begin_worker(pipe: Connection) -> None:
    """Make a worker end when the other end of a pipe closes; Ctrl-C is left to the process that holds that end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    use_one_core()
    threading.Thread(target=_end_with, args=(pipe,), daemon=True).start()


def _end_with(pipe: Connection) -> None:
    with suppress(EOFError, OSError):
        pipe.recv()
    os._exit(1)  # without waiting for writes in progress, since only complete files count


def use_one_core() -> None:
    """Make this process tokenize on one core, because other workers use the others."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # read by tokenizers at each call
