"""Sends chunks of rows to the ranks that compute with them, and their gradients back.

Shape suffixes: T tokens of a rank, n tokens that come, in the order of the ranks that they come from or, for a stage,
all of them in the stage's order; x any rows; c columns sent of a token.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate

import torch

from boost_core.context.partition import Attended, StageAttention, integers
from boost_core.context.placement import Window
from boost_core.context.plan import RankWork, StageWork, Traffic
from boost_core.model.attention import Rotation
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.weight_gradients import GradientSinks


class ChunkExchange:
    """One stage's exchange of keys, or of latents.

    Args:
        traffic: What goes where.
        chunk_tokens: Tokens of a chunk.
        communicator: The context parallel group.
        what: What is sent, for the ledger.
        device: Where the tokens are.
    """

    def __init__(
        self, traffic: Traffic, chunk_tokens: int, communicator: Communicator, what: str, device: torch.device
    ) -> None:
        self._tokens, self._communicator, self._what = chunk_tokens, communicator, what
        self._goes, self._comes = [len(chunks) for chunks in traffic.sends], list(traffic.receives)
        self._sent = integers([chunk for chunks in traffic.sends for chunk in chunks], torch.int64, device)
        self._sent_to = self._sent.tensor_split(list(accumulate(self._goes))[:-1])
        self._places = integers(list(traffic.places), torch.int64, device)

    def start(self, own_Tc: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to send and receive; the returned function waits, and returns ``[n, c]``."""
        wait = start_rows(
            self._communicator, self._chunks(own_Tc).index_select(0, self._sent), self._goes, self._comes, self._what
        )
        return lambda: wait().view(-1, own_Tc.shape[1])

    def start_back(self, gradient_nc: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """Start to return gradients of what came; the returned function waits, and adds up those of this rank's own."""
        payload = self._chunks(gradient_nc)
        purpose = f"{self._what.removesuffix('s')} gradients"
        wait = start_rows(self._communicator, payload, self._comes, self._goes, purpose)

        def add_to(own_Tc: torch.Tensor) -> None:
            own, parts = self._chunks(own_Tc), wait()
            # A rank's part has each chunk once, so sums are always made in the order of ranks.
            for chunks, part in zip(self._sent_to, parts.split_with_sizes(self._goes), strict=True):
                own.index_add_(0, chunks, part.to(own.dtype))

        return add_to

    def put(self, came_nc: torch.Tensor, stage_nc: torch.Tensor) -> None:
        """Put what came where it belongs among all tokens of a stage."""
        self._chunks(stage_nc).index_copy_(0, self._places, self._chunks(came_nc))

    def take(self, stage_nc: torch.Tensor) -> torch.Tensor:
        """The inverse of ``put``, ``[n, c]``."""
        return self._chunks(stage_nc).index_select(0, self._places).view(-1, stage_nc.shape[1])

    def _chunks(self, x_Tc: torch.Tensor) -> torch.Tensor:
        """One row per chunk."""
        return x_Tc.view(len(x_Tc) // self._tokens, self._tokens * x_Tc.shape[1])


def start_rows(
    communicator: Communicator, payload_xc: torch.Tensor, goes: Sequence[int], comes: Sequence[int], purpose: str
) -> Callable[[], torch.Tensor]:
    """Start to exchange rows; the returned function waits, and returns those that come, rank after rank.

    Args:
        communicator: The ranks.
        payload_xc: The rows to send, rank after rank.
        goes: Number of rows for each rank.
        comes: Number of rows from each rank.
        purpose: The purpose, for the ledger.
    """
    received = payload_xc.new_empty((sum(comes), payload_xc.shape[1]))
    pending = communicator.start_uneven_all_to_all(received, payload_xc, (comes, goes), purpose)

    def wait() -> torch.Tensor:
        pending.wait()
        return received

    return wait


# Sends latents between nodes instead of keys and values: with r = d/4, a quarter of the bytes.
#
# All ranks of a tensor parallel group have the whole latents of their tokens, so each sends its share of the columns to
# its counterpart on the other node, where the group gathers the rest over the node's own links. Each rank computes the
# keys and values of its own heads from the whole latents. In the backward pass they are sent and computed again; the
# resulting gradients of the latents are summed within the node, a share per rank, and go back over the fabric. The
# owner
# adds them to its own part of that gradient, which the group sums in any case.
#
# The gradients of the weights used are summed here over all stages, so that there is one per micro-batch even if
# nothing
# has come: code that counts gradients finds the same number in each.
#
# Shape suffixes: T tokens of the rank, n tokens that come; r latents, p tensor parallel ranks, c = 2r/p; j heads of
# keys
# and values, e head size.


@dataclass(frozen=True)
class KeyMaker:
    """How keys and values are made from latents, for any tokens.

    Attributes:
        weights: What it uses: parameters, or parts of them.
        make: From both latents, ``[n, r]`` each, such weights and the tokens' rotation: rotated keys, and values,
            ``[n, j, e]`` with j heads each.
        sinks: Where the weights' gradients go.
    """

    weights: Sequence[torch.Tensor]
    make: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Rotation], tuple[torch.Tensor, torch.Tensor]]
    sinks: GradientSinks = field(default_factory=GradientSinks)


@dataclass(frozen=True)
class KeyLatents:
    """What keys and values are made from: ranks that attend to them may receive this, and make them themselves.

    Attributes:
        of_keys: ``[T, r]``.
        of_values: The same.
        maker: Makes them.
    """

    of_keys: torch.Tensor
    of_values: torch.Tensor
    maker: KeyMaker


@dataclass(frozen=True)
class TaskMaker:
    """What it takes to compute attention for other ranks whose queries and outputs travel as latents.

    Attributes:
        weights: What queries are made with: parameters, or parts of them.
        make: From latents, ``[n, r]``, such weights and the tokens' rotation: rotated queries, ``[n, h, e]``.
        down: The weight that turns outputs into latents, ``[h·e, r]``: a parameter, or a view of one.
        sinks: Where the weights' gradients go.
    """

    weights: Sequence[torch.Tensor]
    make: Callable[[torch.Tensor, Sequence[torch.Tensor], Rotation], torch.Tensor]
    down: torch.Tensor
    sinks: GradientSinks = field(default_factory=GradientSinks)


@dataclass(frozen=True)
class QueryLatents:
    """What queries are made from: ranks that compute their attention may receive this, and make them themselves.

    Attributes:
        of_queries: ``[T, r]``.
        maker: Makes them, and turns their outputs into latents.
    """

    of_queries: torch.Tensor
    maker: TaskMaker


@dataclass(frozen=True)
class LatentRoute:
    """How latents travel.

    Attributes:
        nodes: The node of each context parallel rank, between which latents are sent and within which keys and values
            are; ``None`` if these are sent everywhere.
        moves: Whether the queries and outputs of moved tasks travel as latents.
        tensor: The tensor parallel group.
        at: Returns the rotation of the tokens of some chunks.
    """

    nodes: Sequence[int] | None
    moves: bool
    tensor: Communicator
    at: Callable[[Sequence[int]], Rotation]

    def columns(self, x_Tr: torch.Tensor) -> torch.Tensor:
        """This rank's columns of a latent: a view."""
        return x_Tr.tensor_split(self.tensor.size, dim=1)[self.tensor.rank]

    def share(self, *latents_Tr: torch.Tensor) -> torch.Tensor:
        """This rank's columns of some latents, side by side, ``[T, c]``."""
        return torch.cat([self.columns(x_Tr) for x_Tr in latents_Tr], 1)

    def in_place(self, share_Tc: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
        """Spread a share over ``count`` full-width tensors, ``[T, r]`` each, with zeros in other ranks' columns."""
        parts = share_Tc.chunk(count, dim=1)
        whole_Tr = [part.new_zeros(len(part), part.shape[1] * self.tensor.size) for part in parts]
        for whole, part in zip(whole_Tr, parts, strict=True):
            self.columns(whole).copy_(part)
        return whole_Tr

    def gathered(self, came_nc: torch.Tensor, count: int, purpose: str) -> Sequence[torch.Tensor]:
        """Gather ``count`` full-width tensors, ``[n, r]`` each, from the shares that all ranks have received."""
        if self.tensor.size == 1:
            return came_nc.chunk(count, dim=1)
        shares_pnc = self.tensor.all_gather(came_nc.contiguous(), purpose)
        return [part.transpose(0, 1).flatten(1) for part in shares_pnc.chunk(count, dim=2)]

    def scattered(self, parts_nr: Sequence[torch.Tensor], purpose: str) -> torch.Tensor:
        """This rank's share, ``[n, c]``, of the sums over every rank's heads: of latents, or of their gradients."""
        if self.tensor.size == 1:
            return torch.cat(list(parts_nr), dim=1)
        parts = zip(*(x_nr.chunk(self.tensor.size, dim=1) for x_nr in parts_nr), strict=True)
        return self.tensor.reduce_scatter(torch.stack([torch.cat(part, dim=1) for part in parts]), purpose)


class Made:
    """Keys and values computed from latents.

    Args:
        maker: Computes them, with which weights.
        came_nr: The latents.
        rotation: The rotation of their tokens.
        backward: Whether gradients will be asked for.
    """

    def __init__(self, maker: KeyMaker, came_nr: Sequence[torch.Tensor], rotation: Rotation, backward: bool) -> None:
        self._inputs = [x.detach().requires_grad_() for x in (*came_nr, *maker.weights)]
        with torch.set_grad_enabled(backward):
            self._made = maker.make(self._inputs[:2], self._inputs[2:], rotation)

    def keys(self) -> torch.Tensor:
        """``[n, 2, j, e]``."""
        return torch.stack([x_nje.detach() for x_nje in self._made], dim=1)

    def gradients(self, dkeys_nsje: torch.Tensor) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Gradients of both latents and of the weights; to be called once."""
        found = torch.autograd.grad(self._made, self._inputs, dkeys_nsje.unbind(1))
        return found[:2], found[2:]


@dataclass(frozen=True)
class LatentGradients:
    """Gradients of the latents and weights of a rank's keys and values, in at least fp32.

    Attributes:
        share: For this rank's share of its tokens' latents, ``[T, c]``, from other ranks' queries.
        weights: For the weights, from other ranks' tokens.
    """

    share: torch.Tensor
    weights: Sequence[torch.Tensor]

    @classmethod
    def none_yet(cls, share_Tc: torch.Tensor, maker: KeyMaker, dtype: torch.dtype) -> "LatentGradients":
        """Zeros."""
        zeros = [torch.zeros_like(x, dtype=dtype) for x in (share_Tc, *maker.weights)]
        return cls(zeros[0], zeros[1:])

    def give_weights(self, maker: KeyMaker) -> None:
        """Pass on the weights' gradients."""
        for weight, gradient in zip(maker.weights, self.weights, strict=True):
            maker.sinks.add(weight, gradient)


class LatentExchange:
    """One stage's exchange of latents.

    Args:
        exchange: The exchange of shares.
        route: How latents travel.
        chunks: The chunks that come to this rank, in the order of arrival.
    """

    def __init__(self, exchange: ChunkExchange, route: LatentRoute, chunks: Sequence[int]) -> None:
        self.exchange, self._route = exchange, route
        self._rotation = route.at(chunks) if chunks else None

    def make(self, came_nc: torch.Tensor, maker: KeyMaker, backward: bool) -> Made | None:
        """Compute keys and values from what has come; ``None`` if nothing has."""
        if self._rotation is None:
            return None
        return Made(maker, self._route.gathered(came_nc, 2, "key latents"), self._rotation, backward)

    def start_back(
        self, made: Made | None, dkeys_nsje: torch.Tensor, gradients: LatentGradients
    ) -> Callable[[torch.Tensor], None]:
        """As in ``ChunkExchange``, for the latents' shares; the weights' gradients are added at once."""
        if made is None:
            return self.exchange.start_back(dkeys_nsje.new_empty(0, gradients.share.shape[1]))
        of_latents, of_weights = made.gradients(dkeys_nsje)
        for whole, part in zip(gradients.weights, of_weights, strict=True):
            whole += part
        return self.exchange.start_back(self._route.scattered(of_latents, "key latent gradients"))


# One stage on a rank: what it sends and receives, and the attention to it.
#
# Shape suffixes: T tokens of the rank, n tokens that come; j heads of keys and values, e head size; s = 2, keys and
# values; c columns sent of a token.


@dataclass(frozen=True)
class Own:
    """What a rank has to send to others.

    Attributes:
        keys: Keys and values of its tokens, ``[T, s, j, e]``.
        share: Its share of their latents, ``[T, c]``; ``None`` if none are sent.
        maker: Computes keys and values from latents.
        backward: Whether gradients come back.
        of_queries: The latents of its queries; ``None`` if none are sent.
    """

    keys: torch.Tensor
    share: torch.Tensor | None = None
    maker: KeyMaker | None = None
    backward: bool = False
    of_queries: QueryLatents | None = None


@dataclass(frozen=True)
class OwnGradients:
    """Gradients of ``Own``, in at least fp32."""

    keys: torch.Tensor
    latents: LatentGradients | None

    @classmethod
    def none_yet(cls, own: Own, dtype: torch.dtype) -> "OwnGradients":
        """Zeros."""
        keys_Tsje = torch.zeros_like(own.keys, dtype=dtype)
        if own.share is None or own.maker is None:
            return cls(keys_Tsje, None)
        return cls(keys_Tsje, LatentGradients.none_yet(own.share, own.maker, dtype))


@dataclass(frozen=True)
class Came:
    """What a stage has brought.

    Attributes:
        keys: Keys and values, ``[n, s, j, e]``.
        made: Those that this rank has computed from latents.
    """

    keys: torch.Tensor
    made: Made | None


@dataclass(frozen=True)
class BothAttentions:
    """Attention to a stage's keys.

    Attributes:
        own: Attention of the rank's own queries.
        foreign: Attention of the queries that have come.
    """

    own: StageAttention
    foreign: StageAttention

    @classmethod
    def of(cls, work: RankWork | StageWork, sees: int | None, device: torch.device) -> "BothAttentions":
        """Attention to a rank's own keys, or to a stage's."""
        return cls(*(StageAttention(pieces, sees, device) for pieces in (work.pieces, work.foreign_pieces)))


class Stage:
    """A stage of one rank.

    Args:
        work: The rank's work in it.
        window: The window that is dealt.
        communicator: The context parallel group.
        route: How latents travel, if any do.
        device: Where the tokens are.

    Attributes:
        attention: Attention to the keys that come.
    """

    def __init__(
        self, work: StageWork, window: Window, communicator: Communicator, route: LatentRoute | None,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.attention = BothAttentions.of(work, window.sees, device)
        self._tokens = len(work.chunks) * window.chunk_tokens
        self._keys, self._latents = None, None
        if work.keys is not None:
            self._keys = ChunkExchange(work.keys, window.chunk_tokens, communicator, "keys", device)
        if work.latents is not None and route is not None:
            exchange = ChunkExchange(work.latents, window.chunk_tokens, communicator, "key latents", device)
            self._latents = LatentExchange(exchange, route, [work.chunks[place] for place in work.latents.places])

    def start(self, own: Own) -> Callable[[], Callable[[], Came]]:
        """Start to send and receive; the returned function waits, and returns what computes keys from what came."""
        keys, latents = self._keys, self._latents
        of_keys = keys.start(own.keys.flatten(1)) if keys else None
        of_latents = latents.exchange.start(own.share) if latents and own.share is not None else None

        def wait() -> Callable[[], Came]:
            return partial(self._came, own, of_keys() if of_keys else None, of_latents() if of_latents else None)

        return wait

    def _came(self, own: Own, keys_nc: torch.Tensor | None, shares_nc: torch.Tensor | None) -> Came:
        stage_nc, made = own.keys.new_empty(self._tokens, own.keys[0].numel()), None
        if self._keys and keys_nc is not None:
            self._keys.put(keys_nc, stage_nc)
        if self._latents and shares_nc is not None and own.maker:
            made = self._latents.make(shares_nc, own.maker, own.backward)
            if made:
                self._latents.exchange.put(made.keys().flatten(1), stage_nc)
        return Came(stage_nc.view(self._tokens, *own.keys.shape[1:]), made)

    def start_back(self, came: Came, dkeys_nsje: torch.Tensor, gradients: OwnGradients) -> Callable[[], None]:
        """Start to return gradients of what came; the returned function waits, and adds up those of this rank's own."""
        dtype, adds = came.keys.dtype, list[Callable[[], None]]()
        dkeys_nc = dkeys_nsje.flatten(1)
        if self._keys:
            add_keys = self._keys.start_back(self._keys.take(dkeys_nc).to(dtype))
            adds.append(lambda: add_keys(gradients.keys.flatten(1)))
        if self._latents and gradients.latents:
            of_latents, back = gradients.latents, self._latents.exchange.take(dkeys_nc).to(dtype)
            add_latents = self._latents.start_back(came.made, back.view(-1, *dkeys_nsje.shape[1:]), of_latents)
            adds.append(lambda: add_latents(of_latents.share))

        def add() -> None:
            for each in adds:
                each()

        return add


# What queries have of the stages' attention so far, and what gradients there are so far.
#
# Parts are combined by their log-sum-exps: with (o₁, l₁) and (o₂, l₂) of the same queries,
#
#     l = log(e^l₁ + e^l₂),   o = e^(l₁ − l) o₁ + e^(l₂ − l) o₂,
#
# in at least fp32 and in a fixed order, so that runs on CPU are bit-identical; on a GPU, flash attention adds up its
# gradient of queries in any order.
#
# Shape suffixes: T tokens of queries, h heads, e head size; n tokens of a stage, m queries of a piece; s = 2, keys and
# values.


@dataclass
class AttentionSum:
    """Queries, and their attention so far.

    Attributes:
        query: The queries.
        out: The output so far, in fp32 at least.
        lse: Its log-sum-exps.
    """

    query: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def begin(cls, query_The: torch.Tensor) -> "AttentionSum":
        """Of no keys yet."""
        out_The = torch.zeros_like(query_The, dtype=torch.promote_types(query_The.dtype, torch.float32))
        return cls(query_The, out_The, out_The.new_full(out_The.shape[:2], -torch.inf))

    def attend(self, attention: StageAttention, came: Came) -> None:
        """Attend to the keys of a stage."""
        for part in attention.forward(self.query, *came.keys.unbind(1)):
            _merge(self.out, self.lse, part)


@dataclass
class GradientSum:
    """Queries, their attention, and its gradients.

    Attributes:
        query: The queries.
        dout: The gradient of the output.
        out: The output.
        lse: Its log-sum-exps.
        dquery: The gradient of the queries so far, in fp32 at least.
    """

    query: torch.Tensor
    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dquery: torch.Tensor

    @classmethod
    def begin(
        cls, query_The: torch.Tensor, dout_The: torch.Tensor, out_The: torch.Tensor, lse_Th: torch.Tensor
    ) -> "GradientSum":
        """Zeros."""
        return cls(query_The, dout_The, out_The, lse_Th, torch.zeros_like(query_The, dtype=lse_Th.dtype))

    def add(self, attention: StageAttention, came: Came, dkeys_nsje: torch.Tensor) -> None:
        """Add a stage's gradients, of queries as well as keys and values."""
        inputs = self.dout, self.query, *came.keys.unbind(1), self.out, self.lse
        for piece, dquery_mhe, dkey_nje, dvalue_nje in attention.backward(*inputs):
            self.dquery[slice(*piece.queries)] += dquery_mhe
            dkeys_nsje[slice(*piece.keys), 0] += dkey_nje
            dkeys_nsje[slice(*piece.keys), 1] += dvalue_nje


def _merge(out_The: torch.Tensor, lse_Th: torch.Tensor, part: Attended) -> None:
    """Combine the attention of a piece's queries to its keys with their attention so far."""
    piece, part_mhe, part_lse_mh = part
    rows = slice(*piece.queries)
    whole_mh = torch.logaddexp(lse_Th[rows], part_lse_mh)
    out_The[rows] *= (lse_Th[rows] - whole_mh).exp().unsqueeze(-1)
    out_The[rows] += part_mhe * (part_lse_mh - whole_mh).exp().unsqueeze(-1)
    lse_Th[rows] = whole_mh


# Keys under way to a rank, stage by stage.


class Arrivals:
    """What the stages of one layer bring, forward or backward; some are under way from the start.

    Args:
        own: What this rank sends.
        attention: Attention to its own keys.
        stages: The stages.
        ahead: How many are in flight at once.

    Attributes:
        own: As given.
    """

    def __init__(self, own: Own, attention: BothAttentions, stages: Sequence[Stage], ahead: int) -> None:
        self.own, self._attention = own, attention
        self._left = iter(stages)
        self._under_way: deque[tuple[Stage, Callable[[], Callable[[], Came]]]] = deque()
        for _ in range(ahead):
            self._start_next()

    def __iter__(self) -> Iterator[tuple[Stage | None, BothAttentions, Came]]:
        """Each stage with what it brings, the rank's own keys first, while later stages are in flight; once."""
        yield None, self._attention, Came(self.own.keys, None)
        while self._under_way:
            stage, wait = self._under_way.popleft()
            make = wait()
            self._start_next()
            yield stage, stage.attention, make()

    def _start_next(self) -> None:
        stage = next(self._left, None)
        if stage is not None:
            self._under_way.append((stage, stage.start(self.own)))
