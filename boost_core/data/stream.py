"""A long sequence of tokens in one or more pieces, with random access."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from boost_core.data.tokenizers import Tokens


class TokenStream:
    """A concatenation of pieces, which may be memory-mapped files and are not copied.

    Args:
        pieces: The pieces, none of them empty.
        text_bytes: Size of the text they came from, in UTF-8; ``None`` if unknown.

    Attributes:
        bytes_per_token: Mean bytes of text per token; ``None`` if unknown.
    """

    def __init__(self, pieces: Sequence[Tokens], text_bytes: float | None = None) -> None:
        self._pieces = pieces
        self._ends = list(accumulate(map(len, pieces)))
        self.bytes_per_token = None if text_bytes is None else text_bytes / len(self)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """The tokens from position ``begin`` up to ``end``."""
        found, place = [], begin
        while place < end:
            index = bisect_right(self._ends, place)
            first = self._ends[index] - len(self._pieces[index])
            found.append(self._pieces[index][place - first : end - first])
            place = self._ends[index]
        return np.concatenate(found).astype(np.int64)

    def counts(self) -> npt.NDArray[np.int64]:
        """Number of occurrences of each token id, from 0 to the largest."""
        counts = [np.bincount(piece) for piece in self._pieces]
        total = np.zeros(max(map(len, counts)), np.int64)
        for of_piece in counts:
            total[: len(of_piece)] += of_piece
        return total
