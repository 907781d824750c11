"""Attention over context parallel ranks, sparse for long documents: only the keys that are seen are sent.

Short documents are attended to as the plan says. For long ones, each layer's heads choose what is seen, all ranks
together; then the keys that a rank's queries see arrive, some heads of keys at a time, while those before are attended
to. All that a query sees is there at once, so nothing has to be combined by log-sum-exps. The forward pass keeps the
lines; in the backward pass the same keys come again, and their gradients go back to their owners.

Shape suffixes: T tokens of the rank, h heads, j heads of keys, e head size; of a document b blocks of k = 64 queries
that the rank has and n blocks of keys; N tokens of all documents' blocks, i of a group's heads of keys; s = 2, keys and
values.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial

import torch

from boost_core.config.attention import BLOCK, SparseAttentionConfig
from boost_core.nn.sparse.index import Lines
from boost_core.nn.sparse.product import HeadKeys, head_backward, head_forward
from boost_core.nn.sparse.recall import Tally
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.context.active_keys import ActiveKeys
from boost_core.parallel.context.arrivals import Arrivals
from boost_core.parallel.context.attention import ContextAttention, InFlight, ReturningGradients
from boost_core.parallel.context.layer import LayerAttention
from boost_core.parallel.context.long_document import LongDocument, long_documents
from boost_core.parallel.context.moved import Attended, OutputGradients, Returning
from boost_core.parallel.context.sparse_index import SparseIndex
from boost_core.parallel.context.stage import Own
from boost_core.plan.context.dealt import head_groups
from boost_core.plan.context.figures import ContextPlan


class SparseContextAttention(ContextAttention):
    """Causal attention of documents whose tokens are dealt to ranks by a plan, sparse where its window says so.

    Args:
        plan: The plan, the same on all ranks.
        how: What the queries of long documents see.
        communicator: The context parallel group.
        device: Where this rank's tokens are.
        tally: Counts the attention kept over all micro-batches of a step.
    """

    def __init__(
        self, plan: ContextPlan, how: SparseAttentionConfig, communicator: Communicator, device: torch.device,
        tally: Tally,
    ) -> None:  # fmt: skip
        super().__init__(plan, communicator, device)
        self._documents = long_documents(plan, communicator.rank, device)
        self._index, self._tally = SparseIndex(self._documents, how, communicator), tally
        self._communicator = communicator
        self._lines: Sequence[Sequence[Lines]] | None = None

    def for_layer(self) -> LayerAttention:
        """Return what a layer calls, over a copy that keeps what its queries see."""
        own = copy(self)
        own._lines = None
        return LayerAttention(own)

    def forward(self, query_The: torch.Tensor, in_flight: InFlight) -> tuple[Attended, Returning | None]:
        """As in ``ContextAttention``; by the lines of the first call."""
        own = in_flight.keys.own
        attended, returning = super().forward(query_The, in_flight)
        out_The, lse_Th = attended.out, attended.lse
        if not self._documents:
            return attended, returning
        if self._lines is None:
            self._lines = self._index.find(query_The, own.keys[:, 0], self._tally)
        for coming in self._coming(own, self._lines):
            for each in self._heads(coming, self._lines, lse_Th.dtype):
                document, head = each.document, each.head
                query_bke = document.in_blocks(query_The[document.rows, head].to(lse_Th.dtype))
                out_bke, lse_bk = head_forward(query_bke, each.keys)
                out_The[document.rows, head] = document.out_of_blocks(out_bke).to(out_The.dtype)
                lse_Th[document.rows, head] = document.out_of_blocks(lse_bk)
        return attended, returning

    def backward(
        self, of_outputs: OutputGradients, query_The: torch.Tensor, keys: Arrivals, attended: Attended
    ) -> tuple[torch.Tensor, ReturningGradients]:
        """Gradients of the queries, and of what the rank sent to others."""
        dquery_The, returning = super().backward(of_outputs, query_The, keys, attended)
        if self._lines is None:
            return dquery_The, returning
        own, gradients, lse_Th = keys.own, returning.whole(), attended.lse
        dtype, add_returned = lse_Th.dtype, None
        for coming in self._coming(own, self._lines):
            dkeys_iNse = torch.zeros_like(coming.keys, dtype=dtype)
            for each in self._heads(coming, self._lines, dtype):
                document, head = each.document, each.head
                query_bke, dout_bke, lse_bk = (
                    document.in_blocks(x[document.rows, head].to(dtype)) for x in (query_The, of_outputs.dout, lse_Th)
                )
                dkey_nke, dvalue_nke = _in_blocks(dkeys_iNse[each.number, each.where])
                dquery_bke = head_backward(query_bke, dout_bke, lse_bk, each.keys, dkey_nke, dvalue_nke)
                dquery_The[document.rows, head] = document.out_of_blocks(dquery_bke).to(dquery_The.dtype)
            if add_returned:
                add_returned(gradients.keys)
            add_returned = coming.active.start_back(dkeys_iNse, coming.group, own.keys.dtype)
        return dquery_The, ReturningGradients(gradients, add_returned and partial(add_returned, gradients.keys))

    def _coming(self, own: Own, lines: Sequence[Sequence[Lines]]) -> Iterator["_Coming"]:
        """The keys of each group of heads, while the next group's are in flight."""
        groups = head_groups(own.keys.shape[2])
        active = ActiveKeys(self._documents, lines, own.keys.shape[2], self._communicator)
        wait = active.start(own.keys, 0)
        for group, heads in enumerate(groups):
            keys_iNse = wait()
            if group + 1 < len(groups):
                wait = active.start(own.keys, group + 1)
            yield _Coming(active, group, keys_iNse, heads, own.keys.shape[2])

    def _heads(self, coming: "_Coming", lines: Sequence[Sequence[Lines]], dtype: torch.dtype) -> Iterator["_Head"]:
        """Each head of queries of each document with tokens on this rank."""
        for number, key_head in enumerate(coming.heads):
            for document, of_heads in zip(self._documents, lines, strict=True):
                if not len(document.place_t):
                    continue
                share = len(of_heads) // coming.key_heads
                where = slice(document.begin, document.begin + document.blocks * BLOCK)
                key_nke, value_nke = _in_blocks(coming.keys[number, where].to(dtype))
                for head in range(key_head * share, (key_head + 1) * share):
                    keys = HeadKeys(key_nke, value_nke, of_heads[head], document.block_b)
                    yield _Head(document, head, keys, number, where)


@dataclass(frozen=True)
class _Coming:
    """Keys and values of a group of heads that have come.

    Attributes:
        active: What sent and received them.
        group: The group's number.
        keys: The keys and values, ``[i, N, s, e]``.
        heads: The group's heads.
        key_heads: Number of heads of keys in all groups.
    """

    active: ActiveKeys
    group: int
    keys: torch.Tensor
    heads: range
    key_heads: int


@dataclass(frozen=True)
class _Head:
    """A head of queries of a document.

    Attributes:
        document: The document.
        head: The head.
        keys: The keys that it attends to.
        number: The number of its head of keys in the group.
        where: The document's tokens among those of all documents.
    """

    document: LongDocument
    head: int
    keys: HeadKeys
    number: int
    where: slice


def _in_blocks(keys_mse: torch.Tensor) -> Sequence[torch.Tensor]:
    """A document's keys and values, ``[n, k, e]`` each."""
    return keys_mse.view(-1, BLOCK, *keys_mse.shape[1:]).unbind(2)
