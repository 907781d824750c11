"""Attention of a micro-batch's documents, sparse in the long ones.

What a document's queries see is chosen in the forward pass, and kept for recomputation in the backward pass:
a second choice could come out differently, and the gradients would be those of another mask.

Which keys the queries of a document see: verticals, keys that all see, and slashes, distances at which all see. Rotary
embeddings give attention this form, and gradients have it, too. So the last queries speak for all: their attention to
every key, summed by column, says what a vertical would keep, and by diagonal, what a slash would. Slashes are whole
blocks: slash D is the blocks of keys that lie D blocks before their queries' own, so its sum is that of the last
queries' attention in such blocks. Slash 0, the queries' own block, is causal; a few more, for nearby keys, and the
first keys, the attention sinks, are always included.

Attention under its heads' lines is exactly dense attention with that mask, from visible keys alone. A head's queries go
in runs of blocks. The keys of a run's slashes are gathered block by block; verticals are one product for the whole run,
in which those already covered by a slash, or not in the past, are masked. Two products of each kind forward and five
backward, so the arithmetic grows with the number of visible blocks. Scores and sums are in fp32 at least. As in dense
attention, inputs and log-sum-exps are saved for the backward pass, and also the lines.

Shape suffixes: T tokens, h heads, j heads of keys and values, e head size; m tokens of a document, n = ⌈m/64⌉ blocks of
k = 64; p of the last queries, b blocks that contain them; l = n + m lines, slashes and then verticals; of a run: i
blocks of queries, s slashes, v verticals, c = 64·s + v keys of each block of queries.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import Any, NamedTuple

import torch
from torch.nn.functional import pad

from boost_core.config.model import BLOCK, LAST_QUERIES, RUN_SCORES, SAMPLED_QUERIES, SparseAttentionConfig
from boost_core.model.attention import attention_within

_HIDDEN = float("-inf")
_ONE = float(1 << 42)  # in fixed point


class Lines(NamedTuple):
    """What a head's queries see of one document.

    A query sees a key of its own past if the distance of their blocks is a slash, or if the key is a vertical.

    Attributes:
        tokens: Tokens of the document.
        slashes: Distances in blocks, ascending from 0.
        verticals: Positions of keys, ascending.
    """

    tokens: int
    slashes: torch.Tensor
    verticals: torch.Tensor

    @property
    def blocks(self) -> int:
        """Number of blocks in the document, the last of which may not be full."""
        return -(-self.tokens // BLOCK)

    def is_slash(self) -> torch.Tensor:
        """Return whether each distance in blocks is a slash, ``[n]``."""
        return self.slashes.new_zeros(self.blocks, dtype=torch.bool).index_fill_(0, self.slashes, True)

    def sees(self, rows: torch.Tensor) -> torch.Tensor:
        """Return whether queries at some positions see each key, ``[rows, m]``."""
        place_m = torch.arange(self.tokens, device=rows.device)
        distance = rows.unsqueeze(1) // BLOCK - place_m // BLOCK
        seen = self.is_slash()[distance.clamp(min=0)]
        seen |= torch.zeros_like(place_m, dtype=torch.bool).index_fill_(0, self.verticals, True)
        return seen & (place_m <= rows.unsqueeze(1))

    def pairs(self) -> torch.Tensor:
        """Return the number of visible query-key pairs; one element."""
        tokens, blocks = self.tokens, self.blocks
        rest = blocks * BLOCK - tokens  # missing from the last block
        by_own_blocks = (tokens * (BLOCK + 1) - (BLOCK - rest) * rest) // 2
        by_slashes = (BLOCK * (tokens - BLOCK * self.slashes[1:])).sum()
        block = self.verticals // BLOCK
        covered = torch.searchsorted(self.slashes, blocks - 1 - block, right=True)
        rows = tokens - BLOCK * (block + covered)
        rows += rest * self.is_slash()[blocks - 1 - block]  # of the last block, if it is among those
        return by_own_blocks + by_slashes + rows.sum()


def find_lines(query_mhe: torch.Tensor, key_mje: torch.Tensor, how: SparseAttentionConfig) -> list[Lines]:
    """Choose what each head's queries see of a document.

    Args:
        query_mhe: The rotated queries; h is a multiple of j.
        key_mje: The rotated keys.
        how: What is always seen, and how much more may be.
    """
    device, tokens, share = key_mje.device, len(key_mje), query_mhe.shape[1] // key_mje.shape[1]
    dtype = torch.promote_types(query_mhe.dtype, torch.float32)
    last_phe, blocks = query_mhe[-LAST_QUERIES:], -(-tokens // BLOCK)
    last_b = torch.arange((tokens - LAST_QUERIES) // BLOCK, blocks, device=device)  # that contain the last queries
    row_p = torch.arange(tokens - len(last_phe), tokens, device=device)
    lines = []
    for head in range(query_mhe.shape[1]):
        key_nke = in_blocks(key_mje[:, head // share], dtype)
        place_nk = torch.arange(len(key_nke) * BLOCK, device=device).view(-1, BLOCK)
        score_nkp = scores_of_blocks(last_phe[:, head].to(dtype), key_nke, place_nk, row_p)
        most_p = score_nkp.amax(dim=(0, 1))
        sum_p = fixed_point((score_nkp - most_p).exp_()).sum(dim=(0, 1))  # softmax's divisors
        mass_bnk = mass_of_blocks(score_nkp, most_p, sum_p, tokens)
        lines.append(choose_lines(mass_bnk.flatten(1)[:, :tokens], last_b, tokens, how))
    return lines


def in_blocks(x_me: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Blocks of a document's tokens, ``[n, k, e]``, the last one padded with zeros, which no token sees."""
    return pad(x_me.to(dtype), (0, 0, 0, -len(x_me) % BLOCK)).view(-1, BLOCK, x_me.shape[1])


def scores_of_blocks(
    query_pe: torch.Tensor, key_nke: torch.Tensor, place_nk: torch.Tensor, row_p: torch.Tensor
) -> torch.Tensor:
    """Scores of queries at some positions against keys, ``[n, k, p]``: −∞ for what is not in a query's past.

    Each block is a product of its own, all of one shape: a key's score is bit-identical whichever blocks come with it.
    """
    scaled_ep = (query_pe * query_pe.shape[-1] ** -0.5).T
    score_nkp = torch.bmm(key_nke, scaled_ep.expand(len(key_nke), -1, -1))
    return score_nkp.masked_fill_(place_nk.unsqueeze(2) > row_p, _HIDDEN)


def mass_of_blocks(score_nkp: torch.Tensor, most_p: torch.Tensor, sum_p: torch.Tensor, tokens: int) -> torch.Tensor:
    """Attention of a document's last queries to each key, summed over the queries of each block, ``[b, n, k]``.

    Args:
        score_nkp: Their scores.
        most_p: The largest score of each query.
        sum_p: Each query's divisor in softmax over all keys, in ``fixed_point``.
        tokens: Tokens of the document.
    """
    share_nkp = fixed_point(shares(score_nkp, most_p, sum_p))
    before = min((BLOCK - (tokens - LAST_QUERIES) % BLOCK), LAST_QUERIES)  # those of the first block
    parts = [part for part in share_nkp.tensor_split([before], dim=2) if part.shape[2]]
    return torch.stack([part.sum(dim=2).to(score_nkp.dtype) / _ONE for part in parts])


def shares(score_nkp: torch.Tensor, most_p: torch.Tensor, sum_p: torch.Tensor) -> torch.Tensor:
    """Softmax of scores, given its maxima and divisors over all keys."""
    return (score_nkp - most_p).exp_().div_(sum_p.to(score_nkp.dtype) / _ONE)


def fixed_point(x: torch.Tensor) -> torch.Tensor:
    """Convert numbers up to 1 to integers, a million of which fit in 63 bits: their sum is independent of its order."""
    return (x * _ONE).to(torch.int64)


def attention_of_rows(query_pe: torch.Tensor, key_me: torch.Tensor, row_p: torch.Tensor) -> torch.Tensor:
    """Dense causal attention of queries at some positions, ``[p, m]``."""
    score_pm: torch.Tensor = (query_pe * query_pe.shape[-1] ** -0.5) @ key_me.T
    place_m = torch.arange(len(key_me), device=key_me.device)
    return score_pm.masked_fill_(place_m > row_p.unsqueeze(1), _HIDDEN).softmax(dim=-1)


def choose_lines(mass_bm: torch.Tensor, block_b: torch.Tensor, tokens: int, how: SparseAttentionConfig) -> Lines:
    """Choose the lines that keep most for the pairs they add, until enough is kept or the budget is used up.

    A line's worth is its sum per pair that it adds; ties are broken by distance, and then by position.

    Args:
        mass_bm: Attention of the last queries of each block to each key.
        block_b: These blocks.
        tokens: Tokens of the document, m.
        how: The budget, and what is always seen.
    """
    device, blocks, near = mass_bm.device, -(-tokens // BLOCK), how.near_blocks
    place_m = torch.arange(tokens, device=device)
    distance_bm = block_b.unsqueeze(1) - place_m // BLOCK
    always_bm = (distance_bm < near) | (place_m < how.sink)
    missing = how.mass * mass_bm.sum(dtype=torch.float64) - mass_bm[always_bm].sum(dtype=torch.float64)
    rest_bm = mass_bm.masked_fill(always_bm, 0.0)

    slash_n = rest_bm.new_zeros(blocks)
    for of_block_m, distance_m in zip(rest_bm, distance_bm, strict=True):
        by_block_n = pad(of_block_m, (0, blocks * BLOCK - tokens)).view(blocks, BLOCK).sum(dim=1)
        slash_n[: int(distance_m[0]) + 1] += by_block_n[: int(distance_m[0]) + 1].flip(0)
    mass_l = torch.cat([slash_n, rest_bm.sum(dim=0)])
    worth_l = torch.cat([slash_n / BLOCK, mass_l[blocks:]])
    distance_n = torch.arange(blocks, device=device)
    pairs_l = torch.cat([BLOCK * (tokens - BLOCK * distance_n), tokens - BLOCK * (place_m // BLOCK + near)])

    order_l = worth_l.argsort(descending=True, stable=True)
    order_l = order_l[worth_l[order_l] > 0]
    room = how.pairs(tokens) - how.always_pairs(tokens)
    chosen = order_l[: _fitting(mass_l[order_l], pairs_l[order_l], missing, room)]
    # A slash that no longer fits leaves room for verticals.
    rest = order_l[len(chosen) :]
    rest = rest[rest >= blocks]
    missing, room = missing - mass_l[chosen].sum(dtype=torch.float64), room - int(pairs_l[chosen].sum())
    chosen = torch.cat([chosen, rest[: _fitting(mass_l[rest], pairs_l[rest], missing, room)]])

    slashes = torch.cat([distance_n[:near], chosen[chosen < blocks].sort().values])
    verticals = torch.cat([place_m[: how.sink], chosen[chosen >= blocks].sort().values - blocks])
    return Lines(tokens, slashes, verticals)


def _fitting(mass_l: torch.Tensor, pairs_l: torch.Tensor, missing: torch.Tensor, room: int) -> int:
    """Return how many lines, in order, are needed to keep the missing mass, as far as there is room for them."""
    before_l = mass_l.cumsum(0, dtype=torch.float64) - mass_l
    return int(((pairs_l.cumsum(0) <= room) & (before_l < missing)).sum())


_RUNS = 8  # at least, if a document has that many blocks: runs of few blocks waste less on slashes that begin later


class _Run(NamedTuple):
    """Consecutive blocks of queries of one head.

    Attributes:
        queries: The indices of its blocks.
        block_is: For each block, the key blocks that its slashes reach, ``[i, s]``; the first where there is none.
        nothing_is: Whether there is none.
        verticals: How many of the head's verticals, counted from the first, may be in the past of some query.
        hidden_iv: Which of these a block's slashes already cover, or are not in its past.
    """

    queries: slice
    block_is: torch.Tensor
    nothing_is: torch.Tensor
    verticals: int
    hidden_iv: torch.Tensor


class HeadKeys:
    """Keys and values of one head of a document, for one head of queries.

    Args:
        key_nke: Blocks of keys, the last one padded.
        value_nke: The same for values.
        lines: Which of them are seen.
        block_n: The blocks of the document whose queries attend to them, in order; ``None`` for all.
    """

    def __init__(
        self, key_nke: torch.Tensor, value_nke: torch.Tensor, lines: Lines, block_n: torch.Tensor | None = None
    ) -> None:
        self._of_queries_n = torch.arange(lines.blocks, device=key_nke.device) if block_n is None else block_n
        self.lines, self._blocks = lines, (key_nke, value_nke)
        self._verticals = [x_nke.flatten(0, 1)[lines.verticals] for x_nke in self._blocks]
        self._future_kk = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=key_nke.device).triu(1)

    def runs(self) -> Iterator[_Run]:
        """Yield the runs of the queries."""
        slashes, block_n = self.lines.slashes, self._of_queries_n
        is_slash_n, vertical_block_v = self.lines.is_slash(), self.lines.verticals // BLOCK
        slashes_n = torch.searchsorted(slashes, block_n, right=True).tolist()
        verticals_n = torch.searchsorted(vertical_block_v, block_n).tolist()
        begin, most = 0, max(1, len(block_n) // _RUNS)
        while begin < len(block_n):
            end = min(begin + most, len(block_n))
            keys = BLOCK * slashes_n[end - 1] + verticals_n[end - 1]  # upper bound per block
            end = min(end, begin + max(1, RUN_SCORES // (BLOCK * keys)))
            block_i1 = block_n[begin:end].unsqueeze(1)
            block_is = block_i1 - slashes[: slashes_n[end - 1]]
            verticals = verticals_n[end - 1]
            distance_iv = block_i1 - vertical_block_v[:verticals]
            hidden_iv = (distance_iv < 0) | is_slash_n[distance_iv.clamp(min=0)]
            yield _Run(slice(begin, end), block_is.clamp(min=0), block_is < 0, verticals, hidden_iv)
            begin = end

    def scores(
        self, query_ike: torch.Tensor, run: _Run
    ) -> tuple[torch.Tensor, Sequence[torch.Tensor], Sequence[torch.Tensor]]:
        """Return the scores of a run's queries, ``[i, k, c]``, −∞ where they see nothing, and what they are against.

        That is keys and values gathered by the run's blocks, ``[i, 64·s, e]`` each, and of its verticals, ``[v, e]``.
        """
        gathered = [x_nke[run.block_is].flatten(1, 2) for x_nke in self._blocks]
        of_verticals = [x_ve[: run.verticals] for x_ve in self._verticals]
        score_iksk = (query_ike @ gathered[0].mT).view(*query_ike.shape[:2], -1, BLOCK)
        score_iksk.masked_fill_(run.nothing_is[:, None, :, None], _HIDDEN)
        score_iksk[:, :, 0].masked_fill_(self._future_kk, _HIDDEN)
        score_ikv = (query_ike @ of_verticals[0].T).masked_fill_(run.hidden_iv.unsqueeze(1), _HIDDEN)
        return torch.cat([score_iksk.flatten(2), score_ikv], dim=2), gathered, of_verticals


class AttentionUnder(torch.autograd.Function):
    """Attention of a document's queries to the keys that each head sees, ``[m, h, e]``."""

    @staticmethod
    def forward(
        ctx: Any, query_mhe: torch.Tensor, key_mje: torch.Tensor, value_mje: torch.Tensor, lines: Sequence[Lines]
    ) -> torch.Tensor:
        """The attention; the lines are those of each head."""
        out_mhe = torch.empty_like(query_mhe, memory_format=torch.contiguous_format)
        dtype, tokens = torch.promote_types(query_mhe.dtype, torch.float32), len(query_mhe)
        lse_hm = query_mhe.new_empty(query_mhe.shape[1], tokens, dtype=dtype)
        for heads, blocks in _groups(len(lines), key_mje, value_mje, dtype):
            for head in heads:
                out_nke, lse_nk = head_forward(in_blocks(query_mhe[:, head], dtype), HeadKeys(*blocks, lines[head]))
                out_mhe[:, head], lse_hm[head] = out_nke.flatten(0, 1)[:tokens], lse_nk.flatten()[:tokens]
        ctx.save_for_backward(query_mhe, key_mje, value_mje, lse_hm)
        ctx.lines = lines
        return out_mhe

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """The gradients of queries, keys and values."""
        query_mhe, key_mje, value_mje, lse_hm = ctx.saved_tensors
        dtype, lines, tokens = lse_hm.dtype, ctx.lines, len(query_mhe)
        dquery_mhe, dkey_mje, dvalue_mje = (torch.empty_like(x) for x in (query_mhe, key_mje, value_mje))
        for key_head, (heads, blocks) in enumerate(_groups(len(lines), key_mje, value_mje, dtype)):
            dkey_nke, dvalue_nke = (torch.zeros_like(x_nke) for x_nke in blocks)
            for head in heads:
                query_nke, dout_nke = (in_blocks(x_mhe[:, head], dtype) for x_mhe in (query_mhe, gradients[0]))
                lse_nk = pad(lse_hm[head], (0, -tokens % BLOCK)).view(-1, BLOCK)
                keys = HeadKeys(*blocks, lines[head])
                dquery_nke = head_backward(query_nke, dout_nke, lse_nk, keys, dkey_nke, dvalue_nke)
                dquery_mhe[:, head] = dquery_nke.flatten(0, 1)[:tokens]
            dkey_mje[:, key_head] = dkey_nke.flatten(0, 1)[:tokens]
            dvalue_mje[:, key_head] = dvalue_nke.flatten(0, 1)[:tokens]
        return dquery_mhe, dkey_mje, dvalue_mje, None


def _groups(
    heads: int, key_mje: torch.Tensor, value_mje: torch.Tensor, dtype: torch.dtype
) -> Iterator[tuple[range, tuple[torch.Tensor, torch.Tensor]]]:
    """Yield the heads that share each head of keys, and its blocks of keys and values."""
    share = heads // key_mje.shape[1]
    for head in range(key_mje.shape[1]):
        blocks = in_blocks(key_mje[:, head], dtype), in_blocks(value_mje[:, head], dtype)
        yield range(head * share, (head + 1) * share), blocks


def head_forward(query_nke: torch.Tensor, keys: HeadKeys) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the output of a head's blocks of queries, ``[n, k, e]``, and log-sum-exps, ``[n, k]``."""
    out_nke, lse_nk = torch.empty_like(query_nke), torch.empty_like(query_nke[..., 0])
    scale = query_nke.shape[-1] ** -0.5
    for run in keys.runs():
        score_ikc, (_, value_iqe), (_, value_ve) = keys.scores(query_nke[run.queries] * scale, run)
        lse_nk[run.queries] = lse_ik = score_ikc.logsumexp(dim=2)
        share_ikc = score_ikc.sub_(lse_ik.unsqueeze(2)).exp_()
        of_slashes = value_iqe.shape[1]
        out_nke[run.queries] = share_ikc[..., :of_slashes] @ value_iqe + share_ikc[..., of_slashes:] @ value_ve
    return out_nke, lse_nk


def head_backward(
    query_nke: torch.Tensor, dout_nke: torch.Tensor, lse_nk: torch.Tensor, keys: HeadKeys,
    dkey_nke: torch.Tensor, dvalue_nke: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """Return a head's gradient of queries, ``[n, k, e]``; those of keys and values are added to the given sums."""
    dquery_nke, scale = torch.empty_like(query_nke), query_nke.shape[-1] ** -0.5
    verticals = keys.lines.verticals
    dkey_ve, dvalue_ve = (query_nke.new_zeros(len(verticals), query_nke.shape[-1]) for _ in range(2))
    for run in keys.runs():
        query_ike, dout_ike = query_nke[run.queries] * scale, dout_nke[run.queries]
        share_ikc, (key_iqe, value_iqe), (key_ve, value_ve) = keys.scores(query_ike, run)
        share_ikc.sub_(lse_nk[run.queries].unsqueeze(2)).exp_()
        of_slashes, flat = key_iqe.shape[1], query_ike.shape[0] * BLOCK
        dscore_ikc = torch.cat([dout_ike @ value_iqe.mT, dout_ike @ value_ve.T], dim=2)
        # Everything that a row attends to is here, so this does not need the output, which would be a rounded one.
        dscore_ikc.sub_((dscore_ikc * share_ikc).sum(dim=2, keepdim=True)).mul_(share_ikc)
        dscore_ikq, dscore_ikv = torch.split(dscore_ikc, [of_slashes, run.verticals], dim=2)
        share_ikq, share_ikv = torch.split(share_ikc, [of_slashes, run.verticals], dim=2)
        dquery_nke[run.queries] = (dscore_ikq @ key_iqe + dscore_ikv @ key_ve) * scale
        for dx_nke, of_ikq, x_ike in ((dkey_nke, dscore_ikq, query_ike), (dvalue_nke, share_ikq, dout_ike)):
            dx_nke.index_add_(0, run.block_is.flatten(), (of_ikq.mT @ x_ike).view(-1, BLOCK, x_ike.shape[2]))
        for dx_ve, of_ikv, x_ike in ((dkey_ve, dscore_ikv, query_ike), (dvalue_ve, share_ikv, dout_ike)):
            dx_ve[: run.verticals] += of_ikv.reshape(flat, -1).T @ x_ike.reshape(flat, -1)
    for dx_nke, dx_ve in ((dkey_nke, dkey_ve), (dvalue_nke, dvalue_ve)):
        dx_nke.view(-1, dx_nke.shape[2]).index_add_(0, verticals, dx_ve)
    return dquery_nke


@dataclass(eq=False)
class Tally:
    """Sums over the documents, heads and layers of a step.

    Attributes:
        rows: Number of sampled queries.
    """

    rows: int = 0
    _all_pairs: int = 0
    _kept: torch.Tensor | float = 0.0
    _pairs: torch.Tensor | int = 0

    def add(self, query_mhe: torch.Tensor, key_mje: torch.Tensor, lines: Sequence[Lines]) -> None:
        """Count a document: its queries, its keys, and what each head sees of them."""
        tokens, share = len(query_mhe), len(lines) // key_mje.shape[1]
        dtype, rows = torch.promote_types(query_mhe.dtype, torch.float32), sampled_rows(tokens, query_mhe.device)
        kept: torch.Tensor | float = 0.0
        for head, of_head in enumerate(lines):
            query_pe, key_me = query_mhe[rows, head].to(dtype), key_mje[:, head // share].to(dtype)
            kept = kept + attention_of_rows(query_pe, key_me, rows).mul_(of_head.sees(rows)).sum()
        self.count(tokens, lines, kept)

    def count(self, tokens: int, lines: Sequence[Lines], kept: torch.Tensor | float) -> None:
        """Count a document: its tokens, what each head sees of them, and the sampled queries' attention to that."""
        self._kept = self._kept + kept
        for of_head in lines:
            self._pairs = self._pairs + of_head.pairs()
        self.rows += SAMPLED_QUERIES * len(lines)
        self._all_pairs += tokens * (tokens + 1) // 2 * len(lines)

    @property
    def recall(self) -> float | None:
        """The mean share of sampled queries' dense attention that is kept; ``None`` if none were sampled."""
        return float(self._kept) / self.rows if self.rows else None

    @property
    def density(self) -> float | None:
        """The share of causal pairs that is seen; ``None`` if there are none."""
        return int(self._pairs) / self._all_pairs if self.rows else None


def sampled_rows(tokens: int, device: torch.device) -> torch.Tensor:
    """Return the positions of a document's queries that recall is measured on, evenly spread."""
    return (2 * torch.arange(SAMPLED_QUERIES, device=device) + 1) * tokens // (2 * SAMPLED_QUERIES)


class _Part(NamedTuple):
    """A long document, or consecutive short ones.

    Attributes:
        tokens: Total number of tokens.
        begins: Where the densely attended documents begin and the last one ends, on the device; ``None`` for a long
            one.
        longest: Upper bound on the tokens of each.
    """

    tokens: int
    begins: torch.Tensor | None
    longest: int


class SparseAttention:
    """Causal attention of each document to itself, sparse where it is long; see ``model.attention.Attend``.

    Args:
        how: What the long ones' queries see, and how long these are.
        lengths: Tokens of each document of the micro-batch, one after the other.
        device: Where they are.
        tally: Counts what is kept, over all micro-batches of a step.
    """

    def __init__(self, how: SparseAttentionConfig, lengths: Sequence[int], device: torch.device, tally: Tally) -> None:
        self._how, self._tally = how, tally
        self._parts = list[_Part]()
        for is_long, run in groupby(lengths, lambda tokens: tokens >= how.from_length):
            if is_long:
                self._parts += (_Part(tokens, None, tokens) for tokens in run)
            else:
                short = list(run)
                begins = torch.tensor([0, *accumulate(short)], dtype=torch.int32, device=device)
                self._parts.append(_Part(sum(short), begins, max(short)))
        self._lines: list[list[Lines]] | None = None  # of each long document, since the first call

    def for_layer(self) -> "SparseAttention":
        """Return one for a single layer, which keeps what its queries see."""
        of_layer = copy(self)
        of_layer._lines = None
        return of_layer

    def __call__(self, query_The: torch.Tensor, key_Tje: torch.Tensor, value_Tje: torch.Tensor) -> torch.Tensor:
        """Compute attention, ``[T, h, e]``; the lines are those of the first call."""
        pieces = [(query_The, key_Tje, value_Tje)]
        if len(self._parts) > 1:  # so that their gradients are concatenated only once
            sizes = [part.tokens for part in self._parts]
            pieces = list(zip(*(torch.split(x, sizes) for x in (query_The, key_Tje, value_Tje)), strict=True))
        if self._lines is None:
            self._lines = []
            with torch.no_grad():
                for part, (query, key, _) in zip(self._parts, pieces, strict=True):
                    if part.begins is None:
                        self._lines.append(find_lines(query, key, self._how))
                        self._tally.add(query, key, self._lines[-1])
        lines, outs = iter(self._lines), []
        for part, (query, key, value) in zip(self._parts, pieces, strict=True):
            if part.begins is None:
                outs.append(AttentionUnder.apply(query, key, value, next(lines)))  # type: ignore[no-untyped-call]
            else:
                outs.append(attention_within(query, key, value, part.begins, part.longest, None))
        return outs[0] if len(outs) == 1 else torch.cat(outs)
