"""What a context parallel rank does of a plan, stage by stage: whose keys it sends and is sent, and what it attends to.

A piece is queries and keys of one document, each a run of tokens where they lie: a kernel's call, or a part of one. As
few as there can be: neighbouring chunks are one run, and all keys that a run's queries see without a mask are one piece
with them where they lie one after the other.
"""

from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, groupby

from boost_core.plan.context.figures import ContextPlan
from boost_core.plan.context.transfers import Transfer
from boost_core.plan.context.window import Window

Span = tuple[int, int]  # the first, and the one after the last


@dataclass(frozen=True)
class Piece:
    """Attention of a run of queries to a run of keys. Every query sees a key.

    Attributes:
        queries: Where the queries are among the rank's tokens.
        keys: Where the keys are among those of the stage.
        lag: By how much the first query is after the first key, where not all queries see all keys: 0 if these are the
            same tokens. ``None`` without a mask.
    """

    queries: Span
    keys: Span
    lag: int | None


@dataclass(frozen=True)
class Traffic:
    """Chunks that go in one exchange.

    Attributes:
        sends: To each rank, the chunks that go to it, as places among the rank's own.
        receives: From each rank, how many come.
        places: The place of each that comes, in the order of ranks, among those of the stage.
    """

    sends: Sequence[Sequence[int]]
    receives: Sequence[int]
    places: Sequence[int]


@dataclass(frozen=True)
class StageWork:
    """A stage of a rank: what comes, and what is attended to after that.

    Attributes:
        chunks: Those that come, in order; ``pieces`` has their keys so.
        keys: Those of which keys and values come; ``None`` where no rank sends any.
        latents: Those of which latents come; ``None`` as before.
        pieces: The attention to these keys.
    """

    chunks: Sequence[int]
    keys: Traffic | None
    latents: Traffic | None
    pieces: Sequence[Piece]


@dataclass(frozen=True)
class RankWork:
    """One rank's part of a plan.

    Attributes:
        window: The tokens of all.
        chunks: The rank's own, in order; its tokens lie so.
        pieces: The attention to the rank's own keys.
        stages: What follows; as many on every rank.
    """

    window: Window
    chunks: Sequence[int]
    pieces: Sequence[Piece]
    stages: Sequence[StageWork]


def rank_work(plan: ContextPlan, rank: int, nodes: Sequence[int] | None = None) -> RankWork:
    """One rank's part of a plan whose tasks are where their tokens are.

    Args:
        plan: The plan.
        rank: The rank.
        nodes: The node of each rank, if latents go between nodes; ``None`` if keys and values do.

    Raises:
        ValueError: Tasks have moved from there.
    """
    if plan.queries:
        moved = ", ".join(str(transfer.chunk) for transfer in plan.queries[:5])
        raise ValueError(
            f"the attention of {len(plan.queries)} chunks ({moved}…) is planned away from their tokens, "
            "which nothing carries out yet; plan with own_tasks"
        )
    own = [chunk for chunk, at in enumerate(plan.placement) if at == rank]
    queries = list(_runs(plan.window, own))
    nodes = nodes or [0] * plan.ranks
    stages = [_stage(plan, rank, nodes, own, queries, sent) for sent in plan.key_stages if sent]
    return RankWork(plan.window, own, list(_pieces(plan.window, queries, queries)), stages)


@dataclass(frozen=True)
class _Run:
    """Tokens of one document that follow each other in it and where they lie.

    Attributes:
        document: Its number.
        tokens: Which of the window's.
        at: Where the first one lies.
    """

    document: int
    tokens: Span
    at: int


def _stage(
    plan: ContextPlan, rank: int, nodes: Sequence[int], own: Sequence[int], queries: Sequence[_Run],
    sent: Sequence[Transfer],
) -> StageWork:  # fmt: skip
    chunks = sorted(transfer.chunk for transfer in sent if transfer.receiver == rank)
    near: list[Transfer] = []
    far: list[Transfer] = []
    for transfer in sent:
        (near if nodes[transfer.sender] == nodes[transfer.receiver] else far).append(transfer)
    keys, latents = (_traffic(plan.ranks, rank, own, chunks, each) for each in (near, far))
    return StageWork(chunks, keys, latents, list(_pieces(plan.window, queries, list(_runs(plan.window, chunks)))))


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


def _runs(window: Window, chunks: Sequence[int]) -> Iterator[_Run]:
    """The runs of chunks that lie one after the other, in order; of documents that are attended to densely."""
    size, starts = window.chunk_tokens, list(accumulate(window.documents, initial=0))
    for _, group in groupby(enumerate(chunks), key=lambda each: each[1] - each[0]):
        neighbours = list(group)
        number, chunk = neighbours[0]
        begin, end = chunk * size, (chunk + len(neighbours)) * size
        first, last = bisect_right(starts, begin) - 1, bisect_right(starts, end - 1)
        for document in range(first, last):
            if window.is_sparse(window.documents[document]):
                continue
            low, high = max(begin, starts[document]), min(end, starts[document + 1])
            yield _Run(document, (low, high), number * size + low - begin)


def _pieces(window: Window, queries: Sequence[_Run], keys: Sequence[_Run]) -> Iterator[Piece]:
    """What runs of queries have to do with runs of keys, those of each run of queries one after the other."""
    of_document = defaultdict[int, list[_Run]](list)
    for run in keys:
        of_document[run.document].append(run)
    for run in queries:
        found: list[Piece] = []
        for seen in of_document[run.document]:
            piece = _piece(run, seen, window.sees)
            if piece is not None and found and _are_one(found[-1], piece):
                found[-1] = replace(piece, keys=(found[-1].keys[0], piece.keys[1]))
            elif piece is not None:
                found.append(piece)
        yield from found


def _piece(queries: _Run, keys: _Run, sees: int | None) -> Piece | None:
    """The queries that see a key, and the keys that one sees; runs are the same tokens or have none in common."""
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
    """Whether two pieces' keys follow each other, and all the same queries see them all."""
    masked = before.lag is not None or after.lag is not None
    return not masked and before.queries == after.queries and before.keys[1] == after.keys[0]
