"""Runs the pipeline's functions with Ray Data. This is the only file of the trainer that imports Ray.

https://docs.ray.io/en/latest/data/api/dataset.html
"""

import logging
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np
import ray
from ray.data import DataContext, ExecutionResources
from ray.data.context import ShuffleStrategy

from boost_core.data.pipeline.build import KeyColumns, R, T, keys_of
from boost_core.data.pipeline.duplicates import Ties, ties
from boost_core.data.pipeline.engine import use_one_core

_CONNECT_SECONDS = 10.0
_TASK_BYTES = 4 << 20  # of small items that share a task: about a second of tokenizing
_TASK_ITEMS = 64  # as progress is reported by task
_BLOCK_KEYS = 1 << 22  # keys per block of a shuffle, of 24 bytes each: Ray Data splits blocks of more than 128 MiB


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

    def map(self, work: Callable[[T], R], items: Sequence[T], sizes: Sequence[int] | None = None) -> Iterator[R]:
        """Yield a function's result for each item, in any order; the first error ends it.

        A task of Ray takes some 30 ms besides its work, so small items share one.
        """
        if not items:
            return
        together = _grouped(sizes or [_TASK_BYTES] * len(items), _TASK_BYTES, _TASK_ITEMS)
        rows = [{"group": _Group([items[place] for place in places])} for places in together]
        prepare_worker = self._prepare_worker

        def call(row: dict[str, Any]) -> dict[str, Any]:
            """Work on each item of a row, until one raises a user's error, which is returned as its result."""
            prepare_worker()
            outcomes: list[Any] = []
            try:
                for item in row["group"].members:
                    outcomes.append(work(item))
            except (OSError, ValueError) as error:
                outcomes.append(error)
            return {"group": _Group(outcomes)}

        for row in self._tasks(rows).map(call, **self._arguments).iter_rows():
            for outcome in row["group"].members:
                if isinstance(outcome, Exception):
                    raise outcome
                yield outcome

    def ties(self, columns: KeyColumns) -> Iterator[Ties]:
        """Yield the ties between all documents that share a key.

        One partition of the keys is one task, which reads all runs. Several are shuffled, so that each run is read
        once; a shuffle of N blocks has N² parts, so the blocks are as large as Ray Data's may be.
        """
        of_rows, prepare_worker = columns._replace(runs=(), documents=()), self._prepare_worker  # rows name the runs

        def keys(rows: dict[str, Any]) -> dict[str, Any]:
            """The keys of the runs that a row names."""
            prepare_worker()
            (group,) = rows["group"]
            key_N, document_N = keys_of(of_rows, group.members)
            return {"key": key_N, "document": document_N, "partition": key_N % np.uint64(of_rows.partitions)}

        as_numpy = {"batch_format": "numpy", **self._arguments}
        if columns.partitions == 1:
            everything = self._tasks([{"group": _Group(columns.runs)}])
            batches = everything.map_batches(lambda row: _ties_of(keys(row)), batch_size=None, **as_numpy)
        else:
            sizes = [count * len(columns.names) for count in columns.documents]
            together = _grouped(sizes, _BLOCK_KEYS, len(sizes))
            rows = [{"group": _Group([columns.runs[place] for place in places])} for places in together]
            blocks = self._tasks(rows).map_batches(keys, batch_size=1, **as_numpy)
            batches = blocks.groupby("partition").map_groups(_ties_of, batch_format="numpy", num_cpus=1)
        for batch in batches.iter_batches(batch_size=None, batch_format="numpy"):
            yield Ties(batch["document"].astype(np.int64), batch["first"].astype(np.int64))

    def _tasks(self, rows: list[dict[str, Any]]) -> ray.data.Dataset:
        """A dataset of which each row becomes a task of its own."""
        logging.getLogger("ray.data").setLevel(logging.ERROR)  # the build reports its own progress
        context = DataContext.get_current()
        context.enable_progress_bars = False
        context.shuffle_strategy = ShuffleStrategy.SORT_SHUFFLE_PULL_BASED  # tasks only: no actors that hold CPUs
        context.execution_options.resource_limits = ExecutionResources(cpu=self._cpus)
        return ray.data.from_items(rows, override_num_blocks=len(rows))


def _grouped(sizes: Sequence[int], most: int, most_items: int) -> list[range]:
    """Split places into consecutive groups of at most this size in total, and at least one place."""
    groups, first, total = list[range](), 0, 0
    for place, size in enumerate(sizes):
        if place > first and (total + size > most or place - first == most_items):
            groups.append(range(first, place))
            first, total = place, 0
        total += size
    return [*groups, range(first, len(sizes))]


@dataclass(frozen=True)
class _Group:
    """What one task works on, or returns. Unlike a list, Ray Data takes it for an object, whatever is in it.

    Attributes:
        members: Items, results, or names of runs.
    """

    members: Sequence[Any]


def _ties_of(group: dict[str, Any]) -> dict[str, Any]:
    tied = ties(group["key"], group["document"])
    return {"document": tied.documents, "first": tied.firsts}
