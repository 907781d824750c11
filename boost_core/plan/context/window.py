"""Packed documents, cut into chunks of equal size."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True)
class Window:
    """The tokens of consecutive documents; each sees itself and all or some of the tokens before it in its document.

    Several windows that are dealt to ranks together form one, with the documents of all.

    Attributes:
        documents: Tokens of each document, in order; the first and last may be parts of documents.
        chunk_tokens: Tokens of a chunk.
        sees: Most tokens of its document that each token sees, itself included (a sliding window); ``None`` for all.
        sparse_from: Documents of at least this many tokens use sparse attention; ``None``: none does. The keys that it
            needs are not known in advance, so plans contain none of them; their pairs count as those of the queries'
            own chunk.
        sparse_share: Share of their pairs that is expected to be seen.

    Raises:
        ValueError: A document is empty, the chunks do not divide the window, or no token sees even itself.
    """

    documents: tuple[int, ...]
    chunk_tokens: int
    sees: int | None = None
    sparse_from: int | None = None
    sparse_share: float = 1.0

    def __post_init__(self) -> None:
        if not self.documents or min(self.documents) < 1:
            raise ValueError(f"documents of {self.documents!r} tokens: give one or more, of a token or more each")
        if self.chunk_tokens < 1 or self.tokens % self.chunk_tokens:
            raise ValueError(f"chunks of {self.chunk_tokens} tokens must divide the window of {self.tokens}")
        if self.sees is not None and self.sees < 1:
            raise ValueError(f"sees is {self.sees}, but each token sees at least itself; give 1 or more, or None")

    @cached_property
    def tokens(self) -> int:
        """Of the whole window."""
        return sum(self.documents)

    def is_sparse(self, length: int) -> bool:
        """Whether a document of this many tokens uses sparse attention."""
        return self.sparse_from is not None and length >= self.sparse_from

    @property
    def chunks(self) -> int:
        """How many there are."""
        return self.tokens // self.chunk_tokens

    @cached_property
    def areas(self) -> Sequence[int]:
        """Query-key pairs of each chunk's queries."""
        found, start = [0] * self.chunks, 0
        for length in self.documents:
            share = self.sparse_share if self.is_sparse(length) else 1
            for chunk, begin, end in self._rows(start, start + length):
                found[chunk] += int(share * (self._seen(end - start) - self._seen(begin - start)))
            start += length
        return tuple(found)

    @cached_property
    def area(self) -> int:
        """Pairs of all chunks."""
        return sum(self.areas)

    @cached_property
    def first(self) -> Sequence[int]:
        """The earliest chunk that each chunk's queries see; they see keys of all chunks from there to their own."""
        earliest = (
            start if self.sees is None else max(start, chunk * self.chunk_tokens - self.sees + 1)
            for chunk, (start, _) in enumerate(self._leading)
        )
        return tuple(token // self.chunk_tokens for token in earliest)

    def keys(self, chunk: int) -> range:
        """The chunks whose keys a chunk's queries see."""
        return range(self.first[chunk], chunk + 1)

    @cached_property
    def needs(self) -> Sequence[int]:
        """The same for each chunk, as a bit set."""
        return tuple((2 << chunk) - (1 << first) for chunk, first in enumerate(self.first))

    def pairs(self, queries: int, keys: int) -> int:
        """Pairs of the queries of one chunk and the keys of others.

        Args:
            queries: The chunk.
            keys: The others, as a bit set.
        """
        keys &= self.needs[queries]
        if self.sees is not None:
            return sum(self._pairs_of_two(queries, each) for each in self.keys(queries) if keys >> each & 1)
        start, rows = self._leading[queries]
        found = 0
        if keys >> queries & 1:
            keys ^= 1 << queries
            found = self.areas[queries] - rows * (queries * self.chunk_tokens - start)
        if keys >> self.first[queries] & 1:
            found -= rows * (start - self.first[queries] * self.chunk_tokens)
        return found + rows * self.chunk_tokens * keys.bit_count()

    def _pairs_of_two(self, queries: int, keys: int) -> int:
        """Pairs of the queries of one chunk and the keys of another, whatever tokens see."""
        first, (start, rows) = queries * self.chunk_tokens, self._leading[queries]

        def from_token(key: int) -> int:
            """Pairs of the leading document's queries with its keys, from a position before the chunk on."""
            return self._seen(first + rows - key) - self._seen(first - key)

        if keys == queries:
            return self.areas[queries] - from_token(start) + from_token(first)
        begin = max(start, keys * self.chunk_tokens)
        return from_token(begin) - from_token((keys + 1) * self.chunk_tokens)

    def _seen(self, tokens: int) -> int:
        """Pairs of the first tokens of a document."""
        short = tokens if self.sees is None else min(tokens, self.sees)
        return triangle(short) + (tokens - short) * short

    @cached_property
    def _leading(self) -> Sequence[tuple[int, int]]:
        """Of each chunk: where the document of its first token starts, and how many of its tokens are in the chunk.

        A document with sparse attention starts with the chunk, since no keys before that are planned for.
        """
        found, start = [(0, 0)] * self.chunks, 0
        for length in self.documents:
            for chunk, begin, end in self._rows(start, start + length):
                if begin == chunk * self.chunk_tokens:
                    found[chunk] = begin if self.is_sparse(length) else start, end - begin
            start += length
        return tuple(found)

    def _rows(self, start: int, end: int) -> Iterable[tuple[int, int, int]]:
        """The chunks that contain some tokens, each with its part of them."""
        size = self.chunk_tokens
        for chunk in range(start // size, (end - 1) // size + 1):
            yield chunk, max(start, chunk * size), min(end, (chunk + 1) * size)


def triangle(tokens: int) -> int:
    """Pairs of a document of this many tokens."""
    return tokens * (tokens + 1) // 2


def joined(windows: Sequence[Window]) -> Window:
    """Join the windows of several replicas into one, to deal them to the ranks of all.

    Raises:
        ValueError: There are none, or their chunks differ in size, or their tokens in how much they see.
    """
    if len({replace(window, documents=(window.chunk_tokens,)) for window in windows}) != 1:
        raise ValueError("give windows whose chunks have the same size and whose tokens see as many others")
    documents = tuple(length for window in windows for length in window.documents)
    return replace(windows[0], documents=documents)
