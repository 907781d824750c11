"""Packed documents, cut into chunks of one size."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class Window:
    """Tokens of documents one after the other; each sees itself and what is before it in its document.

    Several windows that are dealt to ranks together are one, with the documents of all.

    Attributes:
        documents: Tokens of each document, as they lie; the first and last may be parts.
        chunk_tokens: Tokens of a chunk.

    Raises:
        ValueError: A document is empty, or the chunks do not divide the window.
    """

    documents: tuple[int, ...]
    chunk_tokens: int

    def __post_init__(self) -> None:
        if not self.documents or min(self.documents) < 1:
            raise ValueError(f"documents of {self.documents!r} tokens: give one or more, of a token or more each")
        if self.chunk_tokens < 1 or self.tokens % self.chunk_tokens:
            raise ValueError(f"chunks of {self.chunk_tokens} tokens must divide the window of {self.tokens}")

    @cached_property
    def tokens(self) -> int:
        """Of the whole window."""
        return sum(self.documents)

    @property
    def chunks(self) -> int:
        """How many there are."""
        return self.tokens // self.chunk_tokens

    @cached_property
    def areas(self) -> Sequence[int]:
        """Pairs of query and key that each chunk's queries have."""
        found, start = [0] * self.chunks, 0
        for length in self.documents:
            for chunk, begin, end in self._rows(start, start + length):
                found[chunk] += triangle(end - start) - triangle(begin - start)
            start += length
        return tuple(found)

    @cached_property
    def area(self) -> int:
        """Pairs of all chunks."""
        return sum(self.areas)

    @cached_property
    def first(self) -> Sequence[int]:
        """The earliest chunk whose keys each chunk's queries see; they see some of all between it and their own."""
        return tuple(start // self.chunk_tokens for start, _ in self._leading)

    def keys(self, chunk: int) -> range:
        """The chunks whose keys one's queries see."""
        return range(self.first[chunk], chunk + 1)

    @cached_property
    def needs(self) -> Sequence[int]:
        """The same of each chunk, as a set of bits."""
        return tuple((2 << chunk) - (1 << first) for chunk, first in enumerate(self.first))

    def pairs(self, queries: int, keys: int) -> int:
        """Pairs of the queries of one chunk and the keys of some.

        Args:
            queries: The chunk.
            keys: The others, as a set of bits.
        """
        keys &= self.needs[queries]
        start, rows = self._leading[queries]
        found = 0
        if keys >> queries & 1:
            keys ^= 1 << queries
            found = self.areas[queries] - rows * (queries * self.chunk_tokens - start)
        if keys >> self.first[queries] & 1:
            found -= rows * (start - self.first[queries] * self.chunk_tokens)
        return found + rows * self.chunk_tokens * keys.bit_count()

    @cached_property
    def _leading(self) -> Sequence[tuple[int, int]]:
        """Of each chunk: where the document of its first token starts, and how many of its tokens are in the chunk."""
        found, start = [(0, 0)] * self.chunks, 0
        for length in self.documents:
            for chunk, begin, end in self._rows(start, start + length):
                if begin == chunk * self.chunk_tokens:
                    found[chunk] = start, end - begin
            start += length
        return tuple(found)

    def _rows(self, start: int, end: int) -> Iterable[tuple[int, int, int]]:
        """The chunks that some tokens lie in, each with those of its tokens."""
        size = self.chunk_tokens
        for chunk in range(start // size, (end - 1) // size + 1):
            yield chunk, max(start, chunk * size), min(end, (chunk + 1) * size)


def triangle(tokens: int) -> int:
    """Pairs of a document of so many tokens by itself."""
    return tokens * (tokens + 1) // 2


def joined(windows: Sequence[Window]) -> Window:
    """The windows of several replicas as one, to deal them to the ranks of all.

    Raises:
        ValueError: There is none, or their chunks differ in size.
    """
    if len({window.chunk_tokens for window in windows}) != 1:
        raise ValueError("give windows whose chunks have the same size")
    return Window(tuple(length for window in windows for length in window.documents), windows[0].chunk_tokens)
