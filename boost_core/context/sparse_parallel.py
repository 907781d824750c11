"""Attention over context parallel ranks, sparse for long documents: only the keys that are seen are sent.

Short documents are attended to as the plan says. For long ones, each layer's heads choose what is seen, all ranks
together; then the keys that a rank's queries see arrive, some heads of keys at a time, while those before are attended
to. All that a query sees is there at once, so nothing has to be combined by log-sum-exps. The forward pass keeps the
lines; in the backward pass the same keys come again, and their gradients go back to their owners.

Shape suffixes: T tokens of the rank; d documents; of a document m tokens, n blocks of k = 64 of them, t tokens that the
rank has and b blocks that contain these; p queries that choose what is seen, or by which recall is measured; N tokens
of all documents' blocks; c ranks; h heads, j heads of keys, i of a group's heads of keys, e head size; r keys sent or
received; s = 2, keys and values.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.nn.functional import pad

from boost_core.config.model import BLOCK, LAST_QUERIES, SAMPLED_QUERIES, SparseAttentionConfig
from boost_core.context import sparse
from boost_core.context.attention import Arrivals, Attended, ContextAttention, LayerAttention, Pending, SentGradients
from boost_core.context.exchange import start_rows
from boost_core.context.plan import ContextPlan
from boost_core.context.selection import head_groups
from boost_core.parallel.communicator import Communicator


class LongDocument(NamedTuple):
    """One document.

    Attributes:
        tokens: Number of its tokens.
        blocks: Number of its blocks, the last of which may not be full.
        begin: Where its tokens begin among the blocks of all such documents.
        rows: The document's tokens among the rank's own, where they are consecutive.
        places: The places of each rank's tokens.
        place_t: The places of the rank's tokens in the document.
        rank_m: The rank that has each token.
        has_cn: Whether each rank has a token of each block.
        block_b: The rank's blocks.
        slot_t: Where the rank's tokens are in its blocks, block by block.
        row_p: The places of the last queries, and of those by which recall is measured.
        local_q: Which of these the rank has.
        local_row_q: Where they are among the rank's tokens.
    """

    tokens: int
    blocks: int
    begin: int
    rows: slice
    places: Sequence[torch.Tensor]
    place_t: torch.Tensor
    rank_m: torch.Tensor
    has_cn: torch.Tensor
    block_b: torch.Tensor
    slot_t: torch.Tensor
    row_p: torch.Tensor
    local_q: torch.Tensor
    local_row_q: torch.Tensor

    def in_blocks(self, x_te: torch.Tensor, fill: float = 0) -> torch.Tensor:
        """Values of the rank's tokens in the document's blocks, ``[b, k, …]``; ``fill`` in others' places.

        The inverse, ``[t, …]``, is ``x_bke.flatten(0, 1)[slot_t]``.
        """
        filled = x_te.new_full((len(self.block_b) * BLOCK, *x_te.shape[1:]), fill)
        filled[self.slot_t] = x_te
        return filled.view(-1, BLOCK, *x_te.shape[1:])


HeadsLines = Sequence[Sequence[sparse.Lines]]  # of each document, what each head's queries see

_LAST, _SAMPLED = slice(0, LAST_QUERIES), slice(LAST_QUERIES, LAST_QUERIES + SAMPLED_QUERIES)
_BITS = 8  # of a byte


@dataclass(frozen=True)
class SparseIndex:
    """Chooses what the queries of a plan's long documents see, all ranks of the group together.

    All ranks get the last queries of each document and score the keys that they have. Softmax's denominators are summed
    in integers, so that each key's share is bit-identical to what one rank alone would compute; the sums of each
    document and head go to one rank, in turns, which chooses as a single rank would; and all receive what was chosen,
    one bit per line. What is sent is 96 queries per document, two numbers for each of them and head, one or two numbers
    per token and head, and a bit per token and head to all: little compared with the keys.

    Attributes:
        documents: The long documents, as the rank has them.
        how: What is always seen, and how much more may be.
        communicator: The context parallel group.
    """

    documents: Sequence[LongDocument]
    how: SparseAttentionConfig
    communicator: Communicator

    def find(self, query_The: torch.Tensor, key_Tje: torch.Tensor, tally: sparse.Tally) -> HeadsLines:
        """What each head's queries see, for each document; all ranks call it, and all get the same."""
        device, heads = query_The.device, query_The.shape[1]
        # The queries with which every rank scores its keys.
        query_dphe = query_The.new_zeros(len(self.documents), LAST_QUERIES + SAMPLED_QUERIES, *query_The.shape[1:])
        for document, query_phe in zip(self.documents, query_dphe, strict=True):
            query_phe[document.local_q] = query_The[document.local_row_q]
        self.communicator.all_reduce_(query_dphe, "last queries")
        scores = partial(self._scores, query_dphe, key_Tje)

        # Softmax's maxima and denominators over all ranks' keys.
        shape = len(self.documents), heads, LAST_QUERIES + SAMPLED_QUERIES
        dtype = torch.promote_types(key_Tje.dtype, torch.float32)
        most_dhp = torch.full(shape, -torch.inf, dtype=dtype, device=device)
        for at, which, score_bkp in scores(_LAST, _SAMPLED):
            most_dhp[at][which] = score_bkp.amax(dim=(0, 1))
        self.communicator.all_reduce_(most_dhp, "largest scores", dist.ReduceOp.MAX)
        sum_dhp = torch.zeros(shape, dtype=torch.int64, device=device)
        for at, which, score_bkp in scores(_LAST, _SAMPLED):
            # As integers: the total is the same whichever ranks' sums are added.
            sum_dhp[at][which] = sparse.fixed_point((score_bkp - most_dhp[at][which]).exp_()).sum(dim=(0, 1))
        self.communicator.all_reduce_(sum_dhp, "sums of scores")

        masses: dict[tuple[int, int], torch.Tensor] = {}
        for at, _, score_bkp in scores(_LAST):
            document = self.documents[at[0]]
            mass_bkt = sparse.mass_of_blocks(score_bkp, most_dhp[at][_LAST], sum_dhp[at][_LAST], document.tokens)
            masses[at] = mass_bkt.flatten(1)[:, document.slot_t]
        chosen = self._choose(masses, heads, dtype)
        del masses

        # How much of the sampled queries' attention that keeps.
        kept_d = torch.zeros(len(self.documents), dtype=torch.float64, device=device)
        for (number, head), _, score_bkp in scores(_SAMPLED):
            document = self.documents[number]
            share_bkp = sparse.shares(score_bkp, most_dhp[number, head, _SAMPLED], sum_dhp[number, head, _SAMPLED])
            sees_pm = chosen[number][head].sees(document.row_p[_SAMPLED])
            kept_d[number] += (share_bkp.flatten(0, 1)[document.slot_t].T * sees_pm[:, document.place_t]).sum()
        self.communicator.all_reduce_(kept_d, "kept attention")
        for document, kept, of_heads in zip(self.documents, kept_d, chosen, strict=True):
            tally.count(document.tokens, of_heads, kept)
        return chosen

    def _scores(
        self, query_dphe: torch.Tensor, key_Tje: torch.Tensor, *parts: slice
    ) -> Iterator[tuple[tuple[int, int], slice, torch.Tensor]]:
        """Scores of each document, head and part of the queries with this rank's keys, ``[b, k, p]``.

        Documents without keys on this rank are left out.
        """
        dtype, share = torch.promote_types(key_Tje.dtype, torch.float32), query_dphe.shape[2] // key_Tje.shape[1]
        for number, document in enumerate(self.documents):
            if not len(document.place_t):
                continue
            place_bk = document.in_blocks(document.place_t, document.tokens)  # others' keys are in no one's past
            for key_head in range(key_Tje.shape[1]):
                key_bke = document.in_blocks(key_Tje[document.rows, key_head].to(dtype))
                for head in range(key_head * share, (key_head + 1) * share):
                    query_pe = query_dphe[number, :, head].to(dtype)
                    for part in parts:
                        score_bkp = sparse.scores_of_blocks(query_pe[part], key_bke, place_bk, document.row_p[part])
                        yield (number, head), part, score_bkp

    def _choose(self, masses: Mapping[tuple[int, int], torch.Tensor], heads: int, dtype: torch.dtype) -> HeadsLines:
        """Choose the lines of every document and head; a call of its own, whose memory is free when recall is measured.

        Each rank chooses for some documents and heads, by the sums of attention that all ranks send it.

        Args:
            masses: The attention to this rank's keys by document and head, ``[b, t]``, where it has some.
            heads: Number of heads h.
            dtype: The type of ``masses``, of which a rank may have none.
        """
        device, ranks = self.documents[0].place_t.device, self.communicator.size
        goes: list[list[torch.Tensor]] = [[] for _ in range(ranks)]
        for (number, head), mass_bt in masses.items():
            goes[(number * heads + head) % ranks].append(mass_bt.flatten())
        mine = range(self.communicator.rank, len(self.documents) * heads, ranks)
        last_blocks_of = [
            torch.arange((each.tokens - LAST_QUERIES) // BLOCK, each.blocks, device=device) for each in self.documents
        ]
        chosen_here = [(self.documents[each // heads], last_blocks_of[each // heads]) for each in mine]
        comes = [sum(len(last_b) * len(its.places[rank]) for its, last_b in chosen_here) for rank in range(ranks)]
        parts = [part for to_rank in goes for part in to_rank]
        payload = torch.cat(parts) if parts else torch.empty(0, dtype=dtype, device=device)
        sizes = [sum(len(part) for part in to_rank) for to_rank in goes]
        received = start_rows(self.communicator, payload, sizes, comes, "sums of keys")()

        # The lines of all documents and heads, one bit per line: slashes first, then verticals.
        bytes_of = [-(-(document.blocks + document.tokens) // _BITS) for document in self.documents]
        packed = torch.zeros(sum(bytes_of) * heads, dtype=torch.uint8, device=device)
        packed_of = torch.split(packed, [size for size in bytes_of for _ in range(heads)])
        weight = 2 ** torch.arange(_BITS, dtype=torch.uint8, device=device)
        rest = list(torch.split(received, comes))
        for each, (document, last_b) in zip(mine, chosen_here, strict=True):
            mass_bm = received.new_empty(len(last_b), document.tokens)
            for rank, places in enumerate(document.places):
                count = len(last_b) * len(places)
                mass_bm[:, places] = rest[rank][:count].view(len(last_b), -1)
                rest[rank] = rest[rank][count:]
            lines = sparse.choose_lines(mass_bm, last_b, document.tokens, self.how)
            is_line = lines.slashes.new_zeros(len(packed_of[each]) * _BITS, dtype=torch.uint8)
            is_line[lines.slashes] = 1
            is_line[lines.blocks + lines.verticals] = 1
            packed_of[each].copy_((is_line.view(-1, _BITS) * weight).sum(dim=1))
        self.communicator.all_reduce_(packed, "lines")

        chosen: list[list[sparse.Lines]] = [[] for _ in self.documents]
        for each, bits in enumerate(packed_of):
            document, is_bit = self.documents[each // heads], bits.unsqueeze(1).bitwise_and(weight).flatten() != 0
            slashes, verticals = (part.nonzero().flatten() for part in is_bit.tensor_split([document.blocks]))
            chosen[each // heads].append(sparse.Lines(document.tokens, slashes, verticals))
        return chosen


class ActiveKeys:
    """Sends the keys that ranks see of each other's under the lines of all heads, and no others; returns gradients.

    A key and value of one head is sent to a rank if a query of the rank's blocks sees it with one of the heads that
    share it. Every rank knows the lines of all heads and who has which tokens, so each knows by itself what to send and
    receive. The counts are read from the device once per layer and pass.

    Args:
        documents: The documents, as the rank has them.
        lines: What each head's queries see of each document.
        key_heads: Number of heads of keys and values.
        communicator: The context parallel group.
    """

    def __init__(
        self, documents: Sequence[LongDocument], lines: HeadsLines, key_heads: int, communicator: Communicator,
    ) -> None:  # fmt: skip
        self._communicator, ranks = communicator, range(communicator.size)
        self._tokens = sum(document.blocks for document in documents) * BLOCK
        goes, comes, local_T, local_N = list[torch.Tensor](), list[torch.Tensor](), [], []
        for document, of_heads in zip(documents, lines, strict=True):
            device, blocks, share = document.rank_m.device, document.blocks, len(of_heads) // key_heads
            local_T.append(torch.arange(document.rows.start, document.rows.stop, device=device))
            local_N.append(document.begin + document.place_t)
            has_cn = pad(document.has_cn, (0, blocks))  # a slash can reach past the end
            number_n, place_m = torch.arange(blocks, device=device), torch.arange(document.tokens, device=device)
            last_c = (document.has_cn * (number_n + 1)).amax(dim=1) - 1
            # Whether each rank sees each of this rank's keys, and whether this rank sees each key.
            goes_cjt = torch.zeros(len(ranks), key_heads, len(document.place_t), dtype=torch.bool, device=device)
            sees_jm = torch.zeros(key_heads, document.tokens, dtype=torch.bool, device=device)
            local_b = document.slot_t // BLOCK
            for head, of_head in enumerate(of_heads):
                is_vertical_m = torch.zeros_like(place_m, dtype=torch.bool).index_fill_(0, of_head.verticals, True)
                by_slash_cb = has_cn[:, document.block_b.unsqueeze(1) + of_head.slashes].any(dim=2)
                vertical_ct = is_vertical_m[document.place_t] & (document.place_t // BLOCK <= last_c.unsqueeze(1))
                goes_cjt[:, head // share] |= by_slash_cb[:, local_b] | vertical_ct
                reach_bs = document.block_b.unsqueeze(1) - of_head.slashes + blocks  # those before the document, too
                by_slash_n = has_cn.new_zeros(2 * blocks).index_fill_(0, reach_bs.flatten(), True)[blocks:]
                vertical_m = is_vertical_m & (place_m // BLOCK <= last_c[communicator.rank])
                sees_jm[head // share] |= by_slash_n[place_m // BLOCK] | vertical_m
            goes_cjt[communicator.rank] = False
            goes.append(goes_cjt)
            # The rank that each key comes from; −1 for keys that this rank has or does not see.
            from_jm = document.rank_m.masked_fill(~sees_jm | (document.rank_m == communicator.rank), -1)
            comes.append(pad(from_jm, (0, -document.tokens % BLOCK), value=-1))
        self._local_T, self._local_N = torch.cat(local_T), torch.cat(local_N)
        goes_cjT, from_jN = torch.cat(goes, dim=2), torch.cat(comes, dim=1)

        self._groups, counts = [], []
        rank_c1 = torch.arange(len(ranks), device=from_jN.device).unsqueeze(1)
        for heads in head_groups(key_heads):
            goes_ciT, from_iN = goes_cjT[:, heads.start : heads.stop], from_jN[heads.start : heads.stop].flatten()
            _, sent_head, sent = goes_ciT.nonzero().unbind(1)
            came = (from_iN >= 0).nonzero().flatten()
            came = came[from_iN[came].argsort(stable=True)]
            self._groups.append(_Group(heads, self._local_T[sent], sent_head + heads.start, came))
            counts.append(torch.stack([goes_ciT.sum(dim=(1, 2)), (from_iN == rank_c1).sum(dim=1)]))
        self._counts: Sequence[Sequence[list[int]]] = torch.stack(counts).tolist()

    def arriving(self, keys_Tsje: torch.Tensor) -> Iterator[torch.Tensor]:
        """The keys and values of each group of heads, while the next group's are in flight.

        They are in the documents' blocks, ``[i, N, s, e]``: zeros where none of this rank's queries sees a key.
        """
        started = (  # when it is asked for
            start_rows(self._communicator, keys_Tsje[its.sent_token, :, its.sent_head], goes, comes, "keys")
            for its, (goes, comes) in zip(self._groups, self._counts, strict=True)
        )
        receive = next(started)
        for its in self._groups:
            heads = slice(its.heads.start, its.heads.stop)
            keys_iNse = keys_Tsje.new_zeros(len(its.heads), self._tokens, *keys_Tsje[0, :, 0].shape)
            keys_iNse[:, self._local_N] = keys_Tsje[self._local_T][:, :, heads].permute(2, 0, 1, 3)
            keys_iNse.flatten(0, 1).index_copy_(0, its.came, receive())
            receive = next(started, receive)
            yield keys_iNse

    def start_back(self, dkeys_iNse: torch.Tensor, group: int, dtype: torch.dtype) -> Callable[[torch.Tensor], None]:
        """Start to return gradients; the returned function waits, and adds this rank's own up in a fixed order."""
        its, (goes, comes) = self._groups[group], self._counts[group]
        payload_rse = dkeys_iNse.flatten(0, 1)[its.came].to(dtype)
        receive = start_rows(self._communicator, payload_rse, comes, goes, "key gradients")
        local_Tsie = dkeys_iNse[:, self._local_N].permute(1, 2, 0, 3)

        def add_to(dkeys_Tsje: torch.Tensor) -> None:
            for number, head in enumerate(its.heads):
                dkeys_Tsje[:, :, head].index_add_(0, self._local_T, local_Tsie[:, :, number])
            sent = (torch.split(x, goes) for x in (its.sent_token, its.sent_head, receive()))
            # A rank's part has each key once, so sums are always made in the order of ranks.
            for token, head, part_rse in zip(*sent, strict=True):
                dkeys_Tsje[token, :, head] += part_rse

        return add_to


class _Group(NamedTuple):
    """What is sent and received for some heads of keys.

    Attributes:
        heads: The heads.
        sent_token: The token of each key sent, rank by rank and head by head.
        sent_head: The head of each.
        came: The place among the heads' tokens of each key received, in the same order.
    """

    heads: range
    sent_token: torch.Tensor
    sent_head: torch.Tensor
    came: torch.Tensor


class SparseContextAttention(ContextAttention):
    """Causal attention of documents whose tokens a plan partitions over ranks, sparse where its window says so.

    Args:
        plan: The plan, the same on all ranks.
        how: What the queries of long documents see.
        communicator: The context parallel group.
        device: Where this rank's tokens are.
        tally: Counts the attention kept over all micro-batches of a step.
    """

    def __init__(
        self, plan: ContextPlan, how: SparseAttentionConfig, communicator: Communicator, device: torch.device,
        tally: sparse.Tally,
    ) -> None:  # fmt: skip
        super().__init__(plan, communicator, device)
        # The documents of the plan that use sparse attention, in order.
        window, rank = plan.window, communicator.rank
        rank_T = torch.tensor(plan.placement).repeat_interleave(window.chunk_tokens)
        before_T = (rank_T == rank).cumsum(0)  # of the rank's tokens, up to each
        self._documents, begin = list[LongDocument](), 0
        for tokens, end in zip(window.documents, accumulate(window.documents), strict=True):
            if not window.is_sparse(tokens):
                continue
            rank_m, place_m = rank_T[end - tokens : end], torch.arange(tokens)
            has_cn = torch.zeros(plan.ranks, -(-tokens // BLOCK), dtype=torch.bool)
            has_cn[rank_m, place_m // BLOCK] = True
            place_t, block_b = place_m[rank_m == rank], has_cn[rank].nonzero().flatten()
            first = int(before_T[end - tokens - 1]) if end > tokens else 0
            row_p = torch.cat([place_m[-LAST_QUERIES:], sparse.sampled_rows(tokens, place_m.device)])
            local_q = (rank_m[row_p] == rank).nonzero().flatten()
            slot_t = torch.searchsorted(block_b, place_t // BLOCK) * BLOCK + place_t % BLOCK
            local_row_q = first + torch.searchsorted(place_t, row_p[local_q])
            rows, places = slice(first, first + len(place_t)), [place_m[rank_m == each] for each in range(plan.ranks)]
            on_host = place_t, rank_m, has_cn, block_b, slot_t, row_p, local_q, local_row_q
            tensors, of_ranks = ([x.to(device) for x in each] for each in (on_host, places))
            self._documents.append(LongDocument(tokens, has_cn.shape[1], begin, rows, of_ranks, *tensors))
            begin += self._documents[-1].blocks * BLOCK
        self._index, self._tally = SparseIndex(self._documents, how, communicator), tally
        self._communicator = communicator
        self._lines: HeadsLines | None = None

    def for_layer(self) -> LayerAttention:
        """Return what a layer calls, over a copy that keeps what its queries see."""
        of_layer = copy(self)
        of_layer._lines = None
        return LayerAttention(of_layer)

    def forward(self, keys: Arrivals) -> Attended:
        """As in ``ContextAttention``; by the lines of the first call."""
        local, attended = keys.local, super().forward(keys)
        out_The, lse_Th = attended.out, attended.lse
        if not self._documents:
            return attended
        if self._lines is None:
            self._lines = self._index.find(local.query, local.keys[:, 0], self._tally)
        key_heads = local.keys.shape[2]
        active = ActiveKeys(self._documents, self._lines, key_heads, self._communicator)
        for group, keys_iNse in enumerate(active.arriving(local.keys)):
            for document, head, head_keys, _, _ in self._heads(key_heads, group, keys_iNse, lse_Th.dtype):
                query_bke = document.in_blocks(local.query[document.rows, head].to(lse_Th.dtype))
                out_bke, lse_bk = sparse.head_forward(query_bke, head_keys)
                out_The[document.rows, head] = out_bke.flatten(0, 1)[document.slot_t].to(out_The.dtype)
                lse_Th[document.rows, head] = lse_bk.flatten()[document.slot_t]
        return attended

    def backward(
        self, keys: Arrivals, attended: Attended, dout_The: torch.Tensor, dlatent: Pending | None
    ) -> tuple[torch.Tensor, SentGradients]:
        """Gradients of the queries, and of what the rank sent to others."""
        dquery_The, returning = super().backward(keys, attended, dout_The, dlatent)
        if self._lines is None:
            return dquery_The, returning
        local, gradients = keys.local, returning.gradients
        dtype, inputs = attended.lse.dtype, (local.query, dout_The, attended.lse)
        for add in returning.adds:
            add()
        key_heads, adds = local.keys.shape[2], list[Callable[[], None]]()
        active = ActiveKeys(self._documents, self._lines, key_heads, self._communicator)
        for group, keys_iNse in enumerate(active.arriving(local.keys)):
            dkeys_iNse = torch.zeros_like(keys_iNse, dtype=dtype)
            for document, head, head_keys, number, where in self._heads(key_heads, group, keys_iNse, dtype):
                query_bke, dout_bke, lse_bk = (document.in_blocks(x[document.rows, head].to(dtype)) for x in inputs)
                dkeys_mse = dkeys_iNse[number, where]
                dkey_nke, dvalue_nke = dkeys_mse.view(-1, BLOCK, *dkeys_mse.shape[1:]).unbind(2)
                dquery_bke = sparse.head_backward(query_bke, dout_bke, lse_bk, head_keys, dkey_nke, dvalue_nke)
                dquery_The[document.rows, head] = dquery_bke.flatten(0, 1)[document.slot_t].to(dquery_The.dtype)
            for add in adds:
                add()
            adds = [partial(active.start_back(dkeys_iNse, group, local.keys.dtype), gradients.keys)]
        return dquery_The, SentGradients(gradients, adds)

    def _heads(
        self, key_heads: int, group: int, keys_iNse: torch.Tensor, dtype: torch.dtype
    ) -> Iterator[tuple[LongDocument, int, sparse.HeadKeys, int, slice]]:
        """Each document with tokens on this rank and head of queries of a group, and the keys that it attends to.

        Besides, the number of its head of keys in the group, and the document's tokens among those of all documents.
        """
        for number, key_head in enumerate(head_groups(key_heads)[group]):
            for document, of_heads in zip(self._documents, self._lines or (), strict=True):
                if not len(document.place_t):
                    continue
                share = len(of_heads) // key_heads
                where = slice(document.begin, document.begin + document.blocks * BLOCK)
                keys_mse = keys_iNse[number, where].to(dtype)
                key_nke, value_nke = keys_mse.view(-1, BLOCK, *keys_mse.shape[1:]).unbind(2)
                for head in range(key_head * share, (key_head + 1) * share):
                    keys = sparse.HeadKeys(key_nke, value_nke, of_heads[head], document.block_b)
                    yield document, head, keys, number, where
