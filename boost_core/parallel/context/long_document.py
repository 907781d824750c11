"""A document with sparse attention, with its tokens spread over the ranks of a context parallel group.

Shape suffixes: m tokens of the document, n blocks of 64 of them, t tokens of it on the rank; b blocks that contain
these; c ranks; p queries that choose what is seen, or by which recall is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from boost_core.config.attention import BLOCK, LAST_QUERIES
from boost_core.nn.sparse.recall import sampled_rows
from boost_core.plan.context.figures import ContextPlan


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
