"""Which context parallel rank holds which chunk of packed documents, and which one computes its attention.

A ``Window`` is what is partitioned; ``place`` gives each rank as many of its chunks as any other, by one of several
rules; ``moved_tasks`` has the attention of some chunks computed elsewhere.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property, partial, reduce
from heapq import heapify, heappop, heappush, nlargest, nsmallest
from itertools import accumulate, pairwise
from math import inf
from operator import or_
from typing import NamedTuple


@dataclass(frozen=True)
class Window:
    """The tokens of consecutive documents; each sees itself and all or some of the tokens before it in its document.

    Attributes:
        documents: Tokens of each document, in order; the first and last may be parts of documents.
        chunk_tokens: Tokens of a chunk.
        sees: Most tokens of its document that each token sees, itself included (a sliding window); ``None`` for all.
        sparse_from: Documents of at least this many tokens use sparse attention; ``None``: none does. The keys that it
            needs are not known in advance, so plans contain none of them; their pairs count as those of the queries'
            own chunk.
        sparse_share: Share of their pairs that is expected to be seen.

    Raises:
        ValueError: A document is empty, the chunks do not divide the window, or no token sees even itself.
    """

    documents: tuple[int, ...]
    chunk_tokens: int
    sees: int | None = None
    sparse_from: int | None = None
    sparse_share: float = 1.0

    def __post_init__(self) -> None:
        if not self.documents or min(self.documents) < 1:
            raise ValueError(f"documents of {self.documents!r} tokens: give one or more, of a token or more each")
        if self.chunk_tokens < 1 or self.tokens % self.chunk_tokens:
            raise ValueError(f"chunks of {self.chunk_tokens} tokens must divide the window of {self.tokens}")
        if self.sees is not None and self.sees < 1:
            raise ValueError(f"sees is {self.sees}, but each token sees at least itself; give 1 or more, or None")

    @cached_property
    def tokens(self) -> int:
        """Of the whole window."""
        return sum(self.documents)

    def is_sparse(self, length: int) -> bool:
        """Whether a document of this many tokens uses sparse attention."""
        return self.sparse_from is not None and length >= self.sparse_from

    @property
    def chunks(self) -> int:
        """How many there are."""
        return self.tokens // self.chunk_tokens

    @cached_property
    def areas(self) -> Sequence[int]:
        """Query-key pairs of each chunk's queries."""
        areas = [0] * self.chunks
        for start, stop in pairwise(accumulate(self.documents, initial=0)):
            share = self.sparse_share if self.is_sparse(stop - start) else 1
            for chunk, begin, end in self._rows(start, stop):
                areas[chunk] += int(share * (self._seen(end - start) - self._seen(begin - start)))
        return tuple(areas)

    @cached_property
    def area(self) -> int:
        """Pairs of all chunks."""
        return sum(self.areas)

    @cached_property
    def first(self) -> Sequence[int]:
        """The earliest chunk that each chunk's queries see; they see keys of all chunks from there to their own."""
        size, reach = self.chunk_tokens, self.sees or self.tokens
        return tuple(max(start, chunk * size - reach + 1) // size for chunk, (start, _) in enumerate(self._leading))

    def keys(self, chunk: int) -> range:
        """The chunks whose keys a chunk's queries see."""
        return range(self.first[chunk], chunk + 1)

    @cached_property
    def needs(self) -> Sequence[int]:
        """The same for each chunk, as a bit set."""
        return tuple((2 << chunk) - (1 << first) for chunk, first in enumerate(self.first))

    def pairs(self, queries: int, keys: int) -> int:
        """Pairs of the queries of one chunk and the keys of others.

        Args:
            queries: The chunk.
            keys: The others, as a bit set.
        """
        keys &= self.needs[queries]
        if self.sees is not None:
            leading, (start, rows) = queries * self.chunk_tokens, self._leading[queries]

            def from_token(key: int) -> int:
                """Pairs of the leading document's queries with its keys, from a position before the chunk on."""
                return self._seen(leading + rows - key) - self._seen(leading - key)

            pairs = 0
            for each in self.keys(queries):
                if not keys >> each & 1:
                    continue
                if each == queries:
                    pairs += self.areas[queries] - from_token(start) + from_token(leading)
                else:
                    begin = max(start, each * self.chunk_tokens)
                    pairs += from_token(begin) - from_token((each + 1) * self.chunk_tokens)
            return pairs
        start, rows = self._leading[queries]
        pairs = 0
        if keys >> queries & 1:
            keys ^= 1 << queries
            pairs = self.areas[queries] - rows * (queries * self.chunk_tokens - start)
        if keys >> self.first[queries] & 1:
            pairs -= rows * (start - self.first[queries] * self.chunk_tokens)
        return pairs + rows * self.chunk_tokens * keys.bit_count()

    def _seen(self, tokens: int) -> int:
        """Pairs of the first tokens of a document."""
        short = tokens if self.sees is None else min(tokens, self.sees)
        return short * (short + 1) // 2 + (tokens - short) * short

    @cached_property
    def _leading(self) -> Sequence[tuple[int, int]]:
        """Of each chunk: where the document of its first token starts, and how many of its tokens are in the chunk.

        A document with sparse attention starts with the chunk, since no keys before that are planned for.
        """
        leading = [(0, 0)] * self.chunks
        for start, stop in pairwise(accumulate(self.documents, initial=0)):
            for chunk, begin, end in self._rows(start, stop):
                if begin == chunk * self.chunk_tokens:
                    leading[chunk] = begin if self.is_sparse(stop - start) else start, end - begin
        return tuple(leading)

    def _rows(self, start: int, end: int) -> Iterable[tuple[int, int, int]]:
        """The chunks that contain some tokens, each with its part of them."""
        size = self.chunk_tokens
        for chunk in range(start // size, (end - 1) // size + 1):
            yield chunk, max(start, chunk * size), min(end, (chunk + 1) * size)


# The locality placement: chunks go evenly to ranks that hold their keys; about half of the traffic of ``heap``, at 3 %
# of imbalance.
#
# Chunks are placed by decreasing cost, each on the rank that lacks the fewest of its keys among those that stay
# balanced; traffic of the busiest rank counts more, because all wait for it. Then chunks are swapped until the largest
# load is near the mean. Sets of chunks are bits of integers, and all degrees are updated as chunks move, so that 512
# chunks on 32 ranks take less than a tenth of a second. With more, the time of swaps grows faster than their number:
# chunks are placed once, up to a lower limit, and few are swapped.

EVEN, LOOSE = 103, 200  # percent of the mean load below which no more chunks are swapped
_MANY, _MARGIN = 512, 6  # chunks in a window above which the time is limited; and their percent below ``even``
_MOST_PAIRS = 1 << 20  # of chunks that are then compared to find swaps
_STRICTER = (97, 90, 0)  # percent of it allowed per rank when chunks are placed again, if the result was uneven
_BUSY = 115  # percent of the mean traffic above which a rank is busy
_BUSY_WEIGHT = 3  # penalty for a chunk above that, in chunks
_WORTH = 16  # a swap moves at least this part of a rank's surplus: a sixteenth
_CONSIDERED, _COUNTED = 64, 6  # swaps that are considered, and those whose degrees are counted


def locality_placement(window: Window, ranks: int, even: int = EVEN) -> list[int]:
    """Return the rank of each chunk.

    Args:
        window: The chunks to place.
        ranks: Number of ranks.
        even: Percent of the mean area that no rank should exceed; larger where links are slow.
    """
    tries, many = [], window.chunks > _MANY
    for percent in (even - _MARGIN,) if many else (even - 1, *_STRICTER):
        partition = _Partition(window, ranks, even)
        for chunk in sorted(range(window.chunks), key=lambda chunk: -window.areas[chunk]):
            partition.place(chunk, percent)
        left = _MOST_PAIRS * ranks // window.chunks**2 if many else inf
        while left and partition.exchange():
            left -= 1
        if max(partition.load) <= partition.limit:
            return partition.placement
        tries.append(partition)
    return min(tries, key=lambda partition: max(partition.load)).placement


class _Exchange(NamedTuple):
    """A swap of two chunks.

    Attributes:
        gain: Amount by which the larger load of the two ranks decreases.
        mine: The heaviest rank's chunk.
        other: The other rank's chunk.
        ends_even: Whether both end near the mean.
    """

    gain: int
    mine: int
    other: int
    ends_even: bool


class _Partition:
    """The chunks placed so far, and what ranks send and receive because of them."""

    def __init__(self, window: Window, ranks: int, even: int) -> None:
        self._window, self._ranks, self._size = window, range(ranks), window.chunks // ranks
        self.limit = even * window.area // (100 * ranks)
        self.placement = [-1] * window.chunks
        self._chunks_of: list[list[int]] = [[] for _ in self._ranks]
        self._want = [0] * ranks  # chunks whose keys each sees, its own among them
        self._readers = [0] * window.chunks  # by how many
        self.load, self._receives, self._sends = [0] * ranks, [0] * ranks, [0] * ranks

    def place(self, chunk: int, percent: int) -> None:
        """Give a chunk to the best rank among those that stay below a share of the mean load with it."""
        need, area, count = self._window.needs[chunk], self._window.areas[chunk], len(self._ranks)
        limit, busy = percent * self._window.area - 100 * count * area, _BUSY * sum(self._receives)
        room = [rank for rank in self._ranks if len(self._chunks_of[rank]) < self._size]
        even = [rank for rank in room if 100 * count * self.load[rank] <= limit]

        def cost(rank: int) -> tuple[int, int]:
            want = self._want[rank]
            lacks = (need & ~want).bit_count()
            receives = 100 * count * (self._receives[rank] + lacks - 1) - busy
            sends = 100 * count * (self._sends[rank] + self._readers[chunk] - (want >> chunk & 1)) - busy
            return 100 * count * lacks + _BUSY_WEIGHT * (max(receives, 0) + max(sends, 0)), self.load[rank]

        rank = min(even, key=cost) if even else min(room, key=lambda rank: self.load[rank])
        self.placement[chunk] = rank
        self._chunks_of[rank].append(chunk)
        self.load[rank] += area
        self._update(rank)

    def exchange(self) -> bool:
        """Swap two chunks of the heaviest rank and another; return whether it was too heavy and some swap helped."""
        if max(self.load) <= self.limit:
            return False
        heaviest = max(self._ranks, key=lambda rank: self.load[rank])
        # Swaps that reduce the larger of two loads by a good part of the surplus, and add little to what the two ranks
        # receive.
        swaps, areas, surplus = [], self._window.areas, self.load[heaviest] - self.limit
        for rank in self._ranks:
            apart = self.load[heaviest] - self.load[rank]
            most = apart - surplus // _WORTH
            theirs = [(areas[chunk], chunk) for chunk in self._chunks_of[rank]]
            for mine in self._chunks_of[heaviest]:
                least, most_left = areas[mine] - most, areas[mine] - surplus // _WORTH
                for area, other in theirs:
                    if least < area < most_left:
                        moved = areas[mine] - area
                        ends_even = moved >= surplus and apart - moved >= surplus
                        swaps.append(_Exchange(min(moved, apart - moved), mine, other, ends_even))
        enough = 3 * max((swap.gain for swap in swaps), default=0) // 10
        large = nlargest(_CONSIDERED, (swap for swap in swaps if swap.gain >= enough or swap.ends_even))
        needs = self._window.needs
        rests = {}  # for each chunk of a rank, the chunks that its other chunks see
        for rank in {heaviest, *(self.placement[swap.other] for swap in large)}:
            chunks = self._chunks_of[rank]
            before = accumulate((needs[chunk] for chunk in chunks), or_, initial=0)
            after = list(accumulate((needs[chunk] for chunk in reversed(chunks)), or_, initial=0))
            both = zip(chunks, before, after[-2::-1], strict=False)
            rests[rank] = {chunk: earlier | later for chunk, earlier, later in both}

        def received(swap: _Exchange) -> tuple[int, int]:
            there = self.placement[swap.other]
            want_here = rests[heaviest][swap.mine] | needs[swap.other]
            want_there = rests[there][swap.other] | needs[swap.mine]
            return want_here.bit_count() + want_there.bit_count() - self._want[there].bit_count(), -swap.gain

        def growth(swap: _Exchange) -> int:
            """The increase of the busiest rank's traffic and of the mean traffic, times the number of ranks."""
            traffic = []
            for _ in range(2):
                traffic.append(len(self._ranks) * max(*self._receives, *self._sends) + sum(self._receives))
                self._swap(swap.mine, swap.other)  # there, and back
            return traffic[1] - traffic[0]

        likely = nsmallest(_COUNTED, large, key=received)
        if likely:
            best = min(likely, key=lambda swap: (Fraction(growth(swap), swap.gain), swap))
            self._swap(best.mine, best.other)
        return bool(likely)

    def _swap(self, one: int, other: int) -> None:
        first, second = self.placement[one], self.placement[other]
        for rank, leaves, comes in ((first, one, other), (second, other, one)):
            self._chunks_of[rank][self._chunks_of[rank].index(leaves)] = comes
            self.load[rank] += self._window.areas[comes] - self._window.areas[leaves]
            self.placement[comes] = rank
        self._update(first, second)

    def _update(self, *ranks: int) -> None:
        """Update what ranks see, send and receive after their chunks have changed."""
        for rank in ranks:
            want, before = reduce(or_, (self._window.needs[chunk] for chunk in self._chunks_of[rank])), self._want[rank]
            for changed, by in ((want & ~before, 1), (before & ~want, -1)):
                while changed:
                    lowest = changed & -changed
                    chunk = lowest.bit_length() - 1
                    changed ^= lowest
                    self._readers[chunk] += by
                    if (sender := self.placement[chunk]) >= 0:
                        self._sends[sender] += by
            self._want[rank] = want
        for rank in ranks:
            local = sum(1 << chunk for chunk in self._chunks_of[rank])
            self._receives[rank] = (self._want[rank] & ~local).bit_count()
            self._sends[rank] = sum(self._readers[chunk] - 1 for chunk in self._chunks_of[rank])


Placement = Sequence[int]  # the rank of each chunk


def place(window: Window, ranks: int, how: str) -> Placement:
    """Return the rank of each chunk.

    Args:
        window: The chunks to place.
        ranks: Number of ranks.
        how: One of ``PLACEMENTS``.

    Raises:
        ValueError: The ranks do not divide the chunks.
    """
    if ranks < 1 or window.chunks % ranks:
        raise ValueError(f"{ranks} ranks must divide the window's {window.chunks} chunks of {window.chunk_tokens}")
    return PLACEMENTS[how](window, ranks)


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


PLACEMENTS: Mapping[str, Callable[[Window, int], Placement]] = {
    # Neighbours together: sends least, but the rank with the end of a long document has most to compute.
    "contiguous": lambda window, ranks: [chunk * ranks // window.chunks for chunk in range(window.chunks)],
    "heap": heap,
    "near": locality_placement,
    "loose": partial(locality_placement, even=LOOSE),
}


# Attention task offloading: the attention of each chunk is computed where its tokens are, or moved away from ranks with
# more work.
#
# A task has all keys of its queries, so its output is final. Moving whole tasks at the grain of chunks is DistCA's rule
# (arXiv 2510.18121) with another greedy order: from the heaviest rank, the task that moves most work for the keys that
# it needs.

SLACK = 3  # percent above the mean that no rank's area may exceed after tasks have moved


class Task(NamedTuple):
    """Attention of one chunk's queries.

    Attributes:
        queries: The chunk.
        keys: The chunks that they see.
        rank: Where it is computed.
    """

    queries: int
    keys: range
    rank: int


def local_tasks(window: Window, placement: Placement) -> Sequence[Task]:
    """Every chunk's task, computed where its tokens are, in the order of chunks."""
    return [Task(chunk, window.keys(chunk), rank) for chunk, rank in enumerate(placement)]


def moved_tasks(window: Window, placement: Placement, ranks: int, most: int | None = None) -> Sequence[Task]:
    """The same, but some tasks of ranks with more work than others are computed elsewhere.

    Repeatedly, the heaviest rank that can hand over a task hands over the one that moves the most excess work to a rank
    that lacks it, per chunk of keys that this rank does not have yet. A task moves only once.

    Args:
        window: The tokens.
        placement: The rank of each chunk.
        ranks: Number of ranks.
        most: Tasks that a rank may hand over, and may take on; ``None`` for any number.
    """
    at = list(placement)
    load, here = [0] * ranks, [0] * ranks  # here: chunks whose keys a rank has or is sent
    for chunk, rank in enumerate(placement):
        load[rank] += window.areas[chunk]
        here[rank] |= window.needs[chunk]
    most = window.chunks if most is None else most
    movable_from, sent, received = set(range(ranks)), [0] * ranks, [0] * ranks
    mean = window.area // ranks
    while movable_from:
        heaviest = max(movable_from, key=lambda rank: (load[rank], -rank))
        if 100 * ranks * load[heaviest] <= (100 + SLACK) * window.area:
            break
        takers = [rank for rank in range(ranks) if received[rank] < most and ranks * load[rank] < window.area]
        best, worth = None, 0.0
        if sent[heaviest] < most:
            for chunk in (chunk for chunk, rank in enumerate(at) if rank == heaviest == placement[chunk]):
                area, need = window.areas[chunk], window.needs[chunk]
                for rank in takers:
                    if load[rank] + area >= load[heaviest]:
                        continue  # that would make it as heavy
                    moved = min(area, load[heaviest] - mean, mean - load[rank])
                    value = moved / ((need & ~here[rank]).bit_count() + 1)  # correctly rounded: the same everywhere
                    if value > worth:
                        best, worth = (chunk, rank), value
        if best is None:
            movable_from.discard(heaviest)
            continue
        chunk, rank = best
        at[chunk] = rank
        sent[heaviest] += 1
        received[rank] += 1
        load[heaviest] -= window.areas[chunk]
        load[rank] += window.areas[chunk]
        here[rank] |= window.needs[chunk]
    return [Task(chunk, window.keys(chunk), rank) for chunk, rank in enumerate(at)]


def areas(window: Window, tasks: Sequence[Task], ranks: int) -> Sequence[int]:
    """Pairs that each rank computes."""
    loads = [0] * ranks
    for task in tasks:
        loads[task.rank] += window.areas[task.queries]
    return loads
