"""Chunks dealt to ranks, as many to each: the ways that need no search, and ``place`` for all of them by name."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from heapq import heapify, heappop, heappush
from types import MappingProxyType

from boost_core.plan.context.near import LOOSE, near
from boost_core.plan.context.window import Window

Placement = Sequence[int]  # the rank of each chunk


def place(window: Window, ranks: int, how: str) -> Placement:
    """The rank of each chunk.

    Args:
        window: What is dealt.
        ranks: To how many.
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
    """Neighbours together: sends least, and the rank that has a long document's end has most to compute."""
    return [chunk * ranks // window.chunks for chunk in range(window.chunks)]


def zigzag(window: Window, ranks: int) -> Placement:
    """A piece from the front and one from the back: even for one causal sequence, as rings have it."""
    front = window.chunks // ranks // 2
    back = window.chunks // ranks - front
    fronts = [rank for rank in range(ranks) for _ in range(front)]
    return fronts + [rank for rank in reversed(range(ranks)) for _ in range(back)]


def striped(window: Window, ranks: int) -> Placement:
    """In turns, as MTraining deals what each sees along diagonals."""
    return [chunk % ranks for chunk in range(window.chunks)]


def heap(window: Window, ranks: int) -> Placement:
    """The largest first, each to the rank that has least to compute: MagiAttention's and FCP's rule."""
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
