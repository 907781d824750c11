"""One stage on a rank: what it sends and receives, and the attention to it.

Shape suffixes: T tokens of the rank, n tokens that come; j heads of keys and values, e head size; s = 2, keys and
values; c columns sent of a token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from boost_core.nn.attention import KeyMaker, QueryLatents
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.context.exchange import ChunkExchange
from boost_core.parallel.context.latents import LatentExchange, LatentGradients, LatentRoute, Made
from boost_core.parallel.context.pieces import StageAttention
from boost_core.plan.context.pieces import RankWork, StageWork
from boost_core.plan.context.window import Window


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
