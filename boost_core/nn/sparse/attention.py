"""Attention of a micro-batch's documents, sparse in the long ones.

What a document's queries see is chosen in the forward pass, and kept for recomputation in the backward pass:
a second choice could come out differently, and the gradients would be those of another mask.

Shape suffixes: T tokens, h heads, j heads of keys and values, e head size; m tokens of a document.
"""

from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate, groupby

import torch

from boost_core.config.attention import SparseAttentionConfig
from boost_core.nn.documents import attention_within
from boost_core.nn.sparse.index import Lines, find_lines
from boost_core.nn.sparse.product import attention_under
from boost_core.nn.sparse.recall import Tally


@dataclass(frozen=True)
class _Part:
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
    """Causal attention of each document to itself, sparse where it is long; see ``nn.attention.Attend``.

    Args:
        how: What the long ones' queries see, and how long these are.
        documents: Tokens of each document of the micro-batch, one after the other.
        device: Where they are.
        tally: Counts what is kept, over all micro-batches of a step.
    """

    def __init__(
        self, how: SparseAttentionConfig, documents: Sequence[int], device: torch.device, tally: Tally
    ) -> None:
        self._how, self._tally = how, tally
        self._parts = _parts(documents, how.from_length, device)
        self._found: list[list[Lines]] | None = None

    def for_layer(self) -> "SparseAttention":
        """Return one for a single layer, which keeps what its queries see."""
        own = copy(self)
        own._found = None
        return own

    def __call__(self, query_The: torch.Tensor, key_Tje: torch.Tensor, value_Tje: torch.Tensor) -> torch.Tensor:
        """Compute attention, ``[T, h, e]``; the lines are those of the first call."""
        pieces = [(query_The, key_Tje, value_Tje)]
        if len(self._parts) > 1:  # so that their gradients are concatenated only once
            sizes = [part.tokens for part in self._parts]
            pieces = list(zip(*(torch.split(x, sizes) for x in (query_The, key_Tje, value_Tje)), strict=True))
        if self._found is None:
            with torch.no_grad():
                self._found = [
                    self._find(query, key)
                    for part, (query, key, _) in zip(self._parts, pieces, strict=True)
                    if part.begins is None
                ]
        found, outs = iter(self._found), []
        for part, (query, key, value) in zip(self._parts, pieces, strict=True):
            if part.begins is None:
                outs.append(attention_under(query, key, value, next(found)))
            else:
                outs.append(attention_within(query, key, value, part.begins, part.longest, None))
        return outs[0] if len(outs) == 1 else torch.cat(outs)

    def _find(self, query_mhe: torch.Tensor, key_mje: torch.Tensor) -> list[Lines]:
        lines = find_lines(query_mhe, key_mje, self._how)
        self._tally.add(query_mhe, key_mje, lines)
        return lines


def _parts(documents: Sequence[int], from_length: int, device: torch.device) -> list[_Part]:
    parts = list[_Part]()
    for is_long, run in groupby(documents, lambda tokens: tokens >= from_length):
        if is_long:
            parts += (_Part(tokens, None, tokens) for tokens in run)
        else:
            short = list(run)
            begins = torch.tensor([0, *accumulate(short)], dtype=torch.int32, device=device)
            parts.append(_Part(sum(short), begins, max(short)))
    return parts
