"""Deals chunks to ranks, the same number to each: the placements that need no search, and ``place`` for all by name."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from types import MappingProxyType

from boost_core.plan.context.near import LOOSE, near
from boost_core.plan.context.window import Window

Placement = Sequence[int]  # the rank of each chunk


def place(window: Window, ranks: int, how: str) -> Placement:
    """Return the rank of each chunk.

    Args:
        window: The chunks to deal.
        ranks: Number of ranks.
        how: One of ``PLACEMENTS``.

    Raises:
        ValueError: The placement is unknown, or the ranks do not divide the chunks.
    """
    if how not in PLACEMENTS:
        raise ValueError(f"there is no placement {how!r}; there are {', '.join(PLACEMENTS)}")
    if ranks < 1 or window.chunks % ranks:
        raise ValueError(f"{ranks} ranks must divide the window's {window.chunks} chunks of {window.chunk_tokens}")
    return PLACEMENTS[how](window, ranks)


def contiguous(window: Window, ranks: int) -> Placement:
    """Neighbours together: sends least, but the rank with the end of a long document has most to compute."""
    return [chunk * ranks // window.chunks for chunk in range(window.chunks)]


def zigzag(window: Window, ranks: int) -> Placement:
    """A piece from the front and one from the back: balanced for a single causal sequence, as in rings."""
    front = window.chunks // ranks // 2
    back = window.chunks // ranks - front
    fronts = [rank for rank in range(ranks) for _ in range(front)]
    return fronts + [rank for rank in reversed(range(ranks)) for _ in range(back)]


def striped(window: Window, ranks: int) -> Placement:
    """Round robin, as MTraining does for attention along diagonals."""
    return [chunk % ranks for chunk in range(window.chunks)]


def heap(window: Window, ranks: int) -> Placement:
    """The largest first, each to the rank with the least to compute: MagiAttention's and FCP's rule."""
    room, placement = [window.chunks // ranks] * ranks, [0] * window.chunks
    loads = [(0, rank) for rank in range(ranks)]
    heapify(loads)
    for chunk in sorted(range(window.chunks), key=lambda chunk: -window.areas[chunk]):
        load, rank = heappop(loads)
        placement[chunk] = rank
        room[rank] -= 1
        if room[rank]:
            heappush(loads, (load + window.areas[chunk], rank))
    return placement


PLACEMENTS: Mapping[str, Callable[[Window, int], Placement]] = MappingProxyType(
    {
        "contiguous": contiguous,
        "zigzag": zigzag,
        "striped": striped,
        "heap": heap,
        "near": near,
        "loose": partial(near, even=LOOSE),
    }
)
