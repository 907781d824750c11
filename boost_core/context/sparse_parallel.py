"""Attention over context parallel ranks, sparse for long documents: only the keys that are seen are sent.

Short documents are attended to as the plan says. For long ones, each layer's heads choose what is seen, all ranks
together; then the keys that a rank's queries see arrive, some heads of keys at a time, while those before are attended
to. All that a query sees is there at once, so nothing has to be combined by log-sum-exps. The forward pass keeps the
lines; in the backward pass the same keys come again, and their gradients go back to their owners.

Shape suffixes: T tokens of the rank, h heads, j heads of keys, e head size; of a document b blocks of k = 64 queries
that the rank has and n blocks of keys; N tokens of all documents' blocks, i of a group's heads of keys; s = 2, keys and
values.
"""

from collections.abc import Callable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from boost_core.config.model import BLOCK, LAST_QUERIES, SAMPLED_QUERIES, SparseAttentionConfig
from boost_core.context.attention import ContextAttention, InFlight, LayerAttention, ReturningGradients
from boost_core.context.exchange import Arrivals, Own
from boost_core.context.offload import Attended, OutputGradients, Returning
from boost_core.context.plan import ContextPlan
from boost_core.context.selection import head_groups
from boost_core.context.sparse import (
    HeadKeys,
    Lines,
    Tally,
    choose_lines,
    head_backward,
    head_forward,
    last_blocks,
    mass_of_blocks,
    sampled_rows,
    scores_of_blocks,
    shares,
    sums_of_blocks,
)
from boost_core.parallel.communicator import Communicator

# A document with sparse attention, with its tokens spread over the ranks of a context parallel group.
#
# Shape suffixes: m tokens of the document, n blocks of 64 of them, t tokens of it on the rank; b blocks that contain
# these; c ranks; p queries that choose what is seen, or by which recall is measured.


@dataclass(frozen=True)
class LongDocument:
    """One document.

    Attributes:
        tokens: Number of its tokens.
        begin: Where its tokens begin among the blocks of all such documents.
        rows: The document's tokens among the rank's own, where they are consecutive.
        place_t: The places of the rank's tokens in the document.
        rank_m: The rank that has each token.
        places: The places of each rank's tokens.
        has_cn: Whether each rank has a token of each block.
        block_b: The rank's blocks.
        slot_t: Where the rank's tokens are in its blocks, block by block.
        row_p: The places of the last queries, and of those by which recall is measured.
        asked_q: Which of these the rank has.
        asked_row_q: Where they are among the rank's tokens.
    """

    tokens: int
    begin: int
    rows: slice
    place_t: torch.Tensor
    rank_m: torch.Tensor
    places: Sequence[torch.Tensor]
    has_cn: torch.Tensor
    block_b: torch.Tensor
    slot_t: torch.Tensor
    row_p: torch.Tensor
    asked_q: torch.Tensor
    asked_row_q: torch.Tensor

    @property
    def blocks(self) -> int:
        """Number of blocks in the document, the last of which may not be full."""
        return -(-self.tokens // BLOCK)

    def in_blocks(self, x_te: torch.Tensor, fill: float = 0) -> torch.Tensor:
        """Values of the rank's tokens in the document's blocks, ``[b, k, …]``; ``fill`` in others' places."""
        filled = x_te.new_full((len(self.block_b) * BLOCK, *x_te.shape[1:]), fill)
        filled[self.slot_t] = x_te
        return filled.view(-1, BLOCK, *x_te.shape[1:])

    def out_of_blocks(self, x_bke: torch.Tensor) -> torch.Tensor:
        """The inverse of ``in_blocks``, ``[t, …]``."""
        return x_bke.flatten(0, 1)[self.slot_t]


def long_documents(plan: ContextPlan, rank: int, device: torch.device) -> Sequence[LongDocument]:
    """The documents of a plan that use sparse attention, in order."""
    window = plan.window
    rank_T = torch.tensor(plan.placement).repeat_interleave(window.chunk_tokens)
    before_T = (rank_T == rank).cumsum(0)  # of the rank's tokens, up to each
    found, begin = list[LongDocument](), 0
    for tokens, end in zip(window.documents, accumulate(window.documents), strict=True):
        if window.is_sparse(tokens):
            first = int(before_T[end - tokens - 1]) if end > tokens else 0
            found.append(_of_one(rank_T[end - tokens : end], plan.ranks, rank, begin, first, device))
            begin += found[-1].blocks * BLOCK
    return found


def _of_one(rank_m: torch.Tensor, ranks: int, rank: int, begin: int, first: int, device: torch.device) -> LongDocument:
    tokens = len(rank_m)
    place_m = torch.arange(tokens)
    has_cn = torch.zeros(ranks, -(-tokens // BLOCK), dtype=torch.bool)
    has_cn[rank_m, place_m // BLOCK] = True
    place_t, block_b = place_m[rank_m == rank], has_cn[rank].nonzero().flatten()
    row_p = torch.cat([place_m[-LAST_QUERIES:], sampled_rows(tokens, place_m.device)])
    asked_q = (rank_m[row_p] == rank).nonzero().flatten()
    return LongDocument(
        tokens,
        begin,
        slice(first, first + len(place_t)),
        place_t.to(device),
        rank_m.to(device),
        [place_m[rank_m == each].to(device) for each in range(ranks)],
        has_cn.to(device),
        block_b.to(device),
        (torch.searchsorted(block_b, place_t // BLOCK) * BLOCK + place_t % BLOCK).to(device),
        row_p.to(device),
        asked_q.to(device),
        (first + torch.searchsorted(place_t, row_p[asked_q])).to(device),
    )


# What the queries of long documents see, chosen by the ranks of a context parallel group together.
#
# All ranks get the last queries of each document and score the keys that they have. Softmax's denominators are summed
# in
# integers, so that each key's share is bit-identical to what one rank alone would find; the sums of each document and
# head go to one rank, in turns, which chooses as a single rank would; and all are told what was chosen, one bit per
# line.
# What is sent is 96 queries per document, two numbers for each of them and head, one or two numbers per token and head,
# and a bit per token and head to all: little compared with the keys.
#
# Shape suffixes: T tokens of the rank; d documents; h heads, j heads of keys, e head size; b blocks that the rank has
# of
# a document, k = 64 of their tokens, t those that it has; p queries that choose, and by which recall is measured.

_LAST, _SAMPLED = slice(0, LAST_QUERIES), slice(LAST_QUERIES, LAST_QUERIES + SAMPLED_QUERIES)
_BITS = 8  # of a byte


@dataclass(frozen=True)
class SparseIndex:
    """Chooses what the queries of a plan's long documents see.

    Attributes:
        documents: The long documents, as the rank has them.
        how: What is always seen, and how much more may be.
        communicator: The context parallel group.
    """

    documents: Sequence[LongDocument]
    how: SparseAttentionConfig
    communicator: Communicator

    def find(self, query_The: torch.Tensor, key_Tje: torch.Tensor, tally: Tally) -> Sequence[Sequence[Lines]]:
        """What each head's queries see, for each document; all ranks call it, and find the same."""
        scores = _Scores(self.documents, self._asked(query_The), key_Tje)
        shape = len(self.documents), query_The.shape[1], LAST_QUERIES + SAMPLED_QUERIES
        most_dhp = torch.full(shape, -torch.inf, dtype=scores.dtype, device=query_The.device)
        for at, which, score_bkp in scores.of_all(_LAST, _SAMPLED):
            most_dhp[at][which] = score_bkp.amax(dim=(0, 1))
        self.communicator.all_reduce_(most_dhp, "largest scores", dist.ReduceOp.MAX)
        sum_dhp = torch.zeros(shape, dtype=torch.int64, device=query_The.device)
        for at, which, score_bkp in scores.of_all(_LAST, _SAMPLED):
            sum_dhp[at][which] = sums_of_blocks(score_bkp, most_dhp[at][which])
        self.communicator.all_reduce_(sum_dhp, "sums of scores")
        chosen = self._choose(scores, most_dhp, sum_dhp)
        self._measure(scores, most_dhp, sum_dhp, chosen, tally)
        return chosen

    def _asked(self, query_The: torch.Tensor) -> torch.Tensor:
        """The queries with which every rank scores its keys, ``[d, p, h, e]``."""
        asked_dphe = query_The.new_zeros(len(self.documents), LAST_QUERIES + SAMPLED_QUERIES, *query_The.shape[1:])
        for document, asked_phe in zip(self.documents, asked_dphe, strict=True):
            asked_phe[document.asked_q] = query_The[document.asked_row_q]
        return self.communicator.all_reduce_(asked_dphe, "last queries")

    def _choose(self, scores: "_Scores", most_dhp: torch.Tensor, sum_dhp: torch.Tensor) -> Sequence[Sequence[Lines]]:
        ranks, rank, heads = self.communicator.size, self.communicator.rank, most_dhp.shape[1]
        goes: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        for (number, head), _, score_bkp in scores.of_all(_LAST):
            document = self.documents[number]
            most_p, sum_p = most_dhp[number, head, _LAST], sum_dhp[number, head, _LAST]
            mass_bt = mass_of_blocks(score_bkp, most_p, sum_p, document.tokens).flatten(1)[:, document.slot_t]
            goes[(number * heads + head) % ranks].append(mass_bt.flatten())
        mine = [each for each in range(len(self.documents) * heads) if each % ranks == rank]
        masses = self._exchanged(goes, [self.documents[each // heads] for each in mine], scores.dtype)
        bits = _Bits(self.documents, heads, most_dhp.device)
        for each, mass_bm in zip(mine, masses, strict=True):
            document = self.documents[each // heads]
            last_b = last_blocks(document.tokens, mass_bm.device)
            bits.put(each, choose_lines(mass_bm, last_b, document.tokens, self.how))
        self.communicator.all_reduce_(bits.packed, "lines")
        return bits.lines()

    def _exchanged(
        self, goes: Sequence[Sequence[torch.Tensor]], documents: Sequence[LongDocument], dtype: torch.dtype
    ) -> Sequence[torch.Tensor]:
        """All ranks' sums for the documents and heads this rank chooses for, ``[b, m]`` each; all ranks call it."""
        device, ranks = self.documents[0].place_t.device, range(self.communicator.size)
        rows = {id(each): len(last_blocks(each.tokens, torch.device("cpu"))) for each in documents}
        comes = [sum(rows[id(each)] * len(each.places[rank]) for each in documents) for rank in ranks]
        flat = [part for parts in goes for part in parts]
        payload = torch.cat(flat) if flat else torch.empty(0, dtype=dtype, device=device)
        received = torch.empty(sum(comes), dtype=dtype, device=device)
        sizes = [sum(len(part) for part in parts) for parts in goes]
        self.communicator.start_uneven_all_to_all(received, payload, (comes, sizes), "sums of keys").wait()
        left, whole = list(torch.split(received, comes)), []
        for document in documents:
            mass_bm = received.new_empty(rows[id(document)], document.tokens)
            for rank in ranks:
                count = mass_bm.shape[0] * len(document.places[rank])
                mass_bm[:, document.places[rank]] = left[rank][:count].view(mass_bm.shape[0], -1)
                left[rank] = left[rank][count:]
            whole.append(mass_bm)
        return whole

    def _measure(
        self, scores: "_Scores", most_dhp: torch.Tensor, sum_dhp: torch.Tensor, chosen: Sequence[Sequence[Lines]],
        tally: Tally,
    ) -> None:  # fmt: skip
        kept_d = torch.zeros(len(self.documents), dtype=torch.float64, device=most_dhp.device)
        for (number, head), _, score_bkp in scores.of_all(_SAMPLED):
            document = self.documents[number]
            share_bkp = shares(score_bkp, most_dhp[number, head, _SAMPLED], sum_dhp[number, head, _SAMPLED])
            sees_pm = chosen[number][head].sees(document.row_p[_SAMPLED])
            kept_d[number] += (document.out_of_blocks(share_bkp).T * sees_pm[:, document.place_t]).sum()
        self.communicator.all_reduce_(kept_d, "kept attention")
        for document, kept, lines in zip(self.documents, kept_d, chosen, strict=True):
            tally.count(document.tokens, lines, kept)


class _Scores:
    """Scores of the choosing and measuring queries with this rank's keys.

    Args:
        documents: The documents.
        asked_dphe: Their queries.
        key_Tje: The rank's keys.
    """

    def __init__(self, documents: Sequence[LongDocument], asked_dphe: torch.Tensor, key_Tje: torch.Tensor) -> None:
        self.dtype = torch.promote_types(key_Tje.dtype, torch.float32)
        self._documents, self._asked_dphe, self._key_Tje = documents, asked_dphe, key_Tje
        self._share = asked_dphe.shape[2] // key_Tje.shape[1]

    def of_all(self, *parts: slice) -> Iterator[tuple[tuple[int, int], slice, torch.Tensor]]:
        """Scores of each document, head and part of the queries, ``[b, k, p]``; documents without keys are left out."""
        for number, document in enumerate(self._documents):
            if not len(document.place_t):
                continue
            place_bk = document.in_blocks(document.place_t, document.tokens)  # others' keys are in no one's past
            for key_head in range(self._key_Tje.shape[1]):
                key_bke = document.in_blocks(self._key_Tje[document.rows, key_head].to(self.dtype))
                for head in range(key_head * self._share, (key_head + 1) * self._share):
                    query_pe = self._asked_dphe[number, :, head].to(self.dtype)
                    for part in parts:
                        score_bkp = scores_of_blocks(query_pe[part], key_bke, place_bk, document.row_p[part])
                        yield (number, head), part, score_bkp


class _Bits:
    """The lines of all documents and heads, one bit per line."""

    def __init__(self, documents: Sequence[LongDocument], heads: int, device: torch.device) -> None:
        self._documents, self._heads = documents, heads
        self._sizes = [-(-(each.blocks + each.tokens) // _BITS) for each in documents for _ in range(heads)]
        self.packed = torch.zeros(sum(self._sizes), dtype=torch.uint8, device=device)
        self._parts = torch.split(self.packed, self._sizes)
        self._weight = 2 ** torch.arange(_BITS, dtype=torch.uint8, device=device)

    def put(self, each: int, lines: Lines) -> None:
        """Set the lines of one document and head."""
        is_line = lines.slashes.new_zeros(self._sizes[each] * _BITS, dtype=torch.uint8)
        is_line[lines.slashes] = 1
        is_line[lines.blocks + lines.verticals] = 1
        self._parts[each].copy_((is_line.view(-1, _BITS) * self._weight).sum(dim=1))

    def lines(self) -> Sequence[Sequence[Lines]]:
        """All lines, by document and head."""
        return [
            [self._lines(document, self._parts[number * self._heads + head]) for head in range(self._heads)]
            for number, document in enumerate(self._documents)
        ]

    def _lines(self, document: LongDocument, packed: torch.Tensor) -> Lines:
        is_line = packed.unsqueeze(1).bitwise_and(self._weight).flatten() != 0
        slashes, verticals = (part.nonzero().flatten() for part in is_line.tensor_split([document.blocks]))
        return Lines(document.tokens, slashes, verticals)


# Sends the keys that ranks see of each other's under the lines of all heads, and no others; returns their gradients.
#
# A key and value of one head is sent to a rank if a query of the rank's blocks sees it with one of the heads that share
# it. Every rank knows the lines of all heads and who has which tokens, so each knows by itself what to send and
# receive.
# The counts are read from the device for each head and document in a pass.
#
# Shape suffixes: T tokens of the rank; m tokens of a document, n blocks of 64 of them, t those that the rank has; N
# tokens of all documents' blocks; c ranks; i of a group's heads of keys, j all, e head size; r keys that come; s = 2,
# keys and values.


class ActiveKeys:
    """Which of a layer's keys go and come.

    Args:
        documents: The documents, as the rank has them.
        lines: What each head's queries see of each document.
        key_heads: Number of heads of keys and values.
        communicator: The context parallel group.
    """

    def __init__(
        self, documents: Sequence[LongDocument], lines: Sequence[Sequence[Lines]], key_heads: int,
        communicator: Communicator,
    ) -> None:  # fmt: skip
        self._communicator = communicator
        self._tokens = sum(document.blocks for document in documents) * BLOCK
        self._own_T = torch.cat([_range(document.rows, document.place_t.device) for document in documents])
        self._own_N = torch.cat([document.begin + document.place_t for document in documents])
        asked = [_asked(*each, key_heads, communicator.rank) for each in zip(documents, lines, strict=True)]
        goes_cjt = torch.cat([goes for goes, _ in asked], dim=2)
        from_jN = torch.cat([pad(comes, (0, -comes.shape[1] % BLOCK), value=-1) for _, comes in asked], dim=1)
        self._groups = [_Group.of(goes_cjt, from_jN, heads, self._own_T) for heads in head_groups(key_heads)]
        ranks = torch.arange(communicator.size, device=from_jN.device)
        counts = [
            torch.stack([goes_cjt[:, heads].sum(dim=(1, 2)), (from_jN[heads].flatten() == ranks[:, None]).sum(dim=1)])
            for heads in map(_slice, head_groups(key_heads))
        ]
        self._counts: Sequence[Sequence[list[int]]] = torch.stack(counts).tolist()

    def start(self, keys_Tsje: torch.Tensor, group: int) -> Callable[[], torch.Tensor]:
        """Start to send and receive the keys of a group of heads.

        The returned function waits, and returns the documents' keys and values in blocks, ``[i, N, s, e]``: zeros where
        none of this rank's queries sees a key.
        """
        its = self._groups[group]
        payload_rse = keys_Tsje[its.sent_token, :, its.sent_head]
        goes, comes = self._counts[group]
        received_rse = payload_rse.new_empty((sum(comes), *payload_rse.shape[1:]))
        pending = self._communicator.start_uneven_all_to_all(received_rse, payload_rse, (comes, goes), "keys")

        def wait() -> torch.Tensor:
            own_Tsie = keys_Tsje[self._own_T][:, :, _slice(its.heads)]
            keys_iNse = keys_Tsje.new_zeros(len(its.heads), self._tokens, *keys_Tsje[0, :, 0].shape)
            keys_iNse[:, self._own_N] = own_Tsie.permute(2, 0, 1, 3)
            pending.wait()
            keys_iNse.flatten(0, 1).index_copy_(0, its.came, received_rse)
            return keys_iNse

        return wait

    def start_back(self, dkeys_iNse: torch.Tensor, group: int, dtype: torch.dtype) -> Callable[[torch.Tensor], None]:
        """Start to return gradients; the returned function waits, and adds this rank's own up in a fixed order."""
        its, (goes, comes) = self._groups[group], self._counts[group]
        payload_rse = dkeys_iNse.flatten(0, 1)[its.came].to(dtype)
        received_rse = payload_rse.new_empty((sum(goes), *payload_rse.shape[1:]))
        pending = self._communicator.start_uneven_all_to_all(received_rse, payload_rse, (goes, comes), "key gradients")
        own_Tsie = dkeys_iNse[:, self._own_N].permute(1, 2, 0, 3)

        def add_to(dkeys_Tsje: torch.Tensor) -> None:
            for number, head in enumerate(its.heads):
                dkeys_Tsje[:, :, head].index_add_(0, self._own_T, own_Tsie[:, :, number])
            pending.wait()
            sent = (torch.split(x, goes) for x in (its.sent_token, its.sent_head, received_rse))
            # A rank's part has each key once, so sums are always made in the order of ranks.
            for token, head, part_rse in zip(*sent, strict=True):
                dkeys_Tsje[token, :, head] += part_rse

        return add_to


class _Group:
    """What goes and comes for some heads of keys.

    Attributes:
        heads: The heads.
        sent_token: The token of each key that goes, rank by rank and head by head.
        sent_head: The head of each.
        came: The place among the heads' tokens of each key that comes, in the same order.
    """

    def __init__(self, heads: range, sent_token: torch.Tensor, sent_head: torch.Tensor, came: torch.Tensor) -> None:
        self.heads, self.sent_token, self.sent_head, self.came = heads, sent_token, sent_head, came

    @classmethod
    def of(cls, goes_cjt: torch.Tensor, from_jN: torch.Tensor, heads: range, own_T: torch.Tensor) -> "_Group":
        """What goes and comes for ``heads``.

        Args:
            goes_cjt: Whether each rank sees each of this rank's keys.
            from_jN: The rank that each key comes from; −1 for keys that this rank has or does not see.
            heads: The heads.
            own_T: Which of the rank's tokens ``t`` are.
        """
        _, sent_head, sent = goes_cjt[:, _slice(heads)].nonzero().unbind(1)
        from_iN = from_jN[_slice(heads)].flatten()
        came = (from_iN >= 0).nonzero().flatten()
        return cls(heads, own_T[sent], sent_head + heads.start, came[from_iN[came].argsort(stable=True)])


def _asked(
    document: LongDocument, lines: Sequence[Lines], key_heads: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Whether each rank sees each of this rank's keys, ``[c, j, t]``, and which rank sends it each key, ``[j, m]``."""
    ranks, blocks = document.has_cn.shape
    share, device = len(lines) // key_heads, document.rank_m.device
    has_cn = pad(document.has_cn, (0, blocks))  # a slash can reach past the end
    number_n, place_m = torch.arange(blocks, device=device), torch.arange(document.tokens, device=device)
    last_c = (document.has_cn * (number_n + 1)).amax(dim=1) - 1
    goes_cjt = torch.zeros(ranks, key_heads, len(document.place_t), dtype=torch.bool, device=device)
    comes_jm = torch.zeros(key_heads, document.tokens, dtype=torch.bool, device=device)
    own_b = document.slot_t // BLOCK
    for head, of_head in enumerate(lines):
        is_vertical_m = torch.zeros_like(place_m, dtype=torch.bool).index_fill_(0, of_head.verticals, True)
        by_slash_cb = has_cn[:, document.block_b.unsqueeze(1) + of_head.slashes].any(dim=2)
        vertical_ct = is_vertical_m[document.place_t] & (document.place_t // BLOCK <= last_c.unsqueeze(1))
        goes_cjt[:, head // share] |= by_slash_cb[:, own_b] | vertical_ct
        by_slash_n = has_cn[rank, number_n.unsqueeze(1) + of_head.slashes].any(dim=1)
        vertical_m = is_vertical_m & (place_m // BLOCK <= last_c[rank])
        comes_jm[head // share] |= by_slash_n[place_m // BLOCK] | vertical_m
    goes_cjt[rank] = False
    return goes_cjt, document.rank_m.masked_fill(~comes_jm | (document.rank_m == rank), -1)


def _slice(heads: range) -> slice:
    return slice(heads.start, heads.stop)


def _range(rows: slice, device: torch.device) -> torch.Tensor:
    return torch.arange(rows.start, rows.stop, device=device)


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
