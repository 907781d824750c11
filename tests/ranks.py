"""Runs a function on several real ranks: processes of a gloo process group."""

import os
import tempfile
import uuid
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import forkserver, get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist

from service.gang.ray.fork_server import ONE_THREAD

LARGEST_GANG = 8
# Seconds, which each rank would take again; the first recomputation and the first optimizer import torch._dynamo.
PRELOADED = ["boost_core.train", "pytest", "torch._dynamo"]


class Ranks:
    """A pool of warm processes that become the ranks of one process group after the other.

    They are forks of one process that has imported torch, and have the environment of when the pool was made.
    """

    def __init__(self) -> None:
        context = get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        # A fork has no other threads. Without a GPU kernels are interpreted, if run at all: imports decide that.
        interpreted = {} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"}
        with patch.dict(os.environ, ONE_THREAD | interpreted):
            forkserver.ensure_running()
        self._pool = ProcessPoolExecutor(
            LARGEST_GANG, context, initializer=_take_environment, initargs=(dict(os.environ),)
        )

    def run(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """``function(*arguments)`` on every rank; the results in rank order."""
        store = Path(tempfile.gettempdir()) / f"ranks-{uuid.uuid4().hex}"
        futures = [
            self._pool.submit(_as_rank, rank, world_size, store, function, arguments) for rank in range(world_size)
        ]
        try:
            return [future.result(timeout=180) for future in futures]
        finally:
            store.unlink(missing_ok=True)

    def close(self) -> None:
        for process in list(self._pool._processes.values()):
            process.kill()  # that each of them ends by itself takes ten seconds in all
        self._pool.shutdown()


def _take_environment(environment: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(environment)


def _as_rank(rank: int, world_size: int, store: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        dist.barrier()  # a rank that is done at once would end connections that another still makes
        return function(*arguments)
    finally:
        dist.destroy_process_group()
