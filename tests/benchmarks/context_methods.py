"""What published systems' rules for long contexts would take of the same work, in the same seconds.

Each is its rule for who computes what and who sends what, as its paper or its code has it, and nothing of its kernels;
where it leaves a choice, the better one is taken, and what is not known of it costs nothing (FCP's reshuffling, packing
by solvers). Of Magi and FCP, as of ours, attention is at the ``efficiency`` of chunks by themselves; of the others,
whose kernels take all pieces at once, at the full rate from 128 tokens on, which is what DistCA says of such, and in
proportion below, as a tile then has rows to spare. Forward and backward: two and a half times the products, twice the
bytes.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, pairwise

from boost_core.context.placement import Window, areas, local_tasks, place
from boost_core.context.plan import BACKWARD, AttentionLayer, ContextPlan, Exchange, Figures, Rates, busiest, figures
from tests.benchmarks.lengths import triangle
from tests.placements import zigzag

DISTCA_SLACK = 0.10
TILE = 128  # tokens: shorter pieces fill none, and DistCA cuts none
FCP_BLOCK, FCP_COALESCED = 4096, 16


def efficiency(piece_tokens: float) -> float:
    """The share of the full rate that attention reaches if documents are cut into pieces of this many tokens.

    A quarter at 512 (FCP, arXiv 2605.08524), 90 % at 2K, all from 4K; interpolated on a logarithmic scale in between,
    and proportional below. This is for single blocks on one kind of GPU. Kernels that process many pieces at once are
    reported to lose nothing from 128 tokens on (DistCA, arXiv 2510.18121), so this is a conservative estimate.
    """
    points = ((512, 0.25), (2048, 0.9), (4096, 1.0))
    if piece_tokens <= points[0][0]:
        return points[0][1] * piece_tokens / points[0][0]
    for (low, share), (high, more) in pairwise(points):
        if piece_tokens <= high:
            return share + (more - share) * math.log(piece_tokens / low) / math.log(high / low)
    return 1.0


@dataclass(frozen=True)
class _Slower(AttentionLayer):
    """A layer whose kernels process each chunk separately, so that attention over short ones takes longer."""

    chunk_tokens: int = 1

    def flops(self, area: float) -> float:
        return super().flops(area) / efficiency(self.chunk_tokens)


def by_piece(
    plan: ContextPlan, layer: AttentionLayer, rates: Rates, exchange: Exchange = "keys", node_ranks: int = 1
) -> Figures:
    """The ``figures`` of a plan if kernels process each chunk separately."""
    return figures(plan, _Slower(**vars(layer), chunk_tokens=plan.window.chunk_tokens), rates, exchange, node_ranks)


@dataclass(frozen=True)
class Work:
    """Windows of documents, one for each group of ranks that holds the longest document.

    Attributes:
        windows: The windows, with a chunk's size that nobody need use.
        group: Ranks of a window.
        layer: The attention.
        rates: The machine.
    """

    windows: Sequence[Window]
    group: int
    layer: AttentionLayer
    rates: Rates

    @cached_property
    def together(self) -> Window:
        return replace(self.windows[0], documents=tuple(chain(*(window.documents for window in self.windows))))

    @property
    def ranks(self) -> int:
        return self.group * len(self.windows)

    @cached_property
    def rank_tokens(self) -> int:
        return self.together.tokens // self.ranks

    def attention(self, area: float, piece: float = float("inf")) -> float:
        """Seconds of some pairs, forward."""
        return self.layer.flops(area) / (self.rates.flops * min(1.0, piece / TILE))

    def sending(self, tokens: float) -> float:
        """Seconds of some tokens' keys and values."""
        return tokens * self.layer.key_bytes / self.rates.fabric_bytes

    @property
    def ideal(self) -> float:
        """If all ranks attended at the full rate all the time."""
        return (1 + BACKWARD) * self.attention(self.together.area / self.ranks)


@dataclass(frozen=True)
class Taken:
    """What a rule takes.

    Attributes:
        seconds: Of the slowest rank, forward and backward.
        imbalance: The largest time of attention alone over the mean.
    """

    seconds: float
    imbalance: float


def _hidden(attention: float, sending: float) -> float:
    """Forward and backward, each the longer of the two."""
    return max(attention, sending) + max(BACKWARD * attention, 2 * sending)


def _taken(seconds: Sequence[float], attention: Sequence[float]) -> Taken:
    return Taken(max(seconds), max(attention) * len(attention) / sum(attention))


def ring(work: Work) -> Taken:
    """Each sequence over all ranks of a window, head and tail; all keys go round, each step under the one before."""
    attention = [_per_document(work, window) for window in work.windows]
    seconds = []
    for each in attention:
        steps = work.group - 1
        seconds.append(
            steps * _hidden(each / work.group, work.sending(work.rank_tokens)) + _hidden(each / work.group, 0)
        )
    return _taken(seconds, attention)


def _per_document(work: Work, window: Window) -> float:
    """Attention of a rank where each document is cut over all of a window's, head and tail."""
    return sum(work.attention(triangle(length) / work.group, length / (2 * work.group)) for length in window.documents)


def bytescale(work: Work) -> Taken:
    """A document that does not fit a rank goes over as many as it takes, round a ring of these; others go whole.

    They go to the rank that has least to compute, of those that have room; to that with most room where none has.
    """
    room, attention, seconds = [work.rank_tokens] * work.ranks, [0.0] * work.ranks, [0.0] * work.ranks
    for length in sorted(work.together.documents, reverse=True):
        count = -(-length // work.rank_tokens)
        tokens = length / count
        fits = [rank for rank in range(work.ranks) if room[rank] >= tokens]
        if len(fits) < count:
            fits = sorted(range(work.ranks), key=lambda rank: -room[rank])[:count]
        piece = length / (2 * count) if count > 1 else float("inf")
        each = work.attention(triangle(length) / count, piece)
        step = work.sending(tokens) if count > 1 else 0.0
        for rank in sorted(fits, key=lambda rank: attention[rank])[:count]:
            room[rank] -= round(tokens)
            attention[rank] += each
            seconds[rank] += (count - 1) * _hidden(each / count, step) + _hidden(each / count, 0)
    return _taken(seconds, attention)


def wlb(work: Work) -> Taken:
    """Documents packed into windows of even areas; in each, sequence or documents cut head and tail, the better one.

    Keys are gathered before attention, which nothing hides.
    """
    packed: list[list[int]] = [[] for _ in work.windows]
    load, room = [0] * len(packed), [window.tokens for window in work.windows]
    for length in sorted(work.together.documents, reverse=True):
        fits = [number for number in range(len(packed)) if room[number] >= length]
        chosen = min(fits, key=lambda number: load[number]) if fits else max(range(len(packed)), key=room.__getitem__)
        packed[chosen].append(length)
        load[chosen] += triangle(length)
        room[chosen] -= length
    attention, seconds = [], []
    for documents, left, window in zip(packed, room, work.windows, strict=True):
        size = 2 * work.group
        filled = (*documents, -sum(documents) % size) if sum(documents) % size else tuple(documents)
        whole = Window(filled, sum(filled) // size)
        loads = areas(whole, local_tasks(whole, zigzag(whole, work.group)), work.group)
        best = min(work.attention(max(loads), whole.chunk_tokens), _per_document(work, whole))
        gathered = work.sending((work.group - 1) * (window.tokens - left) / work.group)
        attention.append(best)
        seconds.append((1 + BACKWARD) * best + 3 * gathered)
    return _taken(seconds, attention)


def magi(work: Work) -> Taken:
    """A heap of chunks over all ranks, and the keys that are needed in four stages; the better of two chunks."""
    found = [_heap(work, size, lambda _: 4) for size in (2048, 4096)]
    return _of_figures(min(found, key=lambda each: each.seconds))


def fcp(work: Work) -> Taken:
    """The same with blocks of 4K, and as many stages as there are sixteen rounds."""
    return _of_figures(_heap(work, FCP_BLOCK, lambda rounds: max(1, -(-rounds // FCP_COALESCED))))


def _heap(work: Work, chunk_tokens: int, stages: Callable[[int], int]) -> Figures:
    window = Window(work.together.documents, chunk_tokens)
    placement = place(window, work.ranks, "heap")
    plan = ContextPlan(window, work.ranks, placement, local_tasks(window, placement), 1)
    return by_piece(replace(plan, stages=stages(busiest(plan.keys))), work.layer, work.rates)


def _of_figures(found: Figures) -> Taken:
    return Taken(found.seconds, found.imbalance)


@dataclass
class _Item:
    """A piece of a document's queries where it is.

    Attributes:
        document: Which.
        keys: Tokens of the document until the piece's end.
        tokens: Of the piece.
        area: Its pairs.
        home: Its rank.
    """

    document: int
    keys: int
    tokens: int
    area: float
    home: int


def distca(work: Work) -> Taken:
    """Ranks with less than the mean take parts of what others have, for the fewest bytes a FLOP.

    From the lowest rank up, until it lacks no more than a tenth. A part has its share of an item's pairs, as head and
    tail together have. Keys of a document come to a server once, from where its tokens are; ping-pong hides what is
    sent.
    """
    items, owners = _items(work)
    load = [0.0] * work.ranks
    for item in items:
        load[item.home] += item.area
    mean = sum(load) / work.ranks
    sent, received = [0.0] * work.ranks, [0.0] * work.ranks
    there: dict[int, dict[int, int]] = defaultdict(dict)  # of each server: documents, and how many of their keys it has
    wide = 2 * work.layer.query_bytes / work.layer.key_bytes  # queries and outputs, in tokens' keys
    for server in sorted(range(work.ranks), key=lambda rank: load[rank]):
        while mean - load[server] > DISTCA_SLACK * mean:
            best, most = None, 0.0
            for item in items:
                moved = min(load[item.home] - mean, mean - load[server], item.area)
                tokens = moved * item.tokens / item.area if item.area else 0.0
                if item.home == server or tokens < TILE:
                    continue
                lacking = max(0, item.keys - there[server].get(item.document, 0))
                if (worth := moved / (wide * tokens + lacking)) > most:
                    best, most, part = item, worth, (moved, tokens, lacking)
            if best is None:
                break
            moved, tokens, lacking = part
            load[best.home] -= moved
            load[server] += moved
            for rank, share in owners[best.document].items():
                sent[rank] += lacking * share
                received[server] += lacking * share if rank != server else 0.0
            there[server][best.document] = max(best.keys, there[server].get(best.document, 0))
            sent[best.home] += wide * tokens
            received[server] += wide * tokens
            best.area -= moved
            best.tokens -= round(tokens)
    attention = [work.attention(area) for area in load]
    wires = [work.sending(max(out, into)) for out, into in zip(sent, received, strict=True)]
    return _taken([_hidden(*each) for each in zip(attention, wires, strict=True)], attention)


def _items(work: Work) -> tuple[list[_Item], list[dict[int, float]]]:
    """The pieces of documents on the ranks that they lie on, and for each document the shares of its tokens by rank."""
    items, owners, start = [], list[dict[int, float]](), 0
    for document, length in enumerate(work.together.documents):
        owners.append({})
        begin = start
        while begin < start + length:
            rank = begin // work.rank_tokens
            end = min(start + length, (rank + 1) * work.rank_tokens)
            area = triangle(end - start) - triangle(begin - start)
            items.append(_Item(document, end - start, end - begin, area, rank))
            owners[-1][rank] = (end - begin) / length
            begin = end
        start += length
    return items, owners


METHODS: dict[str, Callable[[Work], Taken]] = {
    "ring": ring, "ByteScale": bytescale, "WLB": wlb, "Magi": magi, "FCP": fcp, "DistCA": distca,
}  # fmt: skip
