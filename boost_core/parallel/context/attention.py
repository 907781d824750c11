"""Attention of a window's tokens that are dealt to the ranks of a context parallel group.

Each rank attends to its own keys while the first stage's are under way, to a stage's while the next one's are, and puts
the parts together by their log-sum-exps: with (o₁, l₁) and (o₂, l₂) of the same queries,

    l = log(e^l₁ + e^l₂),   o = e^(l₁ − l) o₁ + e^(l₂ − l) o₂,

in fp32 at least and in one order, so that runs on CPU are alike to the bit; on a GPU flash attention adds its gradient
of queries in any order. From the forward pass only the inputs, the output and its log-sum-exps are kept: backward the
keys come once more by the same stages, and their gradients go back to their owners while the next stage's are computed.

Shape suffixes: T tokens of the rank, h heads, j heads of keys and values, e head size; n tokens that come in a stage,
m of a piece; s = 2, keys and values.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from boost_core.parallel.communicator import Communicator
from boost_core.parallel.context.exchange import KeyExchange
from boost_core.parallel.context.pieces import Attended, StageAttention
from boost_core.plan.context.figures import ContextPlan
from boost_core.plan.context.pieces import rank_work


class ContextAttention:
    """Causal attention of documents, as one plan has their tokens on ranks; a model's layers share it.

    Args:
        plan: The plan, the same on all ranks, of all sequences of a micro-batch.
        communicator: The context parallel group.
        device: Where this rank's tokens are.

    Attributes:
        chunks: Those of the window that this rank has; its tokens are theirs, one chunk after the other.

    Raises:
        ValueError: The plan is for another number of ranks, or has tasks that moved.
    """

    def __init__(self, plan: ContextPlan, communicator: Communicator, device: torch.device) -> None:
        if plan.ranks != communicator.size:
            raise ValueError(
                f"the plan deals tokens to {plan.ranks} ranks and the group has {communicator.size}; plan for the group"
            )
        work, window = rank_work(plan, communicator.rank), plan.window
        self.chunks = work.chunks
        self._tokens = len(work.chunks) * window.chunk_tokens
        self._own = StageAttention(work.pieces, window.sees, device)
        self._stages = [
            (
                KeyExchange(stage, window.chunk_tokens, communicator, device),
                StageAttention(stage.pieces, window.sees, device),
            )
            for stage in work.stages
        ]

    def __call__(self, query_The: torch.Tensor, key_Tje: torch.Tensor, value_Tje: torch.Tensor) -> torch.Tensor:
        """Attention of this rank's tokens, ``[T, h, e]``; all ranks of the group call it.

        Args:
            query_The: Their queries, turned by their positions, as keys are; h is a multiple of j.
            key_Tje: Their keys.
            value_Tje: Their values.

        Raises:
            ValueError: There are not as many tokens as the plan has, or torch has no kernel for them.
        """
        if len(query_The) != self._tokens:
            raise ValueError(f"{len(query_The)} tokens are not the {self._tokens} that the plan has on this rank")
        out_The: torch.Tensor = _Attention.apply(query_The, key_Tje, value_Tje, self)  # type: ignore[no-untyped-call]
        return out_The

    def forward(self, query_The: torch.Tensor, own_Tsje: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The output, ``[T, h, e]``, and its log-sum-exps, ``[T, h]`` in fp32 at least."""
        dtype = torch.promote_types(query_The.dtype, torch.float32)
        out_The = torch.zeros_like(query_The, dtype=dtype)
        lse_Th = torch.full_like(out_The[..., 0], -torch.inf)
        for _, attention, keys_nsje in self._staged(own_Tsje):
            for part in attention.forward(query_The, *keys_nsje.unbind(1)):
                _merge(out_The, lse_Th, part)
        return out_The.to(query_The.dtype), lse_Th

    def backward(
        self, dout_The: torch.Tensor, query_The: torch.Tensor, own_Tsje: torch.Tensor, out_The: torch.Tensor,
        lse_Th: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        """Gradients of the queries, and of the rank's own keys and values."""
        dquery_The = torch.zeros_like(query_The, dtype=lse_Th.dtype)
        down_Tsje = torch.zeros_like(own_Tsje, dtype=lse_Th.dtype)
        add_returned: Callable[[torch.Tensor], None] | None = None
        for exchange, attention, keys_nsje in self._staged(own_Tsje):
            dkeys_nsje = torch.zeros_like(keys_nsje, dtype=lse_Th.dtype) if exchange else down_Tsje
            key_nje, value_nje = keys_nsje.unbind(1)
            parts = attention.backward(dout_The, query_The, key_nje, value_nje, out_The, lse_Th)
            for piece, dquery_mhe, dkey_nje, dvalue_nje in parts:
                dquery_The[slice(*piece.queries)] += dquery_mhe
                dkeys_nsje[slice(*piece.keys), 0] += dkey_nje
                dkeys_nsje[slice(*piece.keys), 1] += dvalue_nje
            if add_returned:
                add_returned(down_Tsje)
            if exchange:
                add_returned = exchange.start_back(dkeys_nsje.to(own_Tsje.dtype))
        if add_returned:
            add_returned(down_Tsje)
        return dquery_The.to(query_The.dtype), down_Tsje.to(own_Tsje.dtype)

    def _staged(self, own_Tsje: torch.Tensor) -> Iterator[tuple[KeyExchange | None, StageAttention, torch.Tensor]]:
        """Each stage with its keys and values, the rank's own first; the next stage's are under way then."""
        coming = iter(self._stages)
        following = next(coming, None)
        wait = following[0].start(own_Tsje) if following else None
        yield None, self._own, own_Tsje
        while following and wait:
            keys_nsje, (exchange, attention) = wait(), following
            following = next(coming, None)
            wait = following[0].start(own_Tsje) if following else None
            yield exchange, attention, keys_nsje


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query_The: torch.Tensor, key_Tje: torch.Tensor, value_Tje: torch.Tensor, attention: ContextAttention
    ) -> torch.Tensor:
        own_Tsje = torch.stack((key_Tje, value_Tje), dim=1)
        # Kernels take a head's elements side by side; and a view would keep the keys' and values' memory, too.
        query_The = query_The.clone(memory_format=torch.contiguous_format)
        out_The, lse_Th = attention.forward(query_The, own_Tsje)
        ctx.save_for_backward(query_The, own_Tsje, out_The, lse_Th)
        ctx.attention = attention
        return out_The

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        dquery_The, down_Tsje = ctx.attention.backward(gradients[0].contiguous(), *ctx.saved_tensors)
        return dquery_The, *down_Tsje.unbind(1), None


def _merge(out_The: torch.Tensor, lse_Th: torch.Tensor, part: Attended) -> None:
    """Put the attention of a piece's queries to its keys together with what they have attended to already."""
    piece, part_mhe, part_lse_mh = part
    rows = slice(*piece.queries)
    whole_mh = torch.logaddexp(lse_Th[rows], part_lse_mh)
    out_The[rows] *= (lse_Th[rows] - whole_mh).exp().unsqueeze(-1)
    out_The[rows] += part_mhe * (part_lse_mh - whole_mh).exp().unsqueeze(-1)
    lse_Th[rows] = whole_mh
