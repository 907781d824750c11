"""The cost of a plan: balance, bytes by level, rounds, and seconds."""

import math
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate, chain, groupby, pairwise, product
from math import fsum
from typing import Literal

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
    def kept_bytes(self) -> int:
        """Bytes kept per token until the backward pass: the output, and a log-sum-exp of each head in fp32."""
        return self.query_bytes + max(BYTES["fp32"], self.element_bytes) * self.heads // self.tensor_parallel_size

    def asking_bytes(self, backward: bool, moved: Exchange = "keys") -> int:
        """Bytes sent per token whose attention is computed elsewhere.

        Forward, its queries; backward, also the output's gradient and what is kept. As latents, a share of one either
        way, as what is kept stays where it is computed.
        """
        if moved == "latents":
            return self.share_bytes
        return 2 * self.query_bytes + self.kept_bytes if backward else self.query_bytes

    def answering_bytes(self, backward: bool, moved: Exchange = "keys") -> int:
        """Bytes sent back per such token: what is kept, or the gradient of its queries; or a share of a latent."""
        if moved == "latents":
            return self.share_bytes
        return self.query_bytes if backward else self.kept_bytes

    def moved_bytes(self, backward: bool, moved: Exchange = "keys") -> tuple[int, int]:
        """Bytes sent per such token, and sent back."""
        return self.asking_bytes(backward, moved), self.answering_bytes(backward, moved)

    def asking_gathered_bytes(self, backward: bool) -> int:
        """Bytes that the node's other ranks contribute to what is sent of such a token as latents.

        Backward, the latents of its queries are gathered again.
        """
        return (2 if backward else 1) * self.answering_summed_bytes

    @property
    def answering_summed_bytes(self) -> int:
        """Bytes that they contribute to the sum that is sent back."""
        return (self.tensor_parallel_size - 1) * self.share_bytes

    def moved_flops(self, backward: bool) -> float:
        """FLOPs per such token to make queries from latents and latents from outputs.

        Backward, queries are made again; then come the gradients of both products' inputs and weights.
        """
        return (10 if backward else 4) * (self.rank or 0) * self.hidden_size / self.tensor_parallel_size

    @property
    def foreign_bytes(self) -> int:
        """Bytes kept per such token where it is computed, if latents travel: what is kept, and a share of latents."""
        return self.kept_bytes + self.share_bytes

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
        flops: FLOPs of attention over long pieces, and of products.
        node_bytes: Bytes to ranks of its node, in one direction.
        fabric_bytes: Bytes to ranks of other nodes.
        by_piece: Whether kernels process each chunk separately, so that attention over short ones is slower.
    """

    flops: float
    node_bytes: float
    fabric_bytes: float
    by_piece: bool = True


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


# What ranks send each other, and when: in rounds, in each of which a rank sends and receives at most once.
#
# The transfers are the edges of a multigraph from senders to receivers. By König's theorem it splits into as many
# matchings as the busiest rank sends or receives, and no fewer; Kempe's chains find them. Consecutive rounds form a
# stage, in which a rank thus sends and receives at most as many chunks as the stage has rounds: one uneven all-to-all,
# in
# flight while the attention of the previous stage is computed.


@dataclass(frozen=True, order=True)
class Transfer:
    """One chunk's keys and values, or queries, from the rank that holds its tokens to one that computes with them.

    Attributes:
        chunk: The chunk.
        sender: The rank that holds it.
        receiver: The rank that receives it.
    """

    chunk: int
    sender: int
    receiver: int


def key_transfers(tasks: Sequence[Task], placement: Placement) -> Sequence[Transfer]:
    """The keys that each rank computes with and does not have, each once, in the order of chunks."""
    wanted = {(chunk, task.rank) for task in tasks for chunk in task.keys}
    return [Transfer(chunk, placement[chunk], rank) for chunk, rank in sorted(wanted) if placement[chunk] != rank]


def query_transfers(tasks: Sequence[Task], placement: Placement) -> Sequence[Transfer]:
    """The queries of tasks that are not computed where their tokens are; their outputs take the same path back."""
    moved = [task for task in tasks if placement[task.queries] != task.rank]
    return [Transfer(task.queries, placement[task.queries], task.rank) for task in moved]


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
    taken: dict[int, int] = defaultdict(int)
    for transfer in transfers:
        sender, receiver = _ends(transfer)
        number = _lowest_free(taken[sender] | taken[receiver])
        if number >= count:
            number, other = _lowest_free(taken[sender]), _lowest_free(taken[receiver])
            _swap_chain(at, taken, receiver, number, other)
        for end in (sender, receiver):
            at[end][number] = transfer
            taken[end] |= 1 << number
    found: list[list[Transfer]] = [[] for _ in range(count)]
    for end, edges in at.items():
        if end >= 0:
            for number, transfer in edges.items():
                found[number].append(transfer)
    return [sorted(each) for each in found]


def _ends(transfer: Transfer) -> tuple[int, int]:
    return transfer.sender, -1 - transfer.receiver


def _lowest_free(taken: int) -> int:
    return (~taken & (taken + 1)).bit_length() - 1


def _swap_chain(at: dict[int, dict[int, Transfer]], taken: dict[int, int], end: int, one: int, other: int) -> None:
    """Swap two rounds along the chain of transfers that leaves a node in the first, which is then free there.

    The chain cannot reach the node at which the first round is already free: the graph is bipartite, and the chain
    reaches the other side only by the first round.
    """
    chain, leaves_by = [], one
    while (transfer := at[end].get(leaves_by)) is not None:
        chain.append((transfer, leaves_by))
        sender, receiver = _ends(transfer)
        end, leaves_by = receiver if end == sender else sender, one + other - leaves_by
    ends = {end for transfer, _ in chain for end in _ends(transfer)}
    for end in ends:
        at[end].pop(one, None)
        at[end].pop(other, None)
        taken[end] &= ~(1 << one | 1 << other)
    for transfer, number in chain:
        for end in _ends(transfer):
            at[end][one + other - number] = transfer
            taken[end] |= 1 << (one + other - number)


def stages(transfers: Sequence[Transfer], count: int) -> Sequence[Sequence[Transfer]]:
    """The transfers divided into stages of consecutive rounds; the last stages are empty if there are fewer rounds."""
    found, size = rounds(transfers), -(-busiest(transfers) // count)
    return [
        sorted(transfer for each in found[stage * size : (stage + 1) * size] for transfer in each)
        for stage in range(count)
    ]


@dataclass(frozen=True)
class ContextPlan:
    """Which rank holds and computes which part of a window, in which stages.

    Attributes:
        window: The tokens.
        ranks: Number of ranks to which they are dealt.
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
        """Keys that are sent."""
        return key_transfers(self.tasks, self.placement)

    @cached_property
    def queries(self) -> Sequence[Transfer]:
        """Queries that are sent, and whose outputs are sent back."""
        return query_transfers(self.tasks, self.placement)

    @cached_property
    def key_stages(self) -> Sequence[Sequence[Transfer]]:
        """Keys by the stage in which they arrive."""
        return stages(self.keys, self.stages)

    @cached_property
    def stage_areas(self) -> Sequence[Sequence[int]]:
        """The pairs that each rank computes with its own keys, and with those of each stage."""
        here = [[0] * (self.stages + 1) for _ in range(self.ranks)]
        for chunk, rank in enumerate(self.placement):
            here[rank][0] |= 1 << chunk
        for number, sent in enumerate(self.key_stages, start=1):
            for transfer in sent:
                here[transfer.receiver][number] |= 1 << transfer.chunk
        found = [[0] * (self.stages + 1) for _ in range(self.ranks)]
        for task in self.tasks:
            for number, chunks in enumerate(here[task.rank]):
                found[task.rank][number] += self.window.pairs(task.queries, chunks)
        return found


@dataclass(frozen=True)
class Figures:
    """What a plan costs one layer.

    Attributes:
        imbalance: The largest area of a rank over the mean.
        rounds: Number of chunks of keys that the busiest rank sends or receives.
        node_bytes: Bytes of keys, moved queries and their results, over all ranks, that stay within nodes; forward.
        fabric_bytes: The same, between nodes.
        kept_bytes: Most bytes that a rank keeps until the backward pass, so that attention is not recomputed.
        forward_seconds: Forward seconds of the slowest rank.
        backward_seconds: Its backward seconds, likewise.
    """

    imbalance: float
    rounds: int
    node_bytes: int
    fabric_bytes: int
    kept_bytes: int
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
    size = plan.window.chunk_tokens
    costs = _Costs(layer, rates, exchange, node_ranks, size, moved)
    crossing = [[costs.crosses(transfer) for transfer in sent] for sent in (plan.keys, plan.queries)]
    keys, queries = (sum(crosses) for crosses in crossing)
    a_query = size * sum(layer.moved_bytes(backward=False, moved=moved))
    foreign = max(Counter(transfer.receiver for transfer in plan.queries).values(), default=0)
    traffic = _traffic_by_rank(plan, costs)
    return Figures(
        imbalance=max(plan.loads) * plan.ranks / plan.window.area,
        rounds=busiest(plan.keys),
        node_bytes=(len(plan.keys) - keys) * size * layer.key_bytes + (len(plan.queries) - queries) * a_query,
        fabric_bytes=keys * size * layer.sent_bytes(exchange) + queries * a_query,
        kept_bytes=plan.window.tokens // plan.ranks * layer.kept_bytes
        + (foreign * size * layer.foreign_bytes if moved == "latents" else 0),
        forward_seconds=max(
            _seconds(costs, plan.stage_areas[rank], traffic[rank], backward=False) for rank in range(plan.ranks)
        ),
        backward_seconds=max(
            _seconds(costs, plan.stage_areas[rank], traffic[rank], backward=True) for rank in range(plan.ranks)
        ),
    )


class _Costs:
    """Seconds to move and process a chunk."""

    def __init__(
        self, layer: AttentionLayer, rates: Rates, exchange: Exchange, node_ranks: int, chunk_tokens: int,
        moved: Exchange,
    ) -> None:  # fmt: skip
        self._layer, self._rates, self._exchange, self._node_ranks = layer, rates, exchange, node_ranks
        self._tokens, self._moved = chunk_tokens, moved
        self._attention_flops = rates.flops * (efficiency(chunk_tokens) if rates.by_piece else 1.0)

    def crosses(self, transfer: Transfer) -> bool:
        """Whether it goes to another node."""
        return transfer.sender // self._node_ranks != transfer.receiver // self._node_ranks

    def key(self, transfer: Transfer) -> float:
        """Sending it."""
        if not self.crosses(transfer):
            return self._tokens * self._layer.key_bytes / self._rates.node_bytes
        seconds = self._tokens * self._layer.sent_bytes(self._exchange) / self._rates.fabric_bytes
        if self._exchange == "latents":
            seconds += self._tokens * self._layer.gathered_bytes / self._rates.node_bytes
        return seconds

    def query(self, transfer: Transfer) -> float:
        """Sending a byte of each of its tokens."""
        return self._tokens / (self._rates.fabric_bytes if self.crosses(transfer) else self._rates.node_bytes)

    def moved(self, queries: "_Stage", backward: bool) -> tuple[float, float, float]:
        """Seconds to send moved queries, and their outputs back, and to project what a rank receives.

        Args:
            queries: Seconds for one byte of each token, and the tokens that a rank receives.
            backward: Whether this is the backward pass.
        """
        layer, moved, byte = self._layer, self._moved, queries.wire
        there, back = (size * byte for size in layer.moved_bytes(backward, moved))
        if moved == "keys":
            return there, back, 0.0
        in_node = queries.tokens / self._rates.node_bytes
        there += layer.asking_gathered_bytes(backward) * in_node
        back += layer.answering_summed_bytes * in_node
        return there, back, queries.tokens * layer.moved_flops(backward) / self._rates.flops

    def projected(self, transfer: Transfer) -> float:
        """Computing keys and values from the latents received."""
        if self._exchange == "keys" or not self.crosses(transfer):
            return 0.0
        return self._tokens * self._layer.projection_flops / self._rates.flops

    def attention(self, area: int) -> float:
        """Computing some pairs, forward."""
        return self._layer.flops(area) / self._attention_flops


@dataclass
class _Stage:
    """Seconds that a rank receives, sends and projects in a stage, and tokens of moved queries that it receives."""

    received: float = 0.0
    sent: float = 0.0
    projected: float = 0.0
    tokens: int = 0

    @property
    def wire(self) -> float:
        return max(self.received, self.sent)


@dataclass
class _RankTraffic:
    """A rank's keys by stage, and one byte of each token of its moved queries, there and back."""

    stages: list[_Stage]
    queries: _Stage


def _traffic_by_rank(plan: ContextPlan, costs: _Costs) -> Sequence[_RankTraffic]:
    found = [_RankTraffic([_Stage() for _ in range(plan.stages)], _Stage()) for _ in range(plan.ranks)]
    for number, sent in enumerate(plan.key_stages):
        for transfer in sent:
            seconds = costs.key(transfer)
            found[transfer.sender].stages[number].sent += seconds
            found[transfer.receiver].stages[number].received += seconds
            found[transfer.receiver].stages[number].projected += costs.projected(transfer)
    for transfer in plan.queries:
        found[transfer.sender].queries.sent += costs.query(transfer)
        found[transfer.receiver].queries.received += costs.query(transfer)
        found[transfer.receiver].queries.tokens += plan.window.chunk_tokens
    return found


def _seconds(costs: _Costs, stage_areas: Sequence[int], traffic: _RankTraffic, backward: bool) -> float:
    """Seconds of one rank's pass.

    The backward pass has two and a half times the products and twice the bytes; projecting again, the latents'
    gradients and the weights' are three times the projection.
    """
    times, ways, projections = (BACKWARD, 2, 3) if backward else (1.0, 1, 1)
    attended = [times * costs.attention(area) for area in stage_areas]
    for number, stage in enumerate(traffic.stages, start=1):
        attended[number] += projections * stage.projected
    wires = [ways * stage.wire for stage in traffic.stages]
    there, back, made = costs.moved(traffic.queries, backward)
    wires[0] += there
    hidden = fsum(max(computed, wire) for computed, wire in zip(attended, [*wires, 0.0], strict=True))
    return hidden + back + made


# A context parallel rank's part of a plan, stage by stage: what it sends, receives and attends to.
#
# A piece is queries and keys of one document, each a contiguous run of tokens: a kernel call, or a part of one. There
# are
# as few as possible: neighbouring chunks form one run, and all keys that a run's queries see without a mask form one
# piece with them if they are contiguous.
#
# Queries of other ranks whose attention a rank computes are kept separately, in order of arrival.

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
    traffic = _rank_traffic(plan.ranks, rank, own, come, plan.queries)
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
    keys, latents = (_rank_traffic(plan.ranks, rank, own, chunks, each) for each in (near, far))
    return StageWork(chunks, keys, latents, *queries.pieces(plan.window, chunks))


def _rank_traffic(
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
