"""The chunks into which the tokens of a sequence are cut for context parallel ranks."""

from functools import lru_cache

EFFICIENT = 2048  # tokens per chunk, below which attention kernels slow down considerably
MOST_CHUNKS = 64  # per rank: with more, planning takes the host too long
_CHUNKS, _FEWEST_CHUNKS = 8, 4  # per rank: enough to balance the work, and the minimum


@lru_cache(1024)
def chunk_tokens(sequence_length: int, ranks: int) -> int:
    """Tokens per chunk: a divisor of a rank's part of a sequence.

    Args:
        sequence_length: Tokens per sequence; a multiple of ``ranks``.
        ranks: Size of the context parallel group.
    """
    tokens = sequence_length // ranks
    wanted = max(tokens // _CHUNKS, min(EFFICIENT, tokens // _FEWEST_CHUNKS), 1)
    return next(size for size in range(wanted, 0, -1) if tokens % size == 0)
