"""Into what chunks the tokens of a sequence are cut for context parallel ranks."""

from functools import lru_cache

EFFICIENT = 2048  # tokens, below which attention's kernels lose much of their rate
MOST_CHUNKS = 64  # of a rank: planning takes the host long with more
_CHUNKS, _FEWEST_CHUNKS = 8, 4  # of a rank: how many even its work out, and how many at least


@lru_cache(1024)
def chunk_tokens(sequence_length: int, ranks: int) -> int:
    """Tokens of a chunk: a divisor of a rank's part of a sequence.

    Args:
        sequence_length: Tokens of a sequence; a multiple of ``ranks``.
        ranks: Of the context parallel group.
    """
    tokens = sequence_length // ranks
    wanted = max(tokens // _CHUNKS, min(EFFICIENT, tokens // _FEWEST_CHUNKS), 1)
    return next(size for size in range(wanted, 0, -1) if tokens % size == 0)
