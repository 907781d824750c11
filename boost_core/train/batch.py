"""Sequences in the form a model takes.

Shape suffixes: b sequences of s positions, and t = s + 1 tokens; T = b·s tokens; n places for documents in a sequence.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from boost_core.data.sampler import Sequences

# A captured step has room for documents of this mean length in tokens. Each place costs attention's kernels a launch of
# empty blocks, whether it is taken or not.
_MEAN_DOCUMENT, _FEWEST_PLACES = 128, 16


def document_places(sequence_length: int) -> int:
    """Return the number of documents per sequence for which a captured step has room."""
    return max(sequence_length // _MEAN_DOCUMENT, _FEWEST_PLACES)


def most_documents(sequences: Sequences, end_of_document: int | None) -> int:
    """Return the most documents in any of ``[b, t]`` sequences on the host, plus one if its last document ends."""
    if end_of_document is None:
        return 1
    return 1 + int((sequences[:, :-1] == end_of_document).sum(axis=1).max())


def document_lengths(sequences: Sequences, end_of_document: int | None) -> tuple[int, ...]:
    """Return the tokens of each document of ``[b, t]`` sequences on the host, one sequence after the other.

    A sequence without a document end is one document; the last token of each sequence is left out, as nothing is
    predicted after it.
    """
    count, length = len(sequences), sequences.shape[1] - 1
    if end_of_document is None:
        return (length,) * count
    ends = np.flatnonzero(sequences[:, :-1] == end_of_document) + 1
    borders = np.union1d(ends, np.arange(0, (count + 1) * length, length))
    return tuple(np.diff(borders).tolist())


@dataclass(frozen=True)
class Batch:
    """Tokens of some sequences, one after the other.

    Attributes:
        tokens: Their ids, ``[T]``, as are the next two.
        targets: The token that follows each.
        counts: Whether its loss counts: 0 where the next token starts another document, and documents are apart.
        starts: Where each document begins in its sequence, ``[b, n]``, 32 bits, in order, and s in unused places;
            ``None`` where all tokens see all others.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    counts: torch.Tensor
    starts: torch.Tensor | None

    @classmethod
    def of(cls, sequences: Sequences, end_of_document: int | None, device: torch.device) -> "Batch":
        """Make the batch of ``[b, t]`` sequences on the host; see ``of_tokens``."""
        places = most_documents(sequences, end_of_document)
        return cls.of_tokens(torch.from_numpy(sequences).to(device), end_of_document, places)

    @classmethod
    def of_tokens(cls, token_bt: torch.Tensor, end_of_document: int | None, places: int) -> "Batch":
        """Make the batch of ``[b, t]`` sequences on the device where it is to live.

        Args:
            token_bt: The sequences.
            end_of_document: The token that ends a document and belongs to it; ``None`` to let documents see each
                other.
            places: At least ``most_documents``; shapes then depend on this alone.
        """
        token_bs, target_bs = token_bt[:, :-1], token_bt[:, 1:]
        ends_bs, start_bn = torch.zeros_like(token_bs), None
        if end_of_document is not None:
            ends_bs = (token_bs == end_of_document).to(torch.int64)
            start_bn = _starts(ends_bs, places)
        counts_T = (1.0 - ends_bs.reshape(-1)).float()
        return cls(token_bs.reshape(-1), target_bs.reshape(-1), counts_T, start_bn)

    def micro_batches(self, count: int) -> Iterator["Batch"]:
        """Split the batch into equal parts."""
        flat = zip(*(tensor.chunk(count) for tensor in (self.tokens, self.targets, self.counts)), strict=True)
        starts = [None] * count if self.starts is None else self.starts.chunk(count)
        for (tokens, targets, counts), start_bn in zip(flat, starts, strict=True):
            yield Batch(tokens, targets, counts, start_bn)


def _starts(ends_bs: torch.Tensor, places: int) -> torch.Tensor:
    """Return ``Batch.starts`` of sequences in which documents end where there are ones."""
    length = ends_bs.shape[1]
    # Tokens that end no document are written to an extra last place, which is never read.
    place_bs = ends_bs.cumsum(dim=1).masked_fill(ends_bs == 0, places)
    after_bs = torch.arange(1, length + 1, dtype=torch.int32, device=ends_bs.device).expand_as(place_bs)
    start_bn = torch.full((len(ends_bs), places + 1), length, dtype=torch.int32, device=ends_bs.device)
    start_bn.scatter_(1, place_bs, after_bs)
    start_bn[:, 0].zero_()
    return start_bn[:, :places]
