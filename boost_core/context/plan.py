"""A context parallel plan: what ranks send each other in which stage, what that costs, and each rank's part of it."""

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, groupby, pairwise, product
from typing import Literal, NamedTuple

from boost_core.context.placement import Placement, Task, Window, areas
from boost_core.hardware import BYTES

# Bytes and seconds of areas and tokens, for an attention layer on a machine.

Exchange = Literal["keys", "latents"]  # what goes between nodes; or keys for queries and outputs as they are

BACKWARD = 2.5  # products of attention's backward pass for each forward: five for two


@dataclass(frozen=True)
class AttentionLayer:
    """One layer's attention on a tensor parallel rank, whose group is the part of a node next to it.

    Attributes:
        hidden_size: Width of the queries of all heads.
        key_size: Width of the keys of all key heads; values have the same.
        heads: Query heads.
        rank: Rank of the latents from which keys and values are computed; ``None`` if there are none.
        tensor_parallel_size: Number of ranks over which heads are split.
        element_bytes: Bytes per element sent and kept.
    """

    hidden_size: int
    key_size: int
    heads: int
    rank: int | None = None
    tensor_parallel_size: int = 1
    element_bytes: int = 2

    @property
    def key_bytes(self) -> int:
        """Bytes of a token's keys and values that a rank sends."""
        return 2 * self.key_size * self.element_bytes // self.tensor_parallel_size

    @property
    def query_bytes(self) -> int:
        """Bytes of a token's queries, or of its outputs."""
        return self.hidden_size * self.element_bytes // self.tensor_parallel_size

    @property
    def latent_bytes(self) -> int:
        """Bytes of a rank's share of a token's two latents, as only shares cross the fabric.

        Raises:
            ValueError: This layer does not compute keys and values from latents.
        """
        return 2 * self.share_bytes

    @property
    def share_bytes(self) -> int:
        """Bytes of a rank's share of one latent of a token.

        Raises:
            ValueError: As for ``latent_bytes``.
        """
        if self.rank is None:
            raise ValueError("a layer without a rank has no latents to send; send keys")
        return self.rank * self.element_bytes // self.tensor_parallel_size

    @property
    def gathered_bytes(self) -> int:
        """Bytes that the node's other ranks contribute to make a token's latents whole."""
        return (self.tensor_parallel_size - 1) * self.latent_bytes

    @property
    def projection_flops(self) -> float:
        """FLOPs to compute a received token's keys and values from latents."""
        return 4 * (self.rank or 0) * self.key_size / self.tensor_parallel_size

    @property
    def saved_bytes(self) -> int:
        """Bytes kept per token until the backward pass: the output, and a log-sum-exp of each head in fp32."""
        return self.query_bytes + max(BYTES["fp32"], self.element_bytes) * self.heads // self.tensor_parallel_size

    def moved_bytes(self, backward: bool, moved: Exchange = "keys") -> tuple[int, int]:
        """Bytes sent per token whose attention is computed elsewhere, and bytes sent back.

        Forward, its queries, and what is saved; backward, its queries, the output's gradient and what is saved, and the
        gradient of its queries. As latents, a share of one either way, as what is saved stays where it is computed.
        """
        if moved == "latents":
            return self.share_bytes, self.share_bytes
        if backward:
            return 2 * self.query_bytes + self.saved_bytes, self.query_bytes
        return self.query_bytes, self.saved_bytes

    def moved_gathered_bytes(self, backward: bool) -> tuple[int, int]:
        """Bytes that the node's other ranks contribute to the latents that are sent, and to the sum that is sent back.

        Backward, the latents of its queries are gathered again.
        """
        one_way = (self.tensor_parallel_size - 1) * self.share_bytes
        return (2 if backward else 1) * one_way, one_way

    @property
    def remote_bytes(self) -> int:
        """Bytes kept per such token where it is computed, if latents travel: what is kept, and a share of latents."""
        return self.saved_bytes + self.share_bytes

    def sent_bytes(self, exchange: Exchange) -> int:
        """Bytes of a token that is sent to another node."""
        return self.key_bytes if exchange == "keys" else self.latent_bytes

    def flops(self, area: float) -> float:
        """FLOPs of some pairs, forward: two products of a multiplication and an addition each."""
        return 4 * area * self.hidden_size / self.tensor_parallel_size


@dataclass(frozen=True)
class Rates:
    """What a rank does per second while all ranks are at work.

    Attributes:
        flops: FLOPs of attention, whose kernels process all pieces of a stage at once, and of products.
        node_bytes: Bytes to ranks of its node, in one direction.
        fabric_bytes: Bytes to ranks of other nodes.
    """

    flops: float
    node_bytes: float
    fabric_bytes: float


# What ranks send each other, and when: in rounds, in each of which a rank sends and receives at most once.
#
# The transfers are the edges of a multigraph from senders to receivers. By König's theorem it splits into as many
# matchings as the busiest rank sends or receives, and no fewer; Kempe's chains find them. Consecutive rounds form a
# stage, in which a rank thus sends and receives at most as many chunks as the stage has rounds: one uneven all-to-all,
# in flight while the attention of the previous stage is computed.


class Transfer(NamedTuple):
    """One chunk's keys and values, or queries, from the rank that holds its tokens to one that computes with them.

    Attributes:
        chunk: The chunk.
        sender: The rank that holds it.
        receiver: The rank that receives it.
    """

    chunk: int
    sender: int
    receiver: int


def busiest(transfers: Sequence[Transfer]) -> int:
    """The most that a rank sends or receives."""
    sent = Counter(transfer.sender for transfer in transfers)
    received = Counter(transfer.receiver for transfer in transfers)
    return max((*sent.values(), *received.values()), default=0)


def rounds(transfers: Sequence[Transfer]) -> Sequence[Sequence[Transfer]]:
    """The transfers in ``busiest(transfers)`` rounds; in none does a rank send twice or receive twice."""
    count = busiest(transfers)
    # Senders have their own numbers, receivers -1 minus theirs: each one's transfer by round, and its rounds as bits.
    at: dict[int, dict[int, Transfer]] = defaultdict(dict)
    used: dict[int, int] = defaultdict(int)
    for transfer in transfers:
        sender, receiver = transfer.sender, -1 - transfer.receiver
        number = _lowest_free(used[sender] | used[receiver])
        if number >= count:
            number, other = _lowest_free(used[sender]), _lowest_free(used[receiver])
            _swap_kempe_chain(at, used, receiver, number, other)
        for end in (sender, receiver):
            at[end][number] = transfer
            used[end] |= 1 << number
    by_sender = [edges for end, edges in at.items() if end >= 0]
    return [sorted(edges[number] for edges in by_sender if number in edges) for number in range(count)]


def _lowest_free(used: int) -> int:
    return (~used & (used + 1)).bit_length() - 1


def _swap_kempe_chain(at: dict[int, dict[int, Transfer]], used: dict[int, int], end: int, one: int, other: int) -> None:
    """Swap two rounds along the chain of transfers that leaves a node in the first, which is then free there.

    The chain cannot reach the node at which the first round is already free: the graph is bipartite, and the chain
    reaches the other side only by the first round.
    """
    path, leaves_by = [], one
    while (transfer := at[end].get(leaves_by)) is not None:
        sender, receiver = transfer.sender, -1 - transfer.receiver
        path.append((transfer, leaves_by, (sender, receiver)))
        end, leaves_by = receiver if end == sender else sender, one + other - leaves_by
    for end in {end for _, _, ends in path for end in ends}:
        at[end].pop(one, None)
        at[end].pop(other, None)
        used[end] &= ~(1 << one | 1 << other)
    for transfer, number, ends in path:
        for end in ends:
            at[end][one + other - number] = transfer
            used[end] |= 1 << (one + other - number)


@dataclass(frozen=True)
class ContextPlan:
    """Which rank holds and computes which part of a window, in which stages.

    Attributes:
        window: The tokens.
        ranks: Number of ranks over which they are partitioned.
        placement: The rank of each chunk.
        tasks: The attention of each chunk.
        stages: Number of stages in which keys arrive, after the rank's own.
    """

    window: Window
    ranks: int
    placement: Placement
    tasks: Sequence[Task]
    stages: int

    @cached_property
    def loads(self) -> Sequence[int]:
        """Query-key pairs that each rank computes."""
        return areas(self.window, self.tasks, self.ranks)

    @cached_property
    def keys(self) -> Sequence[Transfer]:
        """The keys that each rank computes with and does not have, each once, in the order of chunks."""
        needed, at = {(chunk, task.rank) for task in self.tasks for chunk in task.keys}, self.placement
        return [Transfer(chunk, at[chunk], rank) for chunk, rank in sorted(needed) if at[chunk] != rank]

    @cached_property
    def queries(self) -> Sequence[Transfer]:
        """The queries of tasks that are not computed where their tokens are; their outputs take the same path back."""
        moved = [task for task in self.tasks if self.placement[task.queries] != task.rank]
        return [Transfer(task.queries, self.placement[task.queries], task.rank) for task in moved]

    @cached_property
    def key_stages(self) -> Sequence[Sequence[Transfer]]:
        """Keys by the stage in which they arrive, of consecutive rounds; the last are empty if there are few rounds."""
        in_rounds, size = rounds(self.keys), -(-busiest(self.keys) // self.stages)
        return [sorted(chain(*in_rounds[stage * size : (stage + 1) * size])) for stage in range(self.stages)]

    @cached_property
    def stage_areas(self) -> Sequence[Sequence[int]]:
        """The pairs that each rank computes with its own keys, and with those of each stage."""
        here = [[0] * (self.stages + 1) for _ in range(self.ranks)]
        for chunk, rank in enumerate(self.placement):
            here[rank][0] |= 1 << chunk
        for number, sent in enumerate(self.key_stages, start=1):
            for transfer in sent:
                here[transfer.receiver][number] |= 1 << transfer.chunk
        stage_pairs = [[0] * (self.stages + 1) for _ in range(self.ranks)]
        for task in self.tasks:
            for number, chunks in enumerate(here[task.rank]):
                stage_pairs[task.rank][number] += self.window.pairs(task.queries, chunks)
        return stage_pairs


class Figures(NamedTuple):
    """What a plan costs one layer.

    Attributes:
        imbalance: The largest area of a rank over the mean.
        forward_seconds: Forward seconds of the slowest rank.
        backward_seconds: Its backward seconds, likewise.
    """

    imbalance: float
    forward_seconds: float
    backward_seconds: float

    @property
    def seconds(self) -> float:
        """Forward and backward."""
        return self.forward_seconds + self.backward_seconds


def figures(
    plan: ContextPlan, layer: AttentionLayer, rates: Rates, exchange: Exchange = "keys", node_ranks: int = 1,
    moved: Exchange = "keys",
) -> Figures:  # fmt: skip
    """What a plan costs one layer.

    A rank attends to the keys of one stage while those of the next are in flight, so that each stage takes the longer
    of the two. In the backward pass keys are sent again and their gradients are sent back, and latents are projected
    again. Moved queries arrive with the first keys, in the backward pass together with everything that their gradients
    need; nothing hides the transfer of their results. As latents, the rank that receives them makes queries from them,
    and latents from their outputs.

    Args:
        plan: The plan.
        layer: The layer.
        rates: What ranks do in a second.
        exchange: What is sent between nodes.
        node_ranks: Number of context parallel ranks per node; they are adjacent.
        moved: What moved queries and their outputs travel as, within nodes, too.

    Raises:
        ValueError: Latents are to be sent, but the layer has none.
    """
    size, ranks = plan.window.chunk_tokens, range(plan.ranks)

    def crosses(transfer: Transfer) -> bool:
        """Whether it goes to another node."""
        return transfer.sender // node_ranks != transfer.receiver // node_ranks

    # Seconds for which each rank receives, sends and projects keys in each stage.
    received, sent, projected = ([[0.0] * plan.stages for _ in ranks] for _ in range(3))
    for number, transfers in enumerate(plan.key_stages):
        for transfer in transfers:
            if crosses(transfer):
                seconds = size * layer.sent_bytes(exchange) / rates.fabric_bytes
                if exchange == "latents":
                    seconds += size * layer.gathered_bytes / rates.node_bytes
                    projected[transfer.receiver][number] += size * layer.projection_flops / rates.flops
            else:
                seconds = size * layer.key_bytes / rates.node_bytes
            sent[transfer.sender][number] += seconds
            received[transfer.receiver][number] += seconds
    # Seconds for one byte of each token of moved queries, and the tokens that each rank receives.
    queries_received, queries_sent, query_tokens = [0.0 for _ in ranks], [0.0 for _ in ranks], [0 for _ in ranks]
    for transfer in plan.queries:
        seconds = size / (rates.fabric_bytes if crosses(transfer) else rates.node_bytes)
        queries_sent[transfer.sender] += seconds
        queries_received[transfer.receiver] += seconds
        query_tokens[transfer.receiver] += size

    slowest = []
    for backward in (False, True):
        # The backward pass has two and a half times the products and twice the bytes; projecting again, the latents'
        # gradients and the weights' are three times the projection.
        times, ways, projections = (BACKWARD, 2, 3) if backward else (1.0, 1, 1)
        of_ranks = []
        for rank in ranks:
            attended = [times * (layer.flops(area) / rates.flops) for area in plan.stage_areas[rank]]
            for number, seconds in enumerate(projected[rank], start=1):
                attended[number] += projections * seconds
            wires = [ways * max(both) for both in zip(received[rank], sent[rank], strict=True)]
            byte = max(queries_received[rank], queries_sent[rank])
            there, back = (width * byte for width in layer.moved_bytes(backward, moved))
            projecting = 0.0
            if moved == "latents":
                in_node = query_tokens[rank] / rates.node_bytes
                gathered, summed = layer.moved_gathered_bytes(backward)
                there += gathered * in_node
                back += summed * in_node
                # Queries from latents, and latents from outputs. Backward, queries are made again; then come the
                # gradients of both products' inputs and weights.
                flops = (10 if backward else 4) * (layer.rank or 0) * layer.hidden_size / layer.tensor_parallel_size
                projecting = query_tokens[rank] * flops / rates.flops
            wires[0] += there
            hidden = math.fsum(max(computed, wire) for computed, wire in zip(attended, [*wires, 0.0], strict=True))
            of_ranks.append(hidden + back + projecting)
        slowest.append(max(of_ranks))

    return Figures(max(plan.loads) * plan.ranks / plan.window.area, *slowest)


# A context parallel rank's part of a plan, stage by stage: what it sends, receives and attends to.
#
# A piece is queries and keys of one document, each a contiguous run of tokens: a kernel call, or a part of one. There
# are as few as possible: neighbouring chunks form one run, and all keys that a run's queries see without a mask form
# one piece with them if they are contiguous.
#
# Queries of other ranks whose attention a rank computes are kept separately, in order of arrival.

Span = tuple[int, int]  # the first, and the one after the last


class Piece(NamedTuple):
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


class Traffic(NamedTuple):
    """The chunks of one exchange.

    Attributes:
        sends: For each rank, the chunks sent to it, as positions among the rank's own.
        receives: For each rank, the number of chunks received from it.
        places: The position of each chunk received, in the order of ranks, among those of the stage.
    """

    sends: Sequence[Sequence[int]]
    receives: Sequence[int]
    places: Sequence[int]


class StageWork(NamedTuple):
    """A stage of a rank: what it receives, and what is attended to after that.

    Attributes:
        chunks: The chunks received, in the order of their keys in ``pieces``.
        keys: Those received as keys and values; ``None`` if no rank sends any.
        latents: Those received as latents; ``None`` likewise.
        pieces: The attention of the rank's own queries to these keys.
        remote_pieces: The same for queries received.
    """

    chunks: Sequence[int]
    keys: Traffic | None
    latents: Traffic | None
    pieces: Sequence[Piece]
    remote_pieces: Sequence[Piece]


class RankWork(NamedTuple):
    """One rank's part of a plan.

    Attributes:
        own: The rank's own chunks, in the order of its tokens, and what is attended to before any arrive.
        stages: The stages that follow; the same number on every rank.
        queries: The chunks whose queries are sent to other ranks, and those received; ``None`` if no rank sends any.
        remote: The chunks whose queries are received, in order of arrival.
    """

    own: StageWork
    stages: Sequence[StageWork]
    queries: Traffic | None
    remote: Sequence[int]


def rank_work(plan: ContextPlan, rank: int, nodes: Sequence[int] | None = None) -> RankWork:
    """One rank's part of a plan.

    Args:
        plan: The plan.
        rank: The rank.
        nodes: The node of each rank, if latents are sent between nodes; ``None`` if keys and values are.
    """
    window, nodes = plan.window, nodes or [0] * plan.ranks
    local = [chunk for chunk, at in enumerate(plan.placement) if at == rank]
    moved = {transfer.chunk for transfer in plan.queries}
    in_order = sorted(plan.queries, key=lambda transfer: (transfer.sender, transfer.chunk))
    remote = [transfer.chunk for transfer in in_order if transfer.receiver == rank]
    local_queries = list(_runs(window, [(place, chunk) for place, chunk in enumerate(local) if chunk not in moved]))
    remote_queries = list(_runs(window, list(enumerate(remote))))

    def pieces(chunks: Sequence[int]) -> tuple[Sequence[Piece], Sequence[Piece]]:
        """The pieces of both with the keys of some chunks, which are stored one after the other."""
        keys = list(_runs(window, list(enumerate(chunks))))
        return list(_pieces(window, local_queries, keys)), list(_pieces(window, remote_queries, keys))

    stages = []
    for sent in filter(None, plan.key_stages):
        chunks = sorted(transfer.chunk for transfer in sent if transfer.receiver == rank)
        in_node = [transfer for transfer in sent if nodes[transfer.sender] == nodes[transfer.receiver]]
        between = [transfer for transfer in sent if nodes[transfer.sender] != nodes[transfer.receiver]]
        keys, latents = (_rank_traffic(plan.ranks, rank, local, chunks, each) for each in (in_node, between))
        stages.append(StageWork(chunks, keys, latents, *pieces(chunks)))
    traffic = _rank_traffic(plan.ranks, rank, local, remote, plan.queries)
    return RankWork(StageWork(local, None, None, *pieces(local)), stages, traffic, remote)


class _Run(NamedTuple):
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


def _rank_traffic(
    ranks: int, rank: int, local: Sequence[int], chunks: Sequence[int], sent: Sequence[Transfer]
) -> Traffic | None:
    if not sent:
        return None
    at, place = ({chunk: number for number, chunk in enumerate(each)} for each in (local, chunks))
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
        pieces: list[Piece] = []
        alike = (product(run.cut(seen.tokens), seen.cut(run.tokens)) for seen in of_document[run.document])
        for part, seen in chain.from_iterable(alike):
            # The queries that see some key, and the keys that some query sees; both are the same tokens or disjoint.
            (first, end), (begin, last) = part.tokens, seen.tokens
            lag: int | None = 0
            if begin > first:
                continue
            if begin < first:
                if window.sees is not None:
                    begin, end = max(begin, first - window.sees + 1), min(end, last + window.sees - 1)
                if begin >= last or first >= end:
                    continue
                lag = first - begin if window.sees is not None and begin < end - window.sees else None
            at_query, at_key = part.at - part.tokens[0], seen.at - seen.tokens[0]
            piece = Piece((at_query + first, at_query + end), (at_key + begin, at_key + last), lag)
            # It is one with the piece before if their keys are consecutive and the same queries see all of them.
            before = pieces[-1] if pieces else None
            unmasked = before is not None and before.lag is None and lag is None
            if before and unmasked and before.queries == piece.queries and before.keys[1] == piece.keys[0]:
                pieces[-1] = piece._replace(keys=(before.keys[0], piece.keys[1]))
            else:
                pieces.append(piece)
        yield from pieces
