"""A context parallel rank's part of a plan, stage by stage: what it sends, receives and attends to.

A piece is queries and keys of one document, each a contiguous run of tokens: a kernel call, or a part of one. There are
as few as possible: neighbouring chunks form one run, and all keys that a run's queries see without a mask form one
piece with them if they are contiguous.

Queries of other ranks whose attention a rank computes are kept separately, in order of arrival.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, chain, groupby, pairwise, product

from boost_core.plan.context.figures import ContextPlan
from boost_core.plan.context.transfers import Transfer
from boost_core.plan.context.window import Window

Span = tuple[int, int]  # the first, and the one after the last


@dataclass(frozen=True)
class Piece:
    """Attention of a run of queries to a run of keys. Every query sees a key.

    Attributes:
        queries: Position of the queries among the rank's tokens, or among those received.
        keys: Position of the keys among those of the stage.
        lag: Distance from the first key to the first query, if not all queries see all keys: 0 if these are the same
            tokens. ``None`` without a mask.
    """

    queries: Span
    keys: Span
    lag: int | None


@dataclass(frozen=True)
class Traffic:
    """The chunks of one exchange.

    Attributes:
        sends: For each rank, the chunks sent to it, as positions among the rank's own.
        receives: For each rank, the number of chunks received from it.
        places: The position of each chunk received, in the order of ranks, among those of the stage.
    """

    sends: Sequence[Sequence[int]]
    receives: Sequence[int]
    places: Sequence[int]


@dataclass(frozen=True)
class StageWork:
    """A stage of a rank: what it receives, and what is attended to after that.

    Attributes:
        chunks: The chunks received, in the order of their keys in ``pieces``.
        keys: Those received as keys and values; ``None`` if no rank sends any.
        latents: Those received as latents; ``None`` likewise.
        pieces: The attention of the rank's own queries to these keys.
        foreign_pieces: The same for queries received.
    """

    chunks: Sequence[int]
    keys: Traffic | None
    latents: Traffic | None
    pieces: Sequence[Piece]
    foreign_pieces: Sequence[Piece]


@dataclass(frozen=True)
class RankWork:
    """One rank's part of a plan.

    Attributes:
        window: The tokens of all.
        chunks: The rank's own, in the order of its tokens.
        pieces: The attention of its own queries to the rank's own keys.
        foreign_pieces: The same for queries received.
        stages: The stages that follow; the same number on every rank.
        queries: The chunks whose queries are sent to other ranks, and those received; ``None`` if no rank sends any.
        foreign: The chunks whose queries are received, in order of arrival.
    """

    window: Window
    chunks: Sequence[int]
    pieces: Sequence[Piece]
    foreign_pieces: Sequence[Piece]
    stages: Sequence[StageWork]
    queries: Traffic | None
    foreign: Sequence[int]


def rank_work(plan: ContextPlan, rank: int, nodes: Sequence[int] | None = None) -> RankWork:
    """One rank's part of a plan.

    Args:
        plan: The plan.
        rank: The rank.
        nodes: The node of each rank, if latents are sent between nodes; ``None`` if keys and values are.
    """
    window = plan.window
    own = [chunk for chunk, at in enumerate(plan.placement) if at == rank]
    moved = {transfer.chunk for transfer in plan.queries}
    come = [each.chunk for each in sorted(plan.queries, key=_by_sender) if each.receiver == rank]
    queries = _Queries(
        list(_runs(window, [(place, chunk) for place, chunk in enumerate(own) if chunk not in moved])),
        list(_runs(window, list(enumerate(come)))),
    )
    nodes = nodes or [0] * plan.ranks
    stages = [_stage(plan, rank, nodes, own, queries, sent) for sent in plan.key_stages if sent]
    traffic = _traffic(plan.ranks, rank, own, come, plan.queries)
    return RankWork(window, own, *queries.pieces(window, own), stages, traffic, come)


def _by_sender(transfer: Transfer) -> tuple[int, int]:
    return transfer.sender, transfer.chunk


@dataclass(frozen=True)
class _Run:
    """Tokens of one document that are consecutive in it and in memory.

    Attributes:
        document: Its number.
        tokens: Their range in the window.
        at: Position of the first one.
    """

    document: int
    tokens: Span
    at: int

    def cut(self, bounds: Span) -> Sequence["_Run"]:
        """Its parts before, within and after another range of the window's tokens."""
        first, last = self.tokens
        cuts = [first, *(token for token in bounds if first < token < last), last]
        return [_Run(self.document, (begin, end), self.at + begin - first) for begin, end in pairwise(cuts)]


@dataclass(frozen=True)
class _Queries:
    """Runs of queries whose attention a rank computes.

    Attributes:
        own: Runs of its own tokens.
        foreign: Runs of those received.
    """

    own: Sequence[_Run]
    foreign: Sequence[_Run]

    def pieces(self, window: Window, chunks: Sequence[int]) -> tuple[Sequence[Piece], Sequence[Piece]]:
        """The pieces of both with the keys of some chunks, which are stored one after the other."""
        keys = list(_runs(window, list(enumerate(chunks))))
        return list(_pieces(window, self.own, keys)), list(_pieces(window, self.foreign, keys))


def _stage(
    plan: ContextPlan, rank: int, nodes: Sequence[int], own: Sequence[int], queries: _Queries,
    sent: Sequence[Transfer],
) -> StageWork:  # fmt: skip
    chunks = sorted(transfer.chunk for transfer in sent if transfer.receiver == rank)
    near: list[Transfer] = []
    far: list[Transfer] = []
    for transfer in sent:
        (near if nodes[transfer.sender] == nodes[transfer.receiver] else far).append(transfer)
    keys, latents = (_traffic(plan.ranks, rank, own, chunks, each) for each in (near, far))
    return StageWork(chunks, keys, latents, *queries.pieces(plan.window, chunks))


def _traffic(
    ranks: int, rank: int, own: Sequence[int], chunks: Sequence[int], sent: Sequence[Transfer]
) -> Traffic | None:
    if not sent:
        return None
    at, place = ({chunk: number for number, chunk in enumerate(each)} for each in (own, chunks))
    sends: list[list[int]] = [[] for _ in range(ranks)]
    comes: list[list[int]] = [[] for _ in range(ranks)]
    for transfer in sent:
        if transfer.sender == rank:
            sends[transfer.receiver].append(at[transfer.chunk])
        if transfer.receiver == rank:
            comes[transfer.sender].append(place[transfer.chunk])
    return Traffic(sends, [len(each) for each in comes], [number for each in comes for number in each])


def _runs(window: Window, placed: Sequence[tuple[int, int]]) -> Iterator[_Run]:
    """The runs of chunks that are consecutive in the window and in memory, for documents with dense attention.

    Args:
        window: The tokens.
        placed: The position of each chunk, in order, and the chunk.
    """
    size, starts = window.chunk_tokens, list(accumulate(window.documents, initial=0))
    for _, group in groupby(enumerate(placed), key=lambda each: (each[1][0] - each[0], each[1][1] - each[0])):
        neighbours = [each for _, each in group]
        place, chunk = neighbours[0]
        begin, end = chunk * size, (chunk + len(neighbours)) * size
        first, last = bisect_right(starts, begin) - 1, bisect_right(starts, end - 1)
        for document in range(first, last):
            if window.is_sparse(window.documents[document]):
                continue
            low, high = max(begin, starts[document]), min(end, starts[document + 1])
            yield _Run(document, (low, high), place * size + low - begin)


def _pieces(window: Window, queries: Sequence[_Run], keys: Sequence[_Run]) -> Iterator[Piece]:
    """The pieces of runs of queries with runs of keys, grouped by run of queries."""
    of_document = defaultdict[int, list[_Run]](list)
    for run in keys:
        of_document[run.document].append(run)
    for run in queries:
        found: list[Piece] = []
        alike = (product(run.cut(seen.tokens), seen.cut(run.tokens)) for seen in of_document[run.document])
        for part, seen in chain.from_iterable(alike):
            piece = _piece(part, seen, window.sees)
            if piece is not None and found and _are_one(found[-1], piece):
                found[-1] = replace(piece, keys=(found[-1].keys[0], piece.keys[1]))
            elif piece is not None:
                found.append(piece)
        yield from found


def _piece(queries: _Run, keys: _Run, sees: int | None) -> Piece | None:
    """The queries that see some key, and the keys that some query sees; two runs are the same tokens or disjoint."""
    (first, end), (begin, last) = queries.tokens, keys.tokens
    lag: int | None = 0
    if begin > first:
        return None
    if begin < first:
        if sees is not None:
            begin, end = max(begin, first - sees + 1), min(end, last + sees - 1)
        if begin >= last or first >= end:
            return None
        lag = first - begin if sees is not None and begin < end - sees else None
    at_query, at_key = queries.at - queries.tokens[0], keys.at - keys.tokens[0]
    return Piece((at_query + first, at_query + end), (at_key + begin, at_key + last), lag)


def _are_one(before: Piece, after: Piece) -> bool:
    """Whether the keys of two pieces are consecutive, and the same queries see all of them."""
    masked = before.lag is not None or after.lag is not None
    return not masked and before.queries == after.queries and before.keys[1] == after.keys[0]
