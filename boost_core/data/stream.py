"""A long row of tokens in one or more pieces, of which any part can be read."""

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

import numpy as np
import numpy.typing as npt

from boost_core.data.tokenizers import Tokens


class TokenStream:
    """Pieces one after the other; they may be files mapped into memory, and are not copied.

    Args:
        pieces: The pieces; each has tokens.
        text_bytes: Of the text that they are of, in UTF-8; ``None`` if that is not known.

    Attributes:
        bytes_per_token: What a token has of the text, on average; ``None`` if that is not known.
    """

    def __init__(self, pieces: Sequence[Tokens], text_bytes: float | None = None) -> None:
        self._pieces = pieces
        self._ends = list(accumulate(map(len, pieces)))
        self.bytes_per_token = None if text_bytes is None else text_bytes / len(self)

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    def read(self, begin: int, end: int) -> npt.NDArray[np.int64]:
        """The tokens from place ``begin`` to ``end``."""
        found, place = [], begin
        while place < end:
            index = bisect_right(self._ends, place)
            first = self._ends[index] - len(self._pieces[index])
            found.append(self._pieces[index][place - first : end - first])
            place = self._ends[index]
        return np.concatenate(found).astype(np.int64)

    def counts(self) -> npt.NDArray[np.int64]:
        """How often each id is there, from 0 to the largest."""
        counts = [np.bincount(piece) for piece in self._pieces]
        total = np.zeros(max(map(len, counts)), np.int64)
        for of_piece in counts:
            total[: len(of_piece)] += of_piece
        return total
