"""A copy of ranks' snapshots in a process that does not train: one complete copy, and the next one while it is made.

Free of torch and of Ray: a rank's snapshot is numbers and where they belong.
"""

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeVar

import numpy as np

from boost_core.plan.snapshots import Region, SnapshotIndex, SnapshotKey

PORTION_BYTES = 32 * 2**20  # per read; a node's object store may be small
RANKS_AT_ONCE = 4  # ranks that are read from at the same time
TRIES, TRY_SECONDS = 40, 0.05  # for all ranks to have the same step, which they reach almost together
ROOM_TO_LEAVE = 1  # further copies that must fit into memory: what a worker needs that resumes from this one

Array = np.ndarray[Any, Any]
Boxes = dict[tuple[str, tuple[int, ...]], Array]  # the contents of a snapshot's boxes, by tensor and offsets
T = TypeVar("T")


class NoRoom(MemoryError):
    """The node has too little memory for a copy."""


class Rank(NamedTuple):
    """A rank whose snapshots are copied.

    Attributes:
        hold: Keeps its newest snapshot readable and unchanged; returns ``None`` if there is none.
        read: Reads parts of the held snapshot.
        release: Releases the held snapshot.
    """

    hold: Callable[[], SnapshotIndex | None]
    read: Callable[[SnapshotKey, Sequence[Region]], list[Array]]
    release: Callable[[], object]


@dataclass
class SpareCopy:
    """Copies of snapshots. Call ``copy`` from one thread at a time; all other methods may run at any time.

    Args:
        free_memory: Returns the bytes of the node's memory that may be used.
    """

    free_memory: Callable[[], int]
    _copies: dict[SnapshotKey, tuple[SnapshotIndex, Boxes]] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def copy(self, ranks: Sequence[Rank]) -> tuple[int, int] | None:
        """Copy the newest snapshots of ranks. They replace the previous ones only once all have arrived.

        Returns:
            Generation and step of the copy; ``None`` if the ranks have no common step to copy.

        Raises:
            NoRoom: The node has too little memory.
        """
        try:
            # They take snapshots together, but drop the previous ones a moment apart.
            newest = [rank.hold() for rank in ranks]
            for _ in range(TRIES):
                steps = [-1 if index is None else index.key.step for index in newest]
                behind = [number for number, step in enumerate(steps) if step < max(steps)]
                if not behind:
                    break
                time.sleep(TRY_SECONDS)
                for number in behind:
                    newest[number] = ranks[number].hold()
            indexes = [index for index in newest if index is not None]
            if len(indexes) < len(ranks) or len({index.key.step for index in indexes}) != 1:
                return None
            boxes = [box for index in indexes for box in index.boxes]
            size = sum(int(np.prod(box.sizes)) * np.dtype(box.dtype).itemsize for box in boxes)
            needed = size * (1 + ROOM_TO_LEAVE if self._copies else 2 + ROOM_TO_LEAVE)
            free = self.free_memory()
            if free < needed:
                need = f"copies of {size / 2**30:.1f} GiB need {needed / 2**30:.1f} GiB"
                raise NoRoom(f"{max(free, 0) / 2**30:.1f} GiB of the node's memory may be used, but {need}")
            with ThreadPoolExecutor(RANKS_AT_ONCE, "copies") as readers:
                copies = list(readers.map(_copy_of, ranks, indexes))
        finally:
            for rank in ranks:
                rank.release()
        with self._lock:
            self._copies = {index.key: (index, boxes) for index, boxes in zip(indexes, copies, strict=True)}
        return indexes[0].key.generation, indexes[0].key.step

    def indexes(self) -> list[SnapshotIndex]:
        """Return the indexes of the snapshots kept here."""
        with self._lock:
            return [index for index, _ in self._copies.values()]

    def read(self, key: SnapshotKey, regions: Sequence[Region]) -> list[Array]:
        """Read parts of a snapshot.

        Raises:
            LookupError: The snapshot is not kept here.
        """
        with self._lock:
            _, boxes = self._copies[key]
        return [boxes[region.name, region.offsets][_within(region)] for region in regions]


def portions(items: Iterable[T], size: Callable[[T], int]) -> list[list[T]]:
    """Split what is to be read into lists of at most ``PORTION_BYTES``, or of a single item that is larger.

    Args:
        items: The items.
        size: Returns an item's size in bytes.
    """
    result: list[list[T]] = []
    room = 0
    for item in items:
        needed = size(item)
        if not result or needed > room:
            result.append([])
            room = PORTION_BYTES
        result[-1].append(item)
        room -= needed
    return result


def _copy_of(rank: Rank, index: SnapshotIndex) -> Boxes:
    boxes = {(box.name, box.offsets): np.empty(box.sizes, dtype=box.dtype) for box in index.boxes}
    regions: list[Region] = []
    for (name, offsets), array in boxes.items():
        if not array.shape:  # a scalar
            regions.append(Region(name, offsets, (), ()))
            continue
        rows, *rest = array.shape
        each = max(1, PORTION_BYTES * rows // max(1, array.nbytes))  # a large box is split along its first axis
        for first in range(0, rows, each):
            regions.append(Region(name, offsets, (first, *(0 for _ in rest)), (min(each, rows - first), *rest)))
    size_of = {place: array.itemsize for place, array in boxes.items()}
    for portion in portions(regions, lambda each: int(np.prod(each.lengths)) * size_of[each.name, each.offsets]):
        for region, part in zip(portion, rank.read(index.key, portion), strict=True):
            boxes[region.name, region.offsets][_within(region)] = part
    return boxes


def _within(region: Region) -> tuple[slice, ...]:
    return tuple(slice(begin, begin + length) for begin, length in zip(region.begin, region.lengths, strict=True))
