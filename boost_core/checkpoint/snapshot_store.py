"""State kept in the memory of processes, to recover from without a checkpoint store.

Each process has a ``SnapshotStore`` for its own snapshots and for copies of another rank's; it outlives the gang whose
rank the process was. When a gang is formed anew, what all the living processes have is put together: a step of which
every rank's snapshot is somewhere is loaded, in any layout, as from a checkpoint.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from boost_core.checkpoint.chunks import Chunk, LoadChunks
from boost_core.plan.snapshots import MemoryState, Region, Sizes, SnapshotIndex, SnapshotKey, TensorSlice

HOLD_SECONDS = 60.0  # without a read, after which a snapshot that is held is let go: who read it is gone


class StateLost(RuntimeError):
    """A state that was in memory cannot be had any more. What was loaded of it is of no use."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot's index, and its tensors in the same order."""

    index: SnapshotIndex
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, key: SnapshotKey, ranks: int, samples: int, chunks: Iterable[Chunk]) -> "Snapshot":
        """Chunks on the host as a snapshot; they are not copied."""
        chunks = tuple(chunks)
        boxes = tuple(_box(chunk) for chunk in chunks)
        return cls(SnapshotIndex(key, ranks, samples, boxes), tuple(chunk.tensor for chunk in chunks))


def _box(chunk: Chunk) -> TensorSlice:
    dtype = str(chunk.tensor.dtype).removeprefix("torch.")
    return TensorSlice(chunk.name, chunk.shape, chunk.offsets, tuple(chunk.tensor.shape), dtype)


class SnapshotStore:
    """A process's snapshots. Threads may share it."""

    def __init__(self) -> None:
        self._snapshots: dict[SnapshotKey, Snapshot] = {}
        self._held: Snapshot | None = None
        self._held_until = 0.0
        self._lock = threading.Lock()

    def put(self, snapshot: Snapshot) -> None:
        """Keep a snapshot."""
        with self._lock:
            self._snapshots[snapshot.index.key] = snapshot

    def keep_only(self, generation: int, step: int) -> None:
        """Forget all but the snapshots of one step of one gang."""
        with self._lock:
            self._snapshots = {
                key: snapshot
                for key, snapshot in self._snapshots.items()
                if (key.generation, key.step) == (generation, step)
            }

    def hold(self, generation: int, rank: int) -> SnapshotIndex | None:
        """Keep the newest snapshot of a rank readable and as it is, whatever is kept or forgotten besides.

        That lasts until another is held, this one is released, or nobody has read it for a minute.

        Returns:
            What is held; ``None`` if nothing is here of that rank in that gang.
        """
        with self._lock:
            found = [key for key in self._snapshots if (key.generation, key.rank) == (generation, rank)]
            self._held = self._snapshots[max(found)] if found else None
            self._held_until = time.monotonic() + HOLD_SECONDS
            return None if self._held is None else self._held.index

    def release(self) -> None:
        """Let go what is held."""
        with self._lock:
            self._held = None

    def is_held(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is of the snapshot that is held, and must not be written to."""
        with self._lock:
            if time.monotonic() > self._held_until:
                self._held = None
            return self._held is not None and any(each is tensor for each in self._held.tensors)

    def indexes(self) -> list[SnapshotIndex]:
        """What is here."""
        with self._lock:
            return [snapshot.index for snapshot in self._snapshots.values()]

    def read(self, key: SnapshotKey, regions: Sequence[Region]) -> list[torch.Tensor]:
        """Parts of a snapshot.

        Raises:
            LookupError: It is not here.
        """
        with self._lock:
            if self._held is not None and self._held.index.key == key:
                snapshot, self._held_until = self._held, time.monotonic() + HOLD_SECONDS
            else:
                snapshot = self._snapshots[key]
        tensors = {
            (box.name, box.offsets): tensor for box, tensor in zip(snapshot.index.boxes, snapshot.tensors, strict=True)
        }
        return [_part(tensors[region.name, region.offsets], region) for region in regions]


def _part(tensor: torch.Tensor, region: Region) -> torch.Tensor:
    for axis, (begin, length) in enumerate(zip(region.begin, region.lengths, strict=True)):
        tensor = tensor.narrow(axis, begin, length)
    return tensor


Fetch = Callable[[Any, SnapshotKey, Sequence[Region]], Sequence[torch.Tensor]]  # from their owner


def load_from_memory(state: MemoryState[Any], fetch: Fetch, chunks: Iterable[Chunk]) -> None:
    """Fill every rank's chunks. All ranks call it.

    Args:
        state: Where the state is.
        fetch: Gets parts of a snapshot from its owner.
        chunks: What this rank keeps.

    Raises:
        StateLost: On all ranks, whichever failed, as when an owner is gone.
    """
    try:
        load({}, storage_reader=_MemoryReader(state, fetch), planner=LoadChunks(chunks))
    except CheckpointException as failure:
        causes = "; ".join(f"rank {rank}: {cause}" for rank, (cause, _) in failure.failures.items())
        raise StateLost(f"the state of step {state.step} is no longer in memory: {causes}") from failure


class _MemoryReader(StorageReader):
    """Snapshots as torch's distributed checkpoint reads them."""

    def __init__(self, state: MemoryState[Any], fetch: Fetch) -> None:
        self._state, self._fetch = state, fetch
        # Of equal boxes that several ranks have, the first one's: all ask alike, so the choice is the same everywhere.
        self._keys: dict[MetadataIndex, SnapshotKey] = {}
        for part in state.parts:
            for box in part.boxes:
                self._keys.setdefault(MetadataIndex(box.name, torch.Size(box.offsets)), part.key)

    def reset(self, checkpoint_id: object = None) -> None:
        """Nothing is kept between loads."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """The boxes of each tensor."""
        chunks: dict[str, dict[Sizes, ChunkStorageMetadata]] = defaultdict(dict)
        boxes = {}
        for part in self._state.parts:
            for box in part.boxes:
                boxes[box.name] = box
                chunks[box.name][box.offsets] = ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes))
        return Metadata(
            {
                name: TensorStorageMetadata(
                    TensorProperties(getattr(torch, box.dtype)), torch.Size(box.shape), list(chunks[name].values())
                )
                for name, box in boxes.items()
            }
        )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any) -> None:
        """Nothing is to be opened."""

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """The plan as it is."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """The plans as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Fetch what a rank reads, from each owner at once."""
        wanted: dict[SnapshotKey, list[ReadItem]] = defaultdict(list)
        for item in plan.items:
            wanted[self._keys[MetadataIndex(item.storage_index.fqn, item.storage_index.offset)]].append(item)
        for key, items in wanted.items():
            regions = [_region(item) for item in items]
            for item, tensor in zip(items, self._fetch(self._state.owners[key], key, regions), strict=True):
                planner.resolve_tensor(item).copy_(tensor)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: object) -> bool:
        """There is nothing to name a snapshot by."""
        return checkpoint_id is None


def _region(item: ReadItem) -> Region:
    assert item.storage_index.offset is not None
    return Region(
        item.storage_index.fqn, tuple(item.storage_index.offset), tuple(item.storage_offsets), tuple(item.lengths)
    )
