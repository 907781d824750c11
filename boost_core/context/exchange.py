"""What context parallel ranks send each other in stages: keys and values, or the latents that these are made from.

With r = d/4, latents between nodes are a quarter of the bytes. All ranks of a tensor parallel group have the whole
latents of their tokens, so each sends its share of the columns to its counterpart on the other node, where the group
gathers the rest over the node's own links. Each rank computes the keys and values of its own heads from the whole
latents. In the backward pass they are sent and computed again; the resulting gradients of the latents are summed within
the node, a share per rank, and go back over the fabric. The owner adds them to its own part of that gradient, which the
group sums in any case.

The gradients of the weights used are summed here over all stages, so that there is one per micro-batch even if nothing
was received: code that counts gradients finds the same number in each.

Shape suffixes: T tokens of a rank, n tokens received, in the order of the ranks that send them or, for a stage, all of
them in the stage's order; x any rows; c columns sent of a token; r latents, p tensor parallel ranks, c = 2r/p for both
latents; j heads of keys and values, e head size; s = 2, keys and values.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from boost_core.context.placement import Window
from boost_core.context.plan import StageWork, Traffic
from boost_core.context.stage_attention import StageAttentions, integers
from boost_core.model.attention import Rotation
from boost_core.parallel.btp import GradientSinks
from boost_core.parallel.communicator import Communicator


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

    def start(self, local_Tc: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to send and receive; the returned function waits, and returns ``[n, c]``."""
        wait = start_rows(
            self._communicator, self._chunks(local_Tc).index_select(0, self._sent), self._goes, self._comes, self._what
        )
        return lambda: wait().view(-1, local_Tc.shape[1])

    def start_back(self, gradient_nc: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """Start to return gradients of what came; the returned function waits, and adds up those of this rank's own."""
        payload = self._chunks(gradient_nc)
        purpose = f"{self._what.removesuffix('s')} gradients"
        wait = start_rows(self._communicator, payload, self._comes, self._goes, purpose)

        def add_to(local_Tc: torch.Tensor) -> None:
            local, parts = self._chunks(local_Tc), wait()
            # A rank's part has each chunk once, so sums are always made in the order of ranks.
            for chunks, part in zip(self._sent_to, parts.split_with_sizes(self._goes), strict=True):
                local.index_add_(0, chunks, part.to(local.dtype))

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


@dataclass(frozen=True)
class LatentGradients:
    """Gradients of the latents and weights of a rank's keys and values, in at least fp32.

    Attributes:
        share: For this rank's share of its tokens' latents, ``[T, c]``, from other ranks' queries.
        weights: For the weights, from other ranks' tokens.
    """

    share: torch.Tensor
    weights: Sequence[torch.Tensor]


@dataclass(frozen=True)
class LocalKeys:
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
class LocalGradients:
    """Gradients of ``LocalKeys``, in at least fp32."""

    keys: torch.Tensor
    latents: LatentGradients | None

    @classmethod
    def zeros(cls, local: LocalKeys, dtype: torch.dtype) -> "LocalGradients":
        """None yet."""
        keys_Tsje = torch.zeros_like(local.keys, dtype=dtype)
        if local.share is None or local.maker is None:
            return cls(keys_Tsje, None)
        share_Tc, *weights = (torch.zeros_like(x, dtype=dtype) for x in (local.share, *local.maker.weights))
        return cls(keys_Tsje, LatentGradients(share_Tc, weights))


@dataclass(frozen=True)
class FromLatents:
    """Keys and values computed from latents, for their gradients.

    Attributes:
        inputs: The latents of keys and of values, ``[n, r]`` each, and the weights.
        outputs: Keys and values, ``[n, j, e]`` each.
    """

    inputs: Sequence[torch.Tensor]
    outputs: Sequence[torch.Tensor]


@dataclass(frozen=True)
class StageKeys:
    """The keys of a stage.

    Attributes:
        keys: Keys and values, ``[n, s, j, e]``.
        from_latents: Those that this rank has computed from latents.
    """

    keys: torch.Tensor
    from_latents: FromLatents | None


class Stage:
    """A stage of one rank: what it sends and receives, and the attention to it.

    Args:
        work: The rank's work in it.
        window: The window whose tokens are partitioned.
        communicator: The context parallel group.
        route: How latents travel, if any do.
        device: Where the tokens are.

    Attributes:
        attention: Attention to the keys received.
    """

    def __init__(
        self, work: StageWork, window: Window, communicator: Communicator, route: LatentRoute | None,
        device: torch.device,
    ) -> None:  # fmt: skip
        self.attention = StageAttentions.of(work, window.sees, device)
        self._tokens, self._route = len(work.chunks) * window.chunk_tokens, route
        self._keys, self._latents = None, None
        self._rotation: Rotation | None = None  # of the tokens whose latents are received, if there are any
        if work.keys is not None:
            self._keys = ChunkExchange(work.keys, window.chunk_tokens, communicator, "keys", device)
        if work.latents is not None and route is not None:
            self._latents = ChunkExchange(work.latents, window.chunk_tokens, communicator, "key latents", device)
            chunks = [work.chunks[place] for place in work.latents.places]
            self._rotation = route.at(chunks) if chunks else None

    def start(self, local: LocalKeys) -> Callable[[], Callable[[], StageKeys]]:
        """Start to send and receive; the returned function waits, and returns what computes keys from the latents."""
        wait_keys = self._keys.start(local.keys.flatten(1)) if self._keys else None
        wait_latents = self._latents.start(local.share) if self._latents and local.share is not None else None

        def wait() -> Callable[[], StageKeys]:
            keys_nc = wait_keys() if wait_keys else None
            shares_nc = wait_latents() if wait_latents else None

            def come() -> StageKeys:
                stage_nc, from_latents = local.keys.new_empty(self._tokens, local.keys[0].numel()), None
                if self._keys and keys_nc is not None:
                    self._keys.put(keys_nc, stage_nc)
                maker, rotation = local.maker, self._rotation
                if self._latents and self._route and rotation is not None and maker and shares_nc is not None:
                    latents_nr = self._route.gathered(shares_nc, 2, "key latents")
                    inputs = [x.detach().requires_grad_() for x in (*latents_nr, *maker.weights)]
                    with torch.set_grad_enabled(local.backward):
                        from_latents = FromLatents(inputs, maker.make(inputs[:2], inputs[2:], rotation))
                    keys_nsje = torch.stack([x_nje.detach() for x_nje in from_latents.outputs], dim=1)
                    self._latents.put(keys_nsje.flatten(1), stage_nc)
                return StageKeys(stage_nc.view(self._tokens, *local.keys.shape[1:]), from_latents)

            return come

        return wait

    def start_back(self, stage: StageKeys, dkeys_nsje: torch.Tensor, gradients: LocalGradients) -> Callable[[], None]:
        """Start to return gradients of what came; the returned function waits, and adds up those of this rank's own.

        The weights' gradients are added at once.
        """
        dtype, adds = stage.keys.dtype, list[Callable[[], None]]()
        dkeys_nc = dkeys_nsje.flatten(1)
        if self._keys:
            add_keys = self._keys.start_back(self._keys.take(dkeys_nc).to(dtype))
            adds.append(lambda: add_keys(gradients.keys.flatten(1)))
        if self._latents and self._route and gradients.latents:
            of_latents = gradients.latents
            dshare_nc = dkeys_nc.new_empty(0, of_latents.share.shape[1], dtype=dtype)  # of no tokens
            if stage.from_latents:
                received_nc = self._latents.take(dkeys_nc).to(dtype)
                douts = received_nc.view(-1, *dkeys_nsje.shape[1:]).unbind(1)
                dinputs = torch.autograd.grad(stage.from_latents.outputs, stage.from_latents.inputs, douts)
                for whole, part in zip(of_latents.weights, dinputs[2:], strict=True):
                    whole += part
                dshare_nc = self._route.scattered(dinputs[:2], "key latent gradients")
            add_latents = self._latents.start_back(dshare_nc)
            adds.append(lambda: add_latents(of_latents.share))

        def add() -> None:
            for each in adds:
                each()

        return add


class Arrivals:
    """Keys in flight to a rank, stage by stage, forward or backward; some are in flight from the start.

    Args:
        local: What this rank sends.
        attention: Attention to its own keys.
        stages: The stages.
        ahead: How many are in flight at once.

    Attributes:
        local: As given.
    """

    def __init__(self, local: LocalKeys, attention: StageAttentions, stages: Sequence[Stage], ahead: int) -> None:
        self.local, self._attention = local, attention
        self._stages_left = iter(stages)
        self._in_flight: deque[tuple[Stage, Callable[[], Callable[[], StageKeys]]]] = deque()
        for _ in range(ahead):
            self._start_next()

    def __iter__(self) -> Iterator[tuple[Stage | None, StageAttentions, StageKeys]]:
        """Each stage with what it brings, the rank's own keys first, while later stages are in flight; once."""
        yield None, self._attention, StageKeys(self.local.keys, None)
        while self._in_flight:
            stage, wait = self._in_flight.popleft()
            come = wait()
            self._start_next()
            yield stage, stage.attention, come()

    def _start_next(self) -> None:
        stage = next(self._stages_left, None)
        if stage is not None:
            self._in_flight.append((stage, stage.start(self.local)))
