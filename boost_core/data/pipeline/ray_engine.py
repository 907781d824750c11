"""Runs the pipeline's functions with Ray Data. This is the only file of the trainer that imports Ray.

https://docs.ray.io/en/latest/data/api/dataset.html
"""

import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
import ray
from ray.data import DataContext, ExecutionResources
from ray.data.context import ShuffleStrategy

from boost_core.data.pipeline.duplicates import KeyColumns, Ties, keys_of, ties
from boost_core.data.pipeline.engine import use_one_core

_CONNECT_SECONDS = 10.0

T = TypeVar("T")
R = TypeVar("R")


@contextmanager
def ray_engine(address: str | None) -> Iterator["RayEngine"]:
    """Connect to a cluster and provide an engine on it; disconnect afterwards.

    Args:
        address: The cluster's address; ``None`` for RAY_ADDRESS or, if unset, a new Ray on this machine.

    Raises:
        ValueError: No cluster answers at the address.
    """
    host, _, port = (address or "").rpartition(":")
    try:
        if port.isdigit():  # Ray itself would try for a minute
            socket.create_connection((host, int(port)), _CONNECT_SECONDS).close()
        ray.init(address, log_to_driver=False, logging_level=logging.ERROR)
    except OSError as error:
        raise ValueError(f"there is no Ray cluster at {address or 'RAY_ADDRESS'}: {error}; check --address") from error
    try:
        yield RayEngine(None)
    finally:
        ray.shutdown()


class RayEngine:
    """Ray Data on the cluster that this process is connected to. All its nodes must be able to reach the output folder.

    Args:
        cpus: Maximum CPUs used at a time; ``None``: all that are free.
        prepare_worker: Called in each process before its work.
        runtime_env: Ray's runtime environment for these processes, which are not shared with other environments.
    """

    def __init__(
        self,
        cpus: float | None,
        prepare_worker: Callable[[], None] = use_one_core,
        runtime_env: Mapping[str, Any] = MappingProxyType({}),
    ) -> None:
        self._cpus, self._prepare_worker = cpus, prepare_worker
        self._arguments: Any = {"num_cpus": 1, "runtime_env": dict(runtime_env)}

    def map(self, work: Callable[[T], R], items: Sequence[T]) -> Iterator[R]:
        """Yield a function's result for each item, in any order; the first error ends it."""
        if not items:
            return
        self._configure()
        rows = [{"place": place} for place in range(len(items))]  # one task each
        call = _Call(work, items, self._prepare_worker)
        results = ray.data.from_items(rows, override_num_blocks=len(rows)).map(call, **self._arguments)
        for row in results.iter_rows():
            outcome = row["outcome"]
            if isinstance(outcome, Exception):
                raise outcome
            yield outcome

    def ties(self, columns: KeyColumns) -> Iterator[Ties]:
        """Yield the ties between all documents that share a key, with one task per partition of the keys."""
        self._configure()
        runs = ray.data.from_items([{"run": run} for run in columns.runs], override_num_blocks=len(columns.runs))
        keys = runs.map_batches(
            _Keys(columns, self._prepare_worker), batch_size=1, batch_format="numpy", **self._arguments
        )
        found = keys.groupby("partition").map_groups(_ties_of, batch_format="numpy", num_cpus=1)
        for batch in found.iter_batches(batch_size=None, batch_format="numpy"):
            yield Ties(batch["document"].astype(np.int64), batch["first"].astype(np.int64))

    def _configure(self) -> None:
        logging.getLogger("ray.data").setLevel(logging.ERROR)  # the build reports its own progress
        context = DataContext.get_current()
        context.enable_progress_bars = False
        context.shuffle_strategy = ShuffleStrategy.SORT_SHUFFLE_PULL_BASED  # tasks only: no actors that hold CPUs
        context.execution_options.resource_limits = ExecutionResources(cpu=self._cpus)


class _Call:
    """A function of rows that runs the work on the item each row names. Users' errors are returned as results."""

    def __init__(self, work: Callable[[Any], Any], items: Sequence[Any], prepare_worker: Callable[[], None]) -> None:
        self._work, self._items, self._prepare_worker = work, items, prepare_worker

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        self._prepare_worker()
        try:
            outcome = self._work(self._items[row["place"]])
        except (OSError, ValueError) as error:
            outcome = error
        return {"outcome": outcome}


class _Keys:
    """A function of rows that name runs; returns the runs' keys."""

    def __init__(self, columns: KeyColumns, prepare_worker: Callable[[], None]) -> None:
        self._columns, self._prepare_worker = columns, prepare_worker

    def __call__(self, rows: dict[str, Any]) -> dict[str, Any]:
        self._prepare_worker()
        (run,) = rows["run"]
        keys, documents = keys_of(self._columns, str(run))
        return {"key": keys, "document": documents, "partition": (keys % np.uint64(self._columns.partitions))}


def _ties_of(group: dict[str, Any]) -> dict[str, Any]:
    found = ties(group["key"], group["document"])
    return {"document": found.documents, "first": found.firsts}
