"""Which state can be recovered from processes' memory, and which rank keeps whose copy.

A *snapshot* is one rank's part of the state after a step. A step can be loaded while every rank's snapshot of it still
exists somewhere.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

Sizes = tuple[int, ...]
Owner = TypeVar("Owner")


@dataclass(frozen=True, order=True)
class SnapshotKey:
    """Identity of a snapshot.

    Attributes:
        generation: Number of the gang, counted over the job's life.
        step: Optimizer steps done.
        rank: The rank in that gang.
    """

    generation: int
    step: int
    rank: int


@dataclass(frozen=True)
class TensorSlice:
    """A box of a whole tensor.

    Attributes:
        name: Name of the tensor.
        shape: Shape of the tensor.
        offsets: Start of the box in the tensor.
        sizes: Size of the box.
        dtype: Name of its type in torch.
    """

    name: str
    shape: Sizes
    offsets: Sizes
    sizes: Sizes
    dtype: str


@dataclass(frozen=True)
class Region:
    """A part of a box, of size ``lengths`` starting at ``begin`` in the box."""

    name: str
    offsets: Sizes
    begin: Sizes
    lengths: Sizes


@dataclass(frozen=True)
class SnapshotIndex:
    """Contents of a snapshot.

    Attributes:
        key: Its identity.
        ranks: World size of that gang.
        samples: Samples consumed by then, which is the data cursor.
        boxes: The rank's part of the state.
    """

    key: SnapshotKey
    ranks: int
    samples: int
    boxes: tuple[TensorSlice, ...]


@dataclass(frozen=True)
class MemoryState(Generic[Owner]):
    """A job's whole state at a step, in the memory of several processes.

    Attributes:
        step: Optimizer steps done.
        samples: Samples consumed by then.
        parts: The snapshots, one per rank of the gang that made them.
        owners: Owner of each snapshot.
    """

    step: int
    samples: int
    parts: tuple[SnapshotIndex, ...]
    owners: Mapping[SnapshotKey, Owner]


def newest_whole_state(stores: Iterable[tuple[Owner, Sequence[SnapshotIndex]]]) -> MemoryState[Owner] | None:
    """Return the newest state of which the owners together hold all ranks' snapshots; ``None`` if there is none.

    Args:
        stores: Snapshots of each owner.
    """
    by_gang: dict[tuple[int, int], dict[int, tuple[SnapshotIndex, Owner]]] = defaultdict(dict)
    for owner, snapshots in stores:
        for index in snapshots:
            by_gang[index.key.step, index.key.generation].setdefault(index.key.rank, (index, owner))
    whole = [place for place, ranks in by_gang.items() if len(ranks) == next(iter(ranks.values()))[0].ranks]
    if not whole:
        return None
    ranks = by_gang[max(whole)]
    parts = tuple(index for _, (index, _) in sorted(ranks.items()))
    owners = {index.key: owner for index, owner in ranks.values()}
    # After a divergence the same state goes on with later samples, and not all copies of it may be the newest.
    return MemoryState(parts[0].key.step, max(part.samples for part in parts), parts, owners)


def uncopied_ranks(nodes: Sequence[str], owner_of: Sequence[int]) -> list[int]:
    """Return the ranks whose snapshots would be lost with their node, because their copies are on the same node.

    Args:
        nodes: The node of each rank.
        owner_of: Which rank keeps the copy of each rank's snapshots; empty if none are made.
    """
    return [rank for rank, owner in enumerate(owner_of) if nodes[owner] == nodes[rank]]


def copy_owners(nodes: Sequence[str]) -> list[int]:
    """Return the rank that keeps the copy of each rank's snapshots, on another node if that is possible for all.

    Each rank keeps one copy, never its own unless it is alone.

    Args:
        nodes: The node of each rank.
    """
    order = sorted(range(len(nodes)), key=lambda rank: (nodes[rank], rank))
    most = max((nodes.count(node) for node in set(nodes)), default=0)
    shift = most if most < len(nodes) else 1
    owner_of = {rank: order[(place + shift) % len(order)] for place, rank in enumerate(order)}
    return [owner_of[rank] for rank in range(len(nodes))]
