"""Copies of each rank's snapshots in the memory of another rank."""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from boost_core.checkpoint.snapshot_store import Snapshot, SnapshotStore
from boost_core.plan.snapshots import TensorSlice

_BOXES = TypeAdapter(tuple[TensorSlice, ...])  # JSON between ranks, because a pickle could execute code


class PeerCopies:
    """Sends this rank's snapshots to the rank that keeps copies of them, and keeps copies of another rank's.

    Args:
        snapshots: This process's snapshot store.
        owner_of: For each rank, the rank that keeps the copy of its snapshots.
        ranks: A gloo group of all ranks.
    """

    def __init__(self, snapshots: SnapshotStore, owner_of: Sequence[int], ranks: dist.ProcessGroup) -> None:
        self._snapshots, self._ranks = snapshots, ranks
        self._rank = dist.get_rank()
        self._to, self._of = owner_of[self._rank], list(owner_of).index(self._rank)
        self._boxes: tuple[TensorSlice, ...] | None = None  # of the copies kept here; they never change

    def exchange(self, snapshot: Snapshot) -> None:
        """Keep a snapshot here and a copy of it in the peer's memory; all ranks call this with theirs of the same step.

        When it returns, every rank's snapshot is in two places, and all older ones have been dropped.
        """
        self._snapshots.put(snapshot)
        if self._to != self._rank:
            self._snapshots.put(self._swapped(snapshot))
        dist.barrier(self._ranks)
        self._snapshots.keep_only(snapshot.index.key.generation, snapshot.index.key.step)

    def _swapped(self, mine: Snapshot) -> Snapshot:
        if self._boxes is None:
            self._boxes = self._swap_boxes(mine.index.boxes)
        sending = [dist.isend(tensor, group=self._ranks, group_dst=self._to) for tensor in mine.tensors]
        theirs = tuple(torch.empty(box.sizes, dtype=getattr(torch, box.dtype)) for box in self._boxes)
        for tensor in theirs:
            dist.recv(tensor, group=self._ranks, group_src=self._of)
        for work in sending:
            if work is not None:
                work.wait()
        index = replace(mine.index, key=replace(mine.index.key, rank=self._of), boxes=self._boxes)
        return Snapshot(index, theirs)

    def _swap_boxes(self, mine: tuple[TensorSlice, ...]) -> tuple[TensorSlice, ...]:
        message = torch.frombuffer(bytearray(_BOXES.dump_json(mine)), dtype=torch.uint8)
        length, theirs = torch.tensor([len(message)]), torch.zeros(1, dtype=torch.int64)
        received = self._swap(length, theirs)
        received = self._swap(message, torch.empty(int(received.item()), dtype=torch.uint8))
        return _BOXES.validate_json(received.numpy().tobytes())

    def _swap(self, mine: torch.Tensor, theirs: torch.Tensor) -> torch.Tensor:
        sending = dist.isend(mine, group=self._ranks, group_dst=self._to)
        dist.recv(theirs, group=self._ranks, group_src=self._of)
        if sending is not None:
            sending.wait()
        return theirs
