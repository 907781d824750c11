"""State kept in the memory of processes, for recovery without a checkpoint store.

Each process has a ``SnapshotStore`` for its own snapshots and for copies of another rank's; it outlives the gang of
which the process was a rank. When a gang is formed again, the snapshots of all living processes are combined: a step
for which every rank's snapshot exists somewhere is loaded, in any layout, as from a checkpoint.
"""

import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch.distributed.checkpoint import metadata as descriptions
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from boost_core.checkpoint.resharding import LoadChunks
from boost_core.checkpoint.shards import Chunk, of_all_ranks
from boost_core.plan.snapshots import MemoryState, Region, SnapshotIndex, SnapshotKey, TensorSlice

_BOXES = TypeAdapter(tuple[TensorSlice, ...])  # JSON between ranks, because a pickle could execute code
HOLD_SECONDS = 60.0  # time without a read after which a held snapshot is released, as its reader must be gone


class StateLost(RuntimeError):
    """A state that was in memory is no longer available. What was loaded of it must not be used."""


@dataclass(frozen=True)
class Snapshot:
    """A snapshot's index, and its tensors in the same order."""

    index: SnapshotIndex
    tensors: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, key: SnapshotKey, ranks: int, samples: int, chunks: Sequence[Chunk]) -> "Snapshot":
        """Make a snapshot of chunks on the host, without copying them."""
        boxes, tensors = list[TensorSlice](), tuple(chunk.tensor for chunk in chunks)
        for chunk in chunks:
            dtype = str(chunk.tensor.dtype).removeprefix("torch.")
            boxes.append(TensorSlice(chunk.name, chunk.shape, chunk.offsets, tuple(chunk.tensor.shape), dtype))
        return cls(SnapshotIndex(key, ranks, samples, tuple(boxes)), tensors)


@dataclass(eq=False)
class SnapshotStore:
    """A process's snapshots. Thread-safe."""

    _snapshots: dict[SnapshotKey, Snapshot] = field(default_factory=dict)
    _held: Snapshot | None = None
    _held_until: float = 0.0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def put(self, snapshot: Snapshot) -> None:
        """Keep a snapshot."""
        with self._lock:
            self._snapshots[snapshot.index.key] = snapshot

    def keep_only(self, generation: int, step: int) -> None:
        """Drop all snapshots except those of one step of one gang."""
        with self._lock:
            for key in [key for key in self._snapshots if (key.generation, key.step) != (generation, step)]:
                del self._snapshots[key]

    def hold(self, generation: int, rank: int) -> SnapshotIndex | None:
        """Keep the newest snapshot of a rank readable and unchanged, whatever else is kept or dropped.

        The hold lasts until another snapshot is held, this one is released, or it has not been read for a minute.

        Returns:
            The index of the held snapshot; ``None`` if there is none of that rank in that gang here.
        """
        with self._lock:
            keys = [key for key in self._snapshots if (key.generation, key.rank) == (generation, rank)]
            self._held = self._snapshots[max(keys)] if keys else None
            self._held_until = time.monotonic() + HOLD_SECONDS
            return None if self._held is None else self._held.index

    def release(self) -> None:
        """Release the held snapshot."""
        with self._lock:
            self._held = None

    def is_held(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor belongs to the held snapshot and must not be written to."""
        with self._lock:
            if time.monotonic() > self._held_until:
                self._held = None
            return self._held is not None and any(each is tensor for each in self._held.tensors)

    def indexes(self) -> list[SnapshotIndex]:
        """Indexes of all snapshots here."""
        with self._lock:
            return [snapshot.index for snapshot in self._snapshots.values()]

    def read(self, key: SnapshotKey, regions: Sequence[Region]) -> list[torch.Tensor]:
        """Read parts of a snapshot.

        Raises:
            LookupError: The snapshot is not here.
        """
        with self._lock:
            if self._held is not None and self._held.index.key == key:
                snapshot, self._held_until = self._held, time.monotonic() + HOLD_SECONDS
            else:
                snapshot = self._snapshots[key]
        tensors = dict(zip([(box.name, box.offsets) for box in snapshot.index.boxes], snapshot.tensors, strict=True))
        parts = []
        for region in regions:
            box = tuple(slice(begin, begin + size) for begin, size in zip(region.begin, region.lengths, strict=True))
            parts.append(tensors[region.name, region.offsets][box])
        return parts


Fetch = Callable[[Any, SnapshotKey, Sequence[Region]], Sequence[torch.Tensor]]  # fetches from the owner


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
            if self._boxes is None:
                message = torch.frombuffer(bytearray(_BOXES.dump_json(snapshot.index.boxes)), dtype=torch.uint8)
                (length,) = self._swap([torch.tensor([len(message)])], [torch.zeros(1, dtype=torch.int64)])
                (received,) = self._swap([message], [torch.empty(int(length.item()), dtype=torch.uint8)])
                self._boxes = _BOXES.validate_json(received.numpy().tobytes())
            empty = [torch.empty(box.sizes, dtype=getattr(torch, box.dtype)) for box in self._boxes]
            copies = tuple(self._swap(snapshot.tensors, empty))
            key = replace(snapshot.index.key, rank=self._of)
            self._snapshots.put(Snapshot(replace(snapshot.index, key=key, boxes=self._boxes), copies))
        dist.barrier(self._ranks)
        self._snapshots.keep_only(snapshot.index.key.generation, snapshot.index.key.step)

    def _swap(self, messages: Sequence[torch.Tensor], received: list[torch.Tensor]) -> list[torch.Tensor]:
        """Send tensors to one peer while ``received`` is filled by the other, and return it."""
        sending = [dist.isend(message, group=self._ranks, group_dst=self._to) for message in messages]
        for tensor in received:
            dist.recv(tensor, group=self._ranks, group_src=self._of)
        for work in filter(None, sending):
            work.wait()
        return received


def load_from_memory(state: MemoryState[Any], fetch: Fetch, chunks: Iterable[Chunk]) -> None:
    """Fill every rank's chunks from snapshots. All ranks call this.

    Args:
        state: Where the state is.
        fetch: Fetches parts of a snapshot from its owner.
        chunks: This rank's chunks.

    Raises:
        StateLost: Raised on all ranks if any of them fails, for example because an owner is gone.
    """
    stored, keys = dict[str, TensorStorageMetadata](), dict[MetadataIndex, SnapshotKey]()
    failure: Exception | None = None
    try:
        for part in state.parts:
            for box in part.boxes:
                index = MetadataIndex(box.name, torch.Size(box.offsets))
                if index in keys:  # of several ranks that have a box, the first is read; all ranks choose the same
                    continue
                keys[index] = part.key
                kind = descriptions.TensorProperties(getattr(torch, box.dtype))
                of_tensor = stored.setdefault(box.name, TensorStorageMetadata(kind, torch.Size(box.shape), []))
                of_tensor.chunks.append(ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)))
        planner = LoadChunks(chunks)
        planner.set_up_planner({}, Metadata({**stored}))
        requested: dict[SnapshotKey, list[ReadItem]] = defaultdict(list)
        for item in planner.create_local_plan().items:
            requested[keys[MetadataIndex(item.storage_index.fqn, item.storage_index.offset)]].append(item)
        for key, items in requested.items():  # one request per owner's snapshot
            regions = []
            for item in items:
                name, offsets = item.storage_index.fqn, cast(torch.Size, item.storage_index.offset)
                regions.append(Region(name, tuple(offsets), tuple(item.storage_offsets), tuple(item.lengths)))
            for item, tensor in zip(items, fetch(state.owners[key], key, regions), strict=True):
                planner.resolve_tensor(item).copy_(tensor)
    except Exception as error:  # what fetches raises types of its own
        failure = error
    try:
        if causes := of_all_ranks([] if failure is None else [f"rank {dist.get_rank()}: {failure}"]):
            raise StateLost(f"the state of step {state.step} is no longer in memory: {'; '.join(causes)}") from failure
    finally:
        del failure  # its traceback refers to this frame, and so to the state
