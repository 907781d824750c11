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
from functools import partial
from itertools import accumulate, islice

import torch

from boost_core.context.placement import Window
from boost_core.context.plan import StageWork, Traffic
from boost_core.context.stage_attention import StageAttentions, integers
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
    """Gradients of ``LocalKeys``, in at least fp32.

    Attributes:
        keys: For the keys and values, ``[T, s, j, e]``.
        share: For this rank's share of its tokens' latents, ``[T, c]``, from other ranks' queries; ``None`` if none are
            sent.
        weights: For the weights of keys and values, from other ranks' tokens.
    """

    keys: torch.Tensor
    share: torch.Tensor | None
    weights: Sequence[torch.Tensor]


@dataclass(frozen=True)
class StageKeys:
    """The keys of a stage.

    Attributes:
        keys: Keys and values, ``[n, s, j, e]``.
        inputs: What this rank has computed some of them from, for gradients: the latents of keys and of values,
            ``[n, r]`` each, and the weights.
        outputs: These keys and values, ``[n, j, e]`` each.
    """

    keys: torch.Tensor
    inputs: Sequence[torch.Tensor] = ()
    outputs: Sequence[torch.Tensor] = ()


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

    def start(self, local: LocalKeys) -> Sequence[Callable[[], torch.Tensor] | None]:
        """Start to send and receive; the functions returned wait for keys and values, and for shares of latents."""
        return [
            self._keys.start(local.keys.flatten(1)) if self._keys else None,
            self._latents.start(local.share) if self._latents and local.share is not None else None,
        ]

    def received(self, local: LocalKeys, keys_nc: torch.Tensor | None, shares_nc: torch.Tensor | None) -> StageKeys:
        """The stage's keys from what ``start`` has waited for, computed from latents where these have come."""
        stage_nc = local.keys.new_empty(self._tokens, local.keys[0].numel())
        inputs, outputs = list[torch.Tensor](), tuple[torch.Tensor, ...]()
        if self._keys and keys_nc is not None:
            self._keys.put(keys_nc, stage_nc)
        maker, rotation = local.maker, self._rotation
        if self._latents and self._route and rotation is not None and maker and shares_nc is not None:
            latents_nr = self._route.gathered(shares_nc, 2, "key latents")
            inputs = [x.detach().requires_grad_() for x in (*latents_nr, *maker.weights)]
            with torch.set_grad_enabled(local.backward):
                outputs = maker.make(inputs[:2], inputs[2:], rotation)
            keys_nsje = torch.stack([x_nje.detach() for x_nje in outputs], dim=1)
            self._latents.put(keys_nsje.flatten(1), stage_nc)
        return StageKeys(stage_nc.view(self._tokens, *local.keys.shape[1:]), inputs, outputs)

    def start_back(
        self, stage: StageKeys, dkeys_nsje: torch.Tensor, gradients: LocalGradients
    ) -> Sequence[Callable[[], None]]:
        """Start to return gradients of what came; the functions returned wait, and add up those of this rank's tokens.

        The weights' gradients are added at once.
        """
        dtype, adds = stage.keys.dtype, list[Callable[[], None]]()
        dkeys_nc = dkeys_nsje.flatten(1)
        if self._keys:
            add_keys = self._keys.start_back(self._keys.take(dkeys_nc).to(dtype))
            adds.append(lambda: add_keys(gradients.keys.flatten(1)))
        if self._latents and self._route and (share_Tc := gradients.share) is not None:
            dshare_nc = dkeys_nc.new_empty(0, share_Tc.shape[1], dtype=dtype)  # of no tokens
            if stage.outputs:
                received_nc = self._latents.take(dkeys_nc).to(dtype)
                douts = received_nc.view(-1, *dkeys_nsje.shape[1:]).unbind(1)
                dinputs = torch.autograd.grad(stage.outputs, stage.inputs, douts)
                for whole, part in zip(gradients.weights, dinputs[2:], strict=True):
                    whole += part
                dshare_nc = self._route.scattered(dinputs[:2], "key latent gradients")
            adds.append(partial(self._latents.start_back(dshare_nc), share_Tc))
        return adds


class Arrivals:
    """Keys in flight to a rank, stage by stage, forward or backward; some are in flight from the start.

    Args:
        local: What this rank sends.
        attention: Attention to its local keys.
        stages: The stages.
        ahead: How many are in flight at once.

    Attributes:
        local: As given.
    """

    def __init__(self, local: LocalKeys, attention: StageAttentions, stages: Sequence[Stage], ahead: int) -> None:
        self.local, self._attention, self._stages_left = local, attention, iter(stages)
        self._in_flight = deque((stage, stage.start(local)) for stage in islice(self._stages_left, ahead))

    def __iter__(self) -> Iterator[tuple[Stage | None, StageAttentions, StageKeys]]:
        """Each stage with what it brings, the rank's local keys first, while later stages are in flight; once."""
        yield None, self._attention, StageKeys(self.local.keys)
        while self._in_flight:
            stage, waits = self._in_flight.popleft()
            keys_nc, shares_nc = (wait() if wait else None for wait in waits)
            self._in_flight.extend((each, each.start(self.local)) for each in islice(self._stages_left, 1))
            yield stage, stage.attention, stage.received(self.local, keys_nc, shares_nc)
