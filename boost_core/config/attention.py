"""Sparse attention in training."""

from typing import Literal

from pydantic import Field

from boost_core.config.base import Config

BLOCK = 64  # tokens per block of sparse attention
LAST_QUERIES = 64  # per document; they choose what all its queries see
RUN_SCORES = 1 << 20  # upper limit per run of a document's queries, unless a single block of them has more
SAMPLED_QUERIES = 32  # per document; recall is measured on these


class SparseAttentionConfig(Config):
    """Attention to a subset of the keys, chosen for each document by each layer and head in each step.

    The last 64 queries of a document choose what all its queries see: verticals, which are keys that all queries see,
    and slashes, which are whole blocks of 64 keys at a fixed distance from the query.
    """

    kind: Literal["vertical_slash"] = Field(
        description="Every query sees certain keys, and the keys at certain distances from it."
    )
    budget: float = Field(
        0.05, gt=0, le=0.5, description="Upper limit on the pairs computed, as a share of a document's causal pairs."
    )
    mass: float = Field(
        0.98, gt=0, le=1,
        description="Stop adding keys once this share of the last queries' attention is kept, even below the budget.",
    )  # fmt: skip
    sink: int = Field(30, ge=0, le=4096, description="Number of tokens at a document's start that are always seen.")
    window: int = Field(
        100,
        ge=1,
        le=65536,
        description="Nearest tokens that a query always sees, itself included; rounded up to blocks of 64.",
    )
    from_length: int = Field(
        16384, ge=256, le=1_048_576, description="Documents with fewer tokens use dense attention."
    )
    recall: float = Field(
        0.95,
        gt=0,
        le=1,
        description="Share of dense attention that should be kept; a lower share is reported as a fault.",
    )

    @property
    def near_blocks(self) -> int:
        """Number of nearest blocks that are always seen, the query's own block included."""
        return 1 + -(-(self.window - 1) // BLOCK)

    def pairs(self, tokens: int) -> int:
        """Query-key pairs that the budget allows for a document of this length."""
        return int(self.budget * (tokens * (tokens + 1) // 2))

    def always_pairs(self, tokens: int) -> int:
        """Upper bound on the query-key pairs that are always seen in a document of this length."""
        own = tokens * (BLOCK + 1) // 2
        near = sum(BLOCK * max(0, tokens - BLOCK * distance) for distance in range(1, self.near_blocks))
        return own + near + self.sink * max(0, tokens - BLOCK * self.near_blocks)
