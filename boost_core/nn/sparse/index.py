"""Which keys the queries of a document see: verticals, keys that all see, and slashes, distances at which all see.

Rotary embeddings give attention this form, and gradients have it, too. So the last queries speak for all: their
attention to every key, summed by column, says what a vertical would keep, and by diagonal, what a slash would. Slashes
are whole blocks: slash D is the blocks of keys that lie D blocks before their queries' own, so its sum is that of
the last queries' attention in such blocks. Slash 0, the queries' own block, is causal; a few more, for nearby keys,
and the first keys, the attention sinks, are always included.

Shape suffixes: m tokens of the document, n = ⌈m/64⌉ blocks of k = 64; h heads, j heads of keys, e head size; p of the
last queries; l = n + m lines, slashes and then verticals.
"""

from dataclasses import dataclass

import torch
from torch.nn.functional import pad

from boost_core.config.attention import BLOCK, LAST_QUERIES, SparseAttentionConfig

_HIDDEN = float("-inf")
_ONE = float(1 << 42)  # in fixed point


@dataclass(frozen=True)
class Lines:
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
        is_slash_n = self.slashes.new_zeros(self.blocks, dtype=torch.bool)
        return is_slash_n.index_fill_(0, self.slashes, True)

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
        own = (tokens * (BLOCK + 1) - (BLOCK - rest) * rest) // 2
        by_slashes = (BLOCK * (tokens - BLOCK * self.slashes[1:])).sum()
        block = self.verticals // BLOCK
        covered = torch.searchsorted(self.slashes, blocks - 1 - block, right=True)
        rows = tokens - BLOCK * (block + covered)
        rows += rest * self.is_slash()[blocks - 1 - block]  # of the last block, if it is among those
        return own + by_slashes + rows.sum()


def find_lines(query_mhe: torch.Tensor, key_mje: torch.Tensor, how: SparseAttentionConfig) -> list[Lines]:
    """Choose what each head's queries see of a document.

    Args:
        query_mhe: The rotated queries; h is a multiple of j.
        key_mje: The rotated keys.
        how: What is always seen, and how much more may be.
    """
    share = query_mhe.shape[1] // key_mje.shape[1]
    last_phe = query_mhe[-LAST_QUERIES:]
    return [
        choose_lines(*attention_of_last(last_phe[:, head], key_mje[:, head // share]), len(key_mje), how)
        for head in range(query_mhe.shape[1])
    ]


def attention_of_last(query_pe: torch.Tensor, key_me: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a document's last queries, summed over the queries of each block: ``[b, m]``, and these blocks."""
    dtype, tokens = torch.promote_types(query_pe.dtype, torch.float32), len(key_me)
    key_nke = in_blocks(key_me, dtype)
    place_nk = torch.arange(key_nke.shape[0] * BLOCK, device=key_me.device).view(-1, BLOCK)
    row_p = torch.arange(tokens - len(query_pe), tokens, device=key_me.device)
    score_nkp = scores_of_blocks(query_pe.to(dtype), key_nke, place_nk, row_p)
    most_p = score_nkp.amax(dim=(0, 1))
    mass_bm = mass_of_blocks(score_nkp, most_p, sums_of_blocks(score_nkp, most_p), tokens)
    return mass_bm.flatten(1)[:, :tokens], last_blocks(tokens, key_me.device)


def in_blocks(x_me: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Blocks of a document's tokens, ``[n, k, e]``, the last one padded with zeros, which no token sees."""
    return pad(x_me.to(dtype), (0, 0, 0, -len(x_me) % BLOCK)).view(-1, BLOCK, x_me.shape[1])


def last_blocks(tokens: int, device: torch.device) -> torch.Tensor:
    """Return the blocks that contain a document's last queries, ``[b]``."""
    return torch.arange((tokens - LAST_QUERIES) // BLOCK, (tokens - 1) // BLOCK + 1, device=device)


def scores_of_blocks(
    query_pe: torch.Tensor, key_nke: torch.Tensor, place_nk: torch.Tensor, row_p: torch.Tensor
) -> torch.Tensor:
    """Scores of queries at some positions against keys, ``[n, k, p]``: −∞ for what is not in a query's past.

    Each block is a product of its own, all of one shape: a key's score is bit-identical whichever blocks come with it.
    """
    scaled_ep = (query_pe * query_pe.shape[-1] ** -0.5).T
    score_nkp = torch.bmm(key_nke, scaled_ep.expand(len(key_nke), -1, -1))
    return score_nkp.masked_fill_(place_nk.unsqueeze(2) > row_p, _HIDDEN)


def sums_of_blocks(score_nkp: torch.Tensor, most_p: torch.Tensor) -> torch.Tensor:
    """Return softmax's divisors, ``[p]``, as integers: the total is the same whichever ranks' sums are added."""
    return _fixed((score_nkp - most_p).exp_()).sum(dim=(0, 1))


def mass_of_blocks(score_nkp: torch.Tensor, most_p: torch.Tensor, sum_p: torch.Tensor, tokens: int) -> torch.Tensor:
    """Attention of a document's last queries to each key, summed over the queries of each block, ``[b, n, k]``.

    Args:
        score_nkp: Their scores.
        most_p: The largest score of each query.
        sum_p: The result of ``sums_of_blocks`` for all keys.
        tokens: Tokens of the document.
    """
    share_nkp = _fixed(shares(score_nkp, most_p, sum_p))
    before = min((BLOCK - (tokens - LAST_QUERIES) % BLOCK), LAST_QUERIES)  # those of the first block
    parts = [part for part in share_nkp.tensor_split([before], dim=2) if part.shape[2]]
    return torch.stack([part.sum(dim=2).to(score_nkp.dtype) / _ONE for part in parts])


def shares(score_nkp: torch.Tensor, most_p: torch.Tensor, sum_p: torch.Tensor) -> torch.Tensor:
    """Softmax of scores, given its maxima and divisors over all keys."""
    return (score_nkp - most_p).exp_().div_(sum_p.to(score_nkp.dtype) / _ONE)


def _fixed(x: torch.Tensor) -> torch.Tensor:
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
    enough = how.mass * mass_bm.sum(dtype=torch.float64)
    wanted = enough - mass_bm[always_bm].sum(dtype=torch.float64)
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
    taken = order_l[: _fitting(mass_l[order_l], pairs_l[order_l], wanted, room)]
    # A slash that no longer fits leaves room for verticals.
    rest = order_l[len(taken) :]
    rest = rest[rest >= blocks]
    wanted, room = wanted - mass_l[taken].sum(dtype=torch.float64), room - int(pairs_l[taken].sum())
    taken = torch.cat([taken, rest[: _fitting(mass_l[rest], pairs_l[rest], wanted, room)]])

    nearest, first = distance_n[:near], place_m[: how.sink]
    slashes = torch.cat([nearest, taken[taken < blocks].sort().values])
    verticals = torch.cat([first, taken[taken >= blocks].sort().values - blocks])
    return Lines(tokens, slashes, verticals)


def _fitting(mass_l: torch.Tensor, pairs_l: torch.Tensor, wanted: torch.Tensor, room: int) -> int:
    """Return how many lines, in order, are needed to keep the wanted mass, as far as there is room for them."""
    before_l = mass_l.cumsum(0, dtype=torch.float64) - mass_l
    return int(((pairs_l.cumsum(0) <= room) & (before_l < wanted)).sum())
