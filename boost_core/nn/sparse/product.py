"""Attention of one document under its heads' lines: exactly dense attention with that mask, from visible keys alone.

A head's queries go in runs of blocks. The keys of a run's slashes are gathered block by block; verticals are one
product for the whole run, in which those already covered by a slash, or not in the past, are masked. Two products
of each kind forward and five backward, so the arithmetic grows with the number of visible blocks. Scores and sums are
in fp32 at least. As in dense attention, inputs and log-sum-exps are kept for the backward pass, and also the lines.

Shape suffixes: m tokens of the document; h heads, j heads of keys, e head size; of a run: i blocks of k = 64 queries, s
slashes, v verticals; c = 64·s + v keys of each block of queries.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import pad

from boost_core.config.attention import BLOCK, RUN_SCORES
from boost_core.nn.sparse.index import Lines, in_blocks

_RUNS = 8  # at least, if a document has that many blocks: runs of few blocks waste less on slashes that begin later
_HIDDEN = float("-inf")


def attention_under(
    query_mhe: torch.Tensor, key_mje: torch.Tensor, value_mje: torch.Tensor, lines: Sequence[Lines]
) -> torch.Tensor:
    """Attention of a document's queries to the keys that each head sees, ``[m, h, e]``."""
    out_mhe: torch.Tensor = _Attention.apply(query_mhe, key_mje, value_mje, lines)  # type: ignore[no-untyped-call]
    return out_mhe


@dataclass(frozen=True)
class _Run:
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


def _runs(lines: Lines, block_n: torch.Tensor) -> Iterator[_Run]:
    """Yield the runs of some of a document's blocks of queries, ``[i]`` in order."""
    slashes = lines.slashes
    is_slash_n, vertical_block_v = lines.is_slash(), lines.verticals // BLOCK
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
        ones = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=key_nke.device)
        self._future_kk = ones.triu(1)

    def runs(self) -> Iterator[_Run]:
        """Yield the runs of the queries."""
        return _runs(self.lines, self._of_queries_n)

    def of(self, run: _Run) -> tuple[tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]:
        """Return keys and values gathered by a run's blocks, ``[i, 64·s, e]``, and of its verticals, ``[v, e]``."""
        key_iqe, value_iqe = (x_nke[run.block_is].flatten(1, 2) for x_nke in self._blocks)
        key_ve, value_ve = (x_ve[: run.verticals] for x_ve in self._verticals)
        return (key_iqe, value_iqe), (key_ve, value_ve)

    def scores(self, query_ike: torch.Tensor, key_iqe: torch.Tensor, key_ve: torch.Tensor, run: _Run) -> torch.Tensor:
        """Return the scores of a run's queries, ``[i, k, c]``: −∞ where they see nothing."""
        score_iksk = (query_ike @ key_iqe.mT).view(*query_ike.shape[:2], -1, BLOCK)
        score_iksk.masked_fill_(run.nothing_is[:, None, :, None], _HIDDEN)
        score_iksk[:, :, 0].masked_fill_(self._future_kk, _HIDDEN)
        score_ikv = (query_ike @ key_ve.T).masked_fill_(run.hidden_iv.unsqueeze(1), _HIDDEN)
        return torch.cat([score_iksk.flatten(2), score_ikv], dim=2)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query_mhe: torch.Tensor, key_mje: torch.Tensor, value_mje: torch.Tensor, lines: Sequence[Lines]
    ) -> torch.Tensor:
        out_mhe = torch.empty_like(query_mhe, memory_format=torch.contiguous_format)
        dtype, tokens = torch.promote_types(query_mhe.dtype, torch.float32), len(query_mhe)
        lse_hm = query_mhe.new_empty(query_mhe.shape[1], tokens, dtype=dtype)
        for heads, blocks in _groups(len(lines), key_mje, value_mje, dtype):
            for head in heads:
                query_nke = in_blocks(query_mhe[:, head], dtype)
                out_nke, lse_nk = head_forward(query_nke, HeadKeys(*blocks, lines[head]))
                out_mhe[:, head], lse_hm[head] = out_nke.flatten(0, 1)[:tokens], lse_nk.flatten()[:tokens]
        ctx.save_for_backward(query_mhe, key_mje, value_mje, lse_hm)
        ctx.lines = lines
        return out_mhe

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
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
        (key_iqe, value_iqe), (key_ve, value_ve) = keys.of(run)
        score_ikc = keys.scores(query_nke[run.queries] * scale, key_iqe, key_ve, run)
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
        (key_iqe, value_iqe), (key_ve, value_ve) = keys.of(run)
        query_ike, dout_ike = query_nke[run.queries] * scale, dout_nke[run.queries]
        share_ikc = keys.scores(query_ike, key_iqe, key_ve, run)
        share_ikc.sub_(lse_nk[run.queries].unsqueeze(2)).exp_()
        of_slashes, flat = key_iqe.shape[1], query_ike.shape[0] * BLOCK
        dscore_ikc = torch.cat([dout_ike @ value_iqe.mT, dout_ike @ value_ve.T], dim=2)
        # Everything that a row attends to is here, so this does not need the output, which would be a rounded one.
        dscore_ikc.sub_((dscore_ikc * share_ikc).sum(dim=2, keepdim=True)).mul_(share_ikc)
        dscore_ikq, dscore_ikv = torch.split(dscore_ikc, [of_slashes, run.verticals], dim=2)
        share_ikq, share_ikv = torch.split(share_ikc, [of_slashes, run.verticals], dim=2)
        dquery_nke[run.queries] = (dscore_ikq @ key_iqe + dscore_ikv @ key_ve) * scale
        for dx_nke, of_ikq, x_ike in ((dkey_nke, dscore_ikq, query_ike), (dvalue_nke, share_ikq, dout_ike)):
            dx_qe = (of_ikq.mT @ x_ike).view(-1, BLOCK, x_ike.shape[2])
            dx_nke.index_add_(0, run.block_is.flatten(), dx_qe)
        for dx_ve, of_ikv, x_ike in ((dkey_ve, dscore_ikv, query_ike), (dvalue_ve, share_ikv, dout_ike)):
            dx_ve[: run.verticals] += of_ikv.reshape(flat, -1).T @ x_ike.reshape(flat, -1)
    for dx_nke, dx_ve in ((dkey_nke, dkey_ve), (dvalue_nke, dvalue_ve)):
        dx_nke.view(-1, dx_nke.shape[2]).index_add_(0, verticals, dx_ve)
    return dquery_nke
