"""How much of dense attention, and of its pairs, sparse attention keeps."""

from collections.abc import Sequence

import torch

from boost_core.config.attention import SAMPLED_QUERIES
from boost_core.nn.sparse.index import Lines, attention_of_rows


class Tally:
    """Sums over the documents, heads and layers of a step.

    Attributes:
        rows: Number of sampled queries.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._all_pairs = 0
        self._kept: torch.Tensor | float = 0.0
        self._pairs: torch.Tensor | int = 0

    def add(self, query_mhe: torch.Tensor, key_mje: torch.Tensor, lines: Sequence[Lines]) -> None:
        """Count a document: its queries, its keys, and what each head sees of them."""
        tokens, share = len(query_mhe), len(lines) // key_mje.shape[1]
        dtype, rows = torch.promote_types(query_mhe.dtype, torch.float32), sampled_rows(tokens, query_mhe.device)
        kept: torch.Tensor | float = 0.0
        for head, of_head in enumerate(lines):
            query_pe, key_me = query_mhe[rows, head].to(dtype), key_mje[:, head // share].to(dtype)
            dense_pm = attention_of_rows(query_pe, key_me, rows)
            kept = kept + dense_pm.mul_(of_head.sees(rows)).sum()
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
