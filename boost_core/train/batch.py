"""Sequences as a model takes them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from boost_core.data.sampler import Sequences


@dataclass(frozen=True)
class Batch:
    """Tokens of some sequences, one after the other; T tokens.

    Attributes:
        tokens: Their ids, ``[T]``, as the next three.
        targets: What follows each.
        counts: Whether its loss counts: 0 where another document's first token follows, and documents are apart.
        documents: The number of its document within the sequence; ``None`` where all see all.
    """

    tokens: torch.Tensor
    targets: torch.Tensor
    counts: torch.Tensor
    documents: torch.Tensor | None

    @classmethod
    def of(cls, sequences: Sequences, end_of_document: int | None, device: torch.device) -> "Batch":
        """Those of ``[b, s + 1]`` sequences on the host; see ``of_tokens``."""
        return cls.of_tokens(torch.from_numpy(sequences).to(device), end_of_document)

    @classmethod
    def of_tokens(cls, token_bt: torch.Tensor, end_of_document: int | None) -> "Batch":
        """Those of ``[b, s + 1]`` sequences where they are to live.

        Args:
            token_bt: The sequences.
            end_of_document: The token that ends a document, which belongs to it; ``None`` to let documents see each
                other.
        """
        token_bs, target_bs = token_bt[:, :-1], token_bt[:, 1:]
        ends_bs, document_T = torch.zeros_like(token_bs), None
        if end_of_document is not None:
            ends_bs = (token_bs == end_of_document).to(torch.int64)
            document_T = (ends_bs.cumsum(dim=1) - ends_bs).reshape(-1)
        counts_T = (1.0 - ends_bs.reshape(-1)).float()
        return cls(token_bs.reshape(-1), target_bs.reshape(-1), counts_T, document_T)

    def micro_batches(self, tokens: int) -> Iterator["Batch"]:
        """Equal parts of so many tokens."""
        for begin in range(0, len(self.tokens), tokens):
            here = slice(begin, begin + tokens)
            documents = None if self.documents is None else self.documents[here]
            yield Batch(self.tokens[here], self.targets[here], self.counts[here], documents)
