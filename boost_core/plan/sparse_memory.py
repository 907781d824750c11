"""Upper bounds, in bytes, on the memory of a rank that sparse attention takes in addition to dense attention.

The index of m tokens: with a budget of p there is room for at most √p·m + 2·64 verticals and √p·m/64 + 1 slashes, since
even the last of a document, which add the fewest pairs, add more the more there are; and for what is always seen. Each
is a 64-bit number. They are kept for each block from its forward pass to its backward pass.

One head of one document at a time: keys, values, queries, the output's gradient and three gradients in fp32; and for a
run of queries its scores, what is computed from them, and the keys and values that it gathers. While lines are chosen:
scores of the last queries and of the sampled ones, and which of these are kept; and what sorting takes per key. All
context parallel ranks have the whole index and a head's keys of a whole document, but only the queries of their own
tokens. For the transfer of keys: the source of each key, whether it is sent, and a list of those that are.
"""

from math import isqrt

from boost_core.config.attention import BLOCK, LAST_QUERIES, RUN_SCORES, SAMPLED_QUERIES, SparseAttentionConfig
from boost_core.config.job import JobSpec
from boost_core.hardware import BYTES

_PLACE, _PRECISE = 8, BYTES["fp32"]
_SORTED = 100  # for a key: what it is worth, adds and keeps, sums of these, and its rank in the order
_ACTIVE = 64  # for a key of a head: its source, whether it is sent and seen, its position when sent and received
_SAMPLED = 32  # for a key and sampled query: attention, the distance of their blocks, and whether it is kept


def index_bytes(job: JobSpec, heads: int) -> int:
    """The index of a block for a micro-batch, for a number of heads."""
    attention, training = job.training.attention, job.training
    if attention is None:
        return 0
    shortest = attention.from_length if job.data.documents_apart else training.sequence_length
    tokens = training.micro_batch_size * training.sequence_length
    return tokens // shortest * heads * _PLACE * sum(_most_lines(attention, 0)) + heads * _PLACE * sum(
        _budgeted(attention, tokens)
    )


def head_bytes(job: JobSpec) -> int:
    """What one head of the longest document takes at a time."""
    attention, length, size = job.training.attention, job.training.sequence_length, job.model.head_size
    if attention is None:
        return 0
    own = -(-length // job.parallelism.context_parallel_size)
    slashes, verticals = _most_lines(attention, length)
    keys = BLOCK * min(slashes, -(-length // BLOCK)) + min(verticals, length)
    run = min(max(RUN_SCORES, BLOCK * keys), keys * max(BLOCK, own // 8))
    blocks = (4 * (length + BLOCK) + 3 * (own + BLOCK)) * size
    product = _PRECISE * (blocks + 4 * verticals * size + 5 * run + 4 * run * size // BLOCK)
    chosen = own * (3 * _PRECISE * LAST_QUERIES + 2 * _PRECISE * size) + length * _SORTED
    return max(product, chosen, length * SAMPLED_QUERIES * _SAMPLED)


def active_bytes(job: JobSpec, key_heads: int) -> int:
    """Which keys of a number of heads context parallel ranks send each other for a micro-batch."""
    training = job.training
    if training.attention is None or job.parallelism.context_parallel_size == 1:
        return 0
    return training.micro_batch_size * training.sequence_length * key_heads * _ACTIVE


def _most_lines(attention: SparseAttentionConfig, tokens: int) -> tuple[int, int]:
    """Slashes and verticals of a document."""
    slashes, verticals = _budgeted(attention, tokens)
    return slashes + attention.near_blocks + 1, verticals + attention.sink + 2 * BLOCK


def _budgeted(attention: SparseAttentionConfig, tokens: int) -> tuple[int, int]:
    verticals = isqrt(int(attention.budget * (tokens + 1) ** 2)) + 1
    return verticals // BLOCK + 1, verticals
