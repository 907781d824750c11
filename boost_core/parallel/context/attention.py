"""Attention of a window's tokens that are dealt to the ranks of a context parallel group.

Each rank attends to its own keys while the first stage's are under way, to a stage's while the next one's are, and puts
the parts together by their log-sum-exps: with (o₁, l₁) and (o₂, l₂) of the same queries,

    l = log(e^l₁ + e^l₂),   o = e^(l₁ − l) o₁ + e^(l₂ − l) o₂,

in fp32 at least and in one order, so that runs on CPU are alike to the bit; on a GPU flash attention adds its gradient
of queries in any order. From the forward pass only the inputs, the output and its log-sum-exps are kept: backward the
keys, or the latents that they are made of, come once more by the same stages, and their gradients go back to their
owners while the next stage's are computed.

Shape suffixes: T tokens of the rank, h heads, j heads of keys and values, e head size; n tokens that come in a stage,
m of a piece; s = 2, keys and values.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from boost_core.nn.attention import KeptAttention, KeyLatents, KeyMaker
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.context.latents import LatentRoute
from boost_core.parallel.context.pieces import Attended, StageAttention
from boost_core.parallel.context.stage import Came, Own, OwnGradients, Stage
from boost_core.plan.context.figures import ContextPlan
from boost_core.plan.context.pieces import rank_work


class ContextAttention:
    """Causal attention of documents, as one plan has their tokens on ranks; a model's layers share it.

    Args:
        plan: The plan, the same on all ranks, of all sequences of a micro-batch.
        communicator: The context parallel group.
        device: Where this rank's tokens are.
        route: How latents go between nodes; ``None`` if keys and values do.

    Attributes:
        plan: As given.
        chunks: Those of the window that this rank has; its tokens are theirs, one chunk after the other.

    Raises:
        ValueError: The plan is for another number of ranks, or has tasks that moved.
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
        self._own = StageAttention(work.pieces, window.sees, device)
        self._stages = [Stage(stage, window, communicator, route, device) for stage in work.stages]

    @property
    def sends_latents(self) -> bool:
        """Whether a call has to say what keys and values are made of."""
        return self._route is not None

    def for_layer(self) -> "ContextAttention":
        """Itself: layers differ in nothing."""
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
            latents: What these are made of, if latents are sent.
            kept: Has it, if it is computed again.

        Raises:
            ValueError: There are not as many tokens as the plan has, or torch has no kernel for them.
        """
        if len(query_The) != self._tokens:
            raise ValueError(f"{len(query_The)} tokens are not the {self._tokens} that the plan has on this rank")
        maker, both = (latents.maker, (latents.of_keys, latents.of_values)) if latents else (None, ())
        out_The: torch.Tensor = _Attention.apply(
            query_The, key_Tje, value_Tje, self, kept or KeptAttention(), maker, *both
        )  # type: ignore[no-untyped-call]
        return out_The

    def own(self, keys_Tsje: torch.Tensor, maker: KeyMaker | None, *both_Tr: torch.Tensor, backward: bool) -> Own:
        """What this rank has for others: keys and values, and its share of both latents."""
        share_Tc = self._route.share(*both_Tr) if self._route and both_Tr else None
        return Own(keys_Tsje, share_Tc, maker, backward)

    def forward(self, query_The: torch.Tensor, own: Own) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, ``[T, h, e]``, and its log-sum-exps, ``[T, h]`` in fp32 at least."""
        dtype = torch.promote_types(query_The.dtype, torch.float32)
        out_The = torch.zeros_like(query_The, dtype=dtype)
        lse_Th = torch.full_like(out_The[..., 0], -torch.inf)
        for _, attention, came in self._staged(own):
            for part in attention.forward(query_The, *came.keys.unbind(1)):
                _merge(out_The, lse_Th, part)
        return out_The.to(query_The.dtype), lse_Th

    def backward(
        self, dout_The: torch.Tensor, query_The: torch.Tensor, own: Own, out_The: torch.Tensor, lse_Th: torch.Tensor
    ) -> tuple[torch.Tensor, OwnGradients]:
        """Gradients of the queries, and of what the rank has for others."""
        dquery_The = torch.zeros_like(query_The, dtype=lse_Th.dtype)
        gradients = OwnGradients.none_yet(own, lse_Th.dtype)
        add_returned: Callable[[], None] | None = None
        for stage, attention, came in self._staged(own):
            keys_nsje = came.keys
            dkeys_nsje = torch.zeros_like(keys_nsje, dtype=lse_Th.dtype) if stage else gradients.keys
            key_nje, value_nje = keys_nsje.unbind(1)
            parts = attention.backward(dout_The, query_The, key_nje, value_nje, out_The, lse_Th)
            for piece, dquery_mhe, dkey_nje, dvalue_nje in parts:
                dquery_The[slice(*piece.queries)] += dquery_mhe
                dkeys_nsje[slice(*piece.keys), 0] += dkey_nje
                dkeys_nsje[slice(*piece.keys), 1] += dvalue_nje
            if add_returned:
                add_returned()
            if stage:
                add_returned = stage.start_back(came, dkeys_nsje, gradients)
        if add_returned:
            add_returned()
        return dquery_The.to(query_The.dtype), gradients

    def gradients_of_latents(
        self, gradients: OwnGradients, maker: KeyMaker | None, dtype: torch.dtype
    ) -> Sequence[torch.Tensor]:
        """Those of both latents, ``[T, r]``, if there are any; the weights' are handed on."""
        if self._route is None or maker is None or gradients.latents is None:
            return ()
        gradients.latents.give_weights(maker)
        return self._route.in_place(gradients.latents.share.to(dtype))

    def _staged(self, own: Own) -> Iterator[tuple[Stage | None, StageAttention, Came]]:
        """Each stage with what it brings, the rank's own first; the next stage's is under way then."""
        coming = iter(self._stages)
        following = next(coming, None)
        wait = following.start(own) if following else None
        yield None, self._own, Came(own.keys, None)
        while following and wait:
            make, stage = wait(), following
            following = next(coming, None)
            wait = following.start(own) if following else None
            yield stage, stage.attention, make()


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
    """Put the attention of a piece's queries to its keys together with what they have attended to already."""
    piece, part_mhe, part_lse_mh = part
    rows = slice(*piece.queries)
    whole_mh = torch.logaddexp(lse_Th[rows], part_lse_mh)
    out_The[rows] *= (lse_Th[rows] - whole_mh).exp().unsqueeze(-1)
    out_The[rows] += part_mhe * (part_lse_mh - whole_mh).exp().unsqueeze(-1)
    lse_Th[rows] = whole_mh
