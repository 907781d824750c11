"""Deals chunks evenly, to ranks that hold their keys: about half of the traffic of ``heap``, at 3 % of imbalance.

Chunks are dealt by decreasing cost, each to the rank that lacks the fewest of its keys among those that stay balanced;
traffic of the busiest rank counts more, because all wait for it. Then chunks are swapped until the largest load is near
the mean. Sets of chunks are bits of integers, and all degrees are updated as chunks move, so that 512 chunks on 32
ranks take less than a tenth of a second.
"""

from collections.abc import Iterator
from fractions import Fraction
from functools import reduce
from heapq import nlargest, nsmallest
from itertools import accumulate
from operator import or_
from typing import NamedTuple

from boost_core.plan.context.window import Window

EVEN, LOOSE = 103, 200  # percent of the mean load below which no more chunks are swapped
_STRICTER = (97, 90, 0)  # percent of it allowed per rank when chunks are dealt again, if the result was uneven
_BUSY = 115  # percent of the mean traffic above which a rank is busy
_BUSY_WEIGHT = 3  # penalty for a chunk above that, in chunks
_WORTH = 16  # a swap moves at least this part of a rank's surplus: a sixteenth
_CONSIDERED, _COUNTED = 64, 6  # swaps that are considered, and those whose degrees are counted


def near(window: Window, ranks: int, even: int = EVEN) -> list[int]:
    """Return the rank of each chunk.

    Args:
        window: The chunks to deal.
        ranks: Number of ranks.
        even: Percent of the mean area that no rank should exceed; larger where links are slow.
    """
    tries = []
    for percent in (even - 1, *_STRICTER):
        dealt = _Dealt(window, ranks, even)
        for chunk in sorted(range(window.chunks), key=lambda chunk: -window.areas[chunk]):
            dealt.put(chunk, dealt.best(chunk, percent))
        while dealt.exchange():
            pass
        if dealt.even:
            return dealt.placement
        tries.append(dealt)
    return min(tries, key=lambda dealt: dealt.largest).placement


def _bits(chunks: int) -> Iterator[int]:
    """The members of a bit set."""
    while chunks:
        lowest = chunks & -chunks
        yield lowest.bit_length() - 1
        chunks ^= lowest


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


class _Dealt:
    """The chunks dealt so far, and what ranks send and receive because of them."""

    def __init__(self, window: Window, ranks: int, even: int) -> None:
        self._window, self._ranks, self._size = window, range(ranks), window.chunks // ranks
        self._limit = even * window.area // (100 * ranks)
        self.placement = [-1] * window.chunks
        self._own: list[list[int]] = [[] for _ in self._ranks]
        self._want = [0] * ranks  # chunks whose keys each sees, its own among them
        self._wanted = [0] * window.chunks  # by how many
        self._load, self._receives, self._sends = [0] * ranks, [0] * ranks, [0] * ranks

    @property
    def largest(self) -> int:
        """The largest load."""
        return max(self._load)

    @property
    def even(self) -> bool:
        """Whether that is near the mean."""
        return self.largest <= self._limit

    def best(self, chunk: int, percent: int) -> int:
        """Choose a chunk's rank, among those that stay below a share of the mean load with it."""
        need, area, count = self._window.needs[chunk], self._window.areas[chunk], len(self._ranks)
        limit, busy = percent * self._window.area - 100 * count * area, _BUSY * sum(self._receives)
        room = [rank for rank in self._ranks if len(self._own[rank]) < self._size]
        even = [rank for rank in room if 100 * count * self._load[rank] <= limit]
        if not even:
            return min(room, key=lambda rank: self._load[rank])

        def cost(rank: int) -> tuple[int, int]:
            want = self._want[rank]
            lacks = (need & ~want).bit_count()
            receives = 100 * count * (self._receives[rank] + lacks - 1) - busy
            sends = 100 * count * (self._sends[rank] + self._wanted[chunk] - (want >> chunk & 1)) - busy
            return 100 * count * lacks + _BUSY_WEIGHT * (max(receives, 0) + max(sends, 0)), self._load[rank]

        return min(even, key=cost)

    def put(self, chunk: int, rank: int) -> None:
        """Give a chunk to a rank."""
        self.placement[chunk] = rank
        self._own[rank].append(chunk)
        self._load[rank] += self._window.areas[chunk]
        self._see(rank, self._want[rank] | self._window.needs[chunk])
        self._count(rank)

    def exchange(self) -> bool:
        """Swap two chunks of the heaviest rank and another; return whether it was too heavy and some swap helped."""
        if self.even:
            return False
        heaviest = max(self._ranks, key=lambda rank: self._load[rank])
        likely = self._likely(heaviest)
        if likely:
            best = min(likely, key=lambda each: (Fraction(self._growth(each), each.gain), each))
            self._swap(best.mine, best.other)
        return bool(likely)

    def _likely(self, heaviest: int) -> list[_Exchange]:
        """Swaps of the heaviest rank that gain much, and add little to what the two ranks receive."""
        found = list(self._gaining(heaviest))
        enough = 3 * max((exchange.gain for exchange in found), default=0) // 10
        large = nlargest(_CONSIDERED, (each for each in found if each.gain >= enough or each.ends_even))
        others = {self.placement[each.other] for each in large}
        rests = {rank: self._rests(rank) for rank in {heaviest, *others}}
        needs = self._window.needs

        def received(each: _Exchange) -> tuple[int, int]:
            there = self.placement[each.other]
            want_here = rests[heaviest][each.mine] | needs[each.other]
            want_there = rests[there][each.other] | needs[each.mine]
            return want_here.bit_count() + want_there.bit_count() - self._want[there].bit_count(), -each.gain

        return nsmallest(_COUNTED, large, key=received)

    def _gaining(self, heaviest: int) -> Iterator[_Exchange]:
        """Swaps that reduce the larger of two loads by a good part of the surplus."""
        areas, surplus = self._window.areas, self._load[heaviest] - self._limit
        for rank in self._ranks:
            apart = self._load[heaviest] - self._load[rank]
            most = apart - surplus // _WORTH
            theirs = [(areas[chunk], chunk) for chunk in self._own[rank]]
            for mine in self._own[heaviest]:
                least, most_left = areas[mine] - most, areas[mine] - surplus // _WORTH
                for area, other in theirs:
                    if least < area < most_left:
                        moved = areas[mine] - area
                        gain = min(moved, apart - moved)
                        yield _Exchange(gain, mine, other, moved >= surplus and apart - moved >= surplus)

    def _growth(self, exchange: _Exchange) -> int:
        """The increase of the busiest rank's traffic and of the mean traffic by a swap, times the number of ranks."""
        before = self._traffic()
        self._swap(exchange.mine, exchange.other)
        after = self._traffic()
        self._swap(exchange.mine, exchange.other)
        return after - before

    def _traffic(self) -> int:
        return len(self._ranks) * max(*self._receives, *self._sends) + sum(self._receives)

    def _swap(self, one: int, other: int) -> None:
        first, second = self.placement[one], self.placement[other]
        for rank, leaves, comes in ((first, one, other), (second, other, one)):
            self._own[rank][self._own[rank].index(leaves)] = comes
            self._load[rank] += self._window.areas[comes] - self._window.areas[leaves]
            self.placement[comes] = rank
        for rank in (first, second):
            self._see(rank, reduce(or_, (self._window.needs[chunk] for chunk in self._own[rank])))
        for rank in (first, second):
            self._count(rank)

    def _see(self, rank: int, want: int) -> None:
        """Replace the chunks whose keys a rank sees; counts what their owners send."""
        for changed, by in ((want & ~self._want[rank], 1), (self._want[rank] & ~want, -1)):
            for chunk in _bits(changed):
                self._wanted[chunk] += by
                if (owner := self.placement[chunk]) >= 0:
                    self._sends[owner] += by
        self._want[rank] = want

    def _count(self, rank: int) -> None:
        """Update what a rank sends and receives after its own chunks have changed."""
        own = sum(1 << chunk for chunk in self._own[rank])
        self._receives[rank] = (self._want[rank] & ~own).bit_count()
        self._sends[rank] = sum(self._wanted[chunk] - 1 for chunk in self._own[rank])

    def _rests(self, rank: int) -> dict[int, int]:
        """For each chunk of a rank, the chunks that its other chunks see."""
        own, needs = self._own[rank], self._window.needs
        before = accumulate((needs[chunk] for chunk in own), or_, initial=0)
        after = list(accumulate((needs[chunk] for chunk in reversed(own)), or_, initial=0))
        return {chunk: earlier | later for chunk, earlier, later in zip(own, before, after[-2::-1], strict=False)}
