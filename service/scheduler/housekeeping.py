"""The scheduler's side tasks: publishing the nodes to other processes, and cleaning up."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

from service.gang.status import NodeCapacity
from service.jobs.model import NODES
from service.jobs.store import JobStore

SHOW_SECONDS = 10.0  # after which unchanged nodes are published again
CLEAR_SECONDS = 3600.0


class Housekeeping:
    """Does each task when it is due.

    Args:
        store: The record.
        clock: Returns seconds.
    """

    def __init__(self, store: JobStore, clock: Callable[[], float]) -> None:
        self._store, self._clock = store, clock
        self._shown: Any = None
        self._shown_at = self._cleared_at = clock()

    def show(self, nodes: Sequence[NodeCapacity]) -> None:
        """Publish the nodes to other processes, and delete records of old requests."""
        now, found = self._clock(), [asdict(node) for node in sorted(nodes, key=lambda node: node.node_id)]
        if found != self._shown or now >= self._shown_at + SHOW_SECONDS:
            self._store.keep_snapshot(NODES, found)
            self._shown, self._shown_at = found, now
        if now >= self._cleared_at + CLEAR_SECONDS:
            self._store.forget_old_requests()
            self._cleared_at = now
