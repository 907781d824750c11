"""Runs a function on several real ranks: processes of a gloo process group."""

import atexit
import os
import tempfile
import uuid
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

LARGEST_GANG = 8


class Ranks:
    """A pool of warm processes that become the ranks of one process group after the other."""

    def __init__(self) -> None:
        self._pool = ProcessPoolExecutor(LARGEST_GANG, get_context("spawn"), initializer=_end_at_once)

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
        self._pool.shutdown()


def _end_at_once() -> None:
    """Have this process end without taking all of torch to pieces, which takes it most of a second."""
    atexit.register(os._exit, 0)


def _as_rank(rank: int, world_size: int, store: Path, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
    try:
        dist.barrier()  # a rank that is done at once would end connections that another still makes
        return function(*arguments)
    finally:
        dist.destroy_process_group()
