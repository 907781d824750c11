"""Attention of a window whose tokens are dealt to the ranks of a context parallel group.

Each rank attends to its own keys while the first stage's are in flight, then to each stage's while the next stage's
are, and combines the parts by their log-sum-exps: with (o₁, l₁) and (o₂, l₂) of the same queries,

    l = log(e^l₁ + e^l₂),   o = e^(l₁ − l) o₁ + e^(l₂ − l) o₂,

in at least fp32 and in a fixed order, so that runs on CPU are bit-identical; on a GPU, flash attention adds up its
gradient of queries in any order. The forward pass keeps only the inputs, the output and its log-sum-exps: in the
backward pass, the keys, or the latents they are computed from, come again in the same stages, and their gradients go
back to their owners while the next stage's are computed.

The queries of moved tasks arrive while a rank attends with its own queries to its own keys. They attend to all the keys
that it has or receives, and their outputs go back at the end.

Shape suffixes: T tokens of the rank, h heads, j heads of keys and values, e head size; n tokens that come in a stage,
m of a piece or of queries that have come; s = 2, keys and values.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from boost_core.nn.attention import KeptAttention, KeyLatents, KeyMaker
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.context.latents import LatentRoute
from boost_core.parallel.context.moved import MovedQueries
from boost_core.parallel.context.pieces import Attended, StageAttention
from boost_core.parallel.context.stage import BothAttentions, Came, Own, OwnGradients, Stage
from boost_core.plan.context.figures import ContextPlan
from boost_core.plan.context.pieces import rank_work


class ContextAttention:
    """Causal attention of documents whose tokens are dealt to ranks by a plan; a model's layers share it.

    Args:
        plan: The plan for all sequences of a micro-batch, the same on all ranks.
        communicator: The context parallel group.
        device: Where this rank's tokens are.
        route: How latents travel between nodes; ``None`` if keys and values do.

    Attributes:
        plan: As given.
        chunks: The window's chunks on this rank; its tokens are theirs, chunk by chunk.

    Raises:
        ValueError: The plan is for another number of ranks.
    """

    def __init__(
        self, plan: ContextPlan, communicator: Communicator, device: torch.device, route: LatentRoute | None = None
    ) -> None:
        if plan.ranks != communicator.size:
            raise ValueError(
                f"the plan deals tokens to {plan.ranks} ranks and the group has {communicator.size}; plan for the group"
            )
        work, window = rank_work(plan, communicator.rank, route.nodes if route else None), plan.window
        self.plan, self.chunks, self._route = plan, work.chunks, route
        self._tokens = len(work.chunks) * window.chunk_tokens
        self._own = BothAttentions.of(work, window.sees, device)
        self._moved = MovedQueries(work.queries, window.chunk_tokens, communicator, device) if work.queries else None
        self._stages = [Stage(stage, window, communicator, route, device) for stage in work.stages]

    @property
    def sends_latents(self) -> bool:
        """Whether a call has to pass the latents of keys and values."""
        return self._route is not None

    def for_layer(self) -> "ContextAttention":
        """Itself: all layers are alike."""
        return self

    def __call__(
        self, query_The: torch.Tensor, key_Tje: torch.Tensor, value_Tje: torch.Tensor,
        latents: KeyLatents | None = None, kept: KeptAttention | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Attention of this rank's tokens, ``[T, h, e]``; all ranks of the group call it.

        Args:
            query_The: Their queries, turned by their positions, as keys are; h is a multiple of j.
            key_Tje: Their keys.
            value_Tje: Their values.
            latents: The latents of keys and values, if latents are sent.
            kept: Has the result if it is recomputed.

        Raises:
            ValueError: The number of tokens is not the plan's, or torch has no kernel for them.
        """
        if len(query_The) != self._tokens:
            raise ValueError(f"{len(query_The)} tokens are not the {self._tokens} that the plan has on this rank")
        maker, both = (latents.maker, (latents.of_keys, latents.of_values)) if latents else (None, ())
        out_The: torch.Tensor = _Attention.apply(
            query_The, key_Tje, value_Tje, self, kept or KeptAttention(), maker, *both
        )  # type: ignore[no-untyped-call]
        return out_The

    def own(self, keys_Tsje: torch.Tensor, maker: KeyMaker | None, *both_Tr: torch.Tensor, backward: bool) -> Own:
        """What this rank has to send: keys and values, and its share of both latents."""
        share_Tc = self._route.share(*both_Tr) if self._route and both_Tr else None
        return Own(keys_Tsje, share_Tc, maker, backward)

    def forward(self, query_The: torch.Tensor, own: Own) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, ``[T, h, e]``, and its log-sum-exps, ``[T, h]`` in fp32 at least."""
        come = self._moved.start("queries", query_The) if self._moved else None
        mine, foreign = _Attending.begin(query_The), None
        for _, attention, came in self._staged(own):
            mine.attend(attention.own, came)
            if come:
                foreign = foreign or _Attending.begin(*come())
                foreign.attend(attention.foreign, came)
        out_The, lse_Th = mine.out.to(query_The.dtype), mine.lse
        if self._moved and foreign:
            self._moved.give_back("outputs", (foreign.out.to(query_The.dtype), foreign.lse), (out_The, lse_Th))
        return out_The, lse_Th

    def backward(
        self, dout_The: torch.Tensor, query_The: torch.Tensor, own: Own, out_The: torch.Tensor, lse_Th: torch.Tensor
    ) -> tuple[torch.Tensor, OwnGradients]:
        """Gradients of the queries, and of what the rank sent to others."""
        attended = query_The, dout_The, out_The, lse_Th
        come = self._moved.start("queries and output gradients", *attended) if self._moved else None
        mine, foreign = _Gradients.begin(*attended), None
        gradients = OwnGradients.none_yet(own, lse_Th.dtype)
        add_returned: Callable[[], None] | None = None
        for stage, attention, came in self._staged(own):
            dkeys_nsje = torch.zeros_like(came.keys, dtype=lse_Th.dtype) if stage else gradients.keys
            mine.add(attention.own, came, dkeys_nsje)
            if come:
                foreign = foreign or _Gradients.begin(*come())
                foreign.add(attention.foreign, came, dkeys_nsje)
            if add_returned:
                add_returned()
            if stage:
                add_returned = stage.start_back(came, dkeys_nsje, gradients)
        if add_returned:
            add_returned()
        dquery_The = mine.dquery.to(query_The.dtype)
        if self._moved and foreign:
            self._moved.give_back("query gradients", (foreign.dquery.to(query_The.dtype),), (dquery_The,))
        return dquery_The, gradients

    def gradients_of_latents(
        self, gradients: OwnGradients, maker: KeyMaker | None, dtype: torch.dtype
    ) -> Sequence[torch.Tensor]:
        """Gradients of both latents, ``[T, r]``, if there are any; those of the weights are passed on."""
        if self._route is None or maker is None or gradients.latents is None:
            return ()
        gradients.latents.give_weights(maker)
        return self._route.in_place(gradients.latents.share.to(dtype))

    def _staged(self, own: Own) -> Iterator[tuple[Stage | None, BothAttentions, Came]]:
        """Each stage with what it brings, the rank's own keys first, while the next stage is in flight."""
        coming = iter(self._stages)
        following = next(coming, None)
        wait = following.start(own) if following else None
        yield None, self._own, Came(own.keys, None)
        while following and wait:
            make, stage = wait(), following
            following = next(coming, None)
            wait = following.start(own) if following else None
            yield stage, stage.attention, make()


@dataclass
class _Attending:
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
    def begin(cls, query_The: torch.Tensor) -> "_Attending":
        out_The = torch.zeros_like(query_The, dtype=torch.promote_types(query_The.dtype, torch.float32))
        return cls(query_The, out_The, out_The.new_full(out_The.shape[:2], -torch.inf))

    def attend(self, attention: StageAttention, came: Came) -> None:
        """Attend to the keys of a stage."""
        for part in attention.forward(self.query, *came.keys.unbind(1)):
            _merge(self.out, self.lse, part)


@dataclass
class _Gradients:
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
    ) -> "_Gradients":
        return cls(query_The, dout_The, out_The, lse_Th, torch.zeros_like(query_The, dtype=lse_Th.dtype))

    def add(self, attention: StageAttention, came: Came, dkeys_nsje: torch.Tensor) -> None:
        """Add a stage's gradients, of queries as well as keys and values."""
        inputs = self.dout, self.query, *came.keys.unbind(1), self.out, self.lse
        for piece, dquery_mhe, dkey_nje, dvalue_nje in attention.backward(*inputs):
            self.dquery[slice(*piece.queries)] += dquery_mhe
            dkeys_nsje[slice(*piece.keys), 0] += dkey_nje
            dkeys_nsje[slice(*piece.keys), 1] += dvalue_nje


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query_The: torch.Tensor,
        key_Tje: torch.Tensor,
        value_Tje: torch.Tensor,
        attention: ContextAttention,
        kept: KeptAttention,
        maker: KeyMaker | None,
        *both_Tr: torch.Tensor,
    ) -> torch.Tensor:
        keys_Tsje = torch.stack((key_Tje, value_Tje), dim=1)
        # Kernels take a head's elements side by side; and a view would keep the keys' and values' memory, too.
        query_The = query_The.clone(memory_format=torch.contiguous_format)
        own = attention.own(keys_Tsje, maker, *both_Tr, backward=False)
        out_The, lse_Th = kept.once(lambda: attention.forward(query_The, own))
        ctx.save_for_backward(query_The, out_The, lse_Th, keys_Tsje, *both_Tr)
        ctx.attention, ctx.maker = attention, maker
        return out_The

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        attention, maker = ctx.attention, ctx.maker
        query_The, out_The, lse_Th, keys_Tsje, *both_Tr = ctx.saved_tensors
        own = attention.own(keys_Tsje, maker, *both_Tr, backward=True)
        dquery_The, of_own = attention.backward(gradients[0].contiguous(), query_The, own, out_The, lse_Th)
        of_latents = attention.gradients_of_latents(of_own, maker, keys_Tsje.dtype)
        return dquery_The, *of_own.keys.to(keys_Tsje.dtype).unbind(1), None, None, None, *of_latents


def _merge(out_The: torch.Tensor, lse_Th: torch.Tensor, part: Attended) -> None:
    """Combine the attention of a piece's queries to its keys with their attention so far."""
    piece, part_mhe, part_lse_mh = part
    rows = slice(*piece.queries)
    whole_mh = torch.logaddexp(lse_Th[rows], part_lse_mh)
    out_The[rows] *= (lse_Th[rows] - whole_mh).exp().unsqueeze(-1)
    out_The[rows] += part_mhe * (part_lse_mh - whole_mh).exp().unsqueeze(-1)
    lse_Th[rows] = whole_mh
