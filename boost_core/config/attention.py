"""Sparse attention in training."""

from typing import Literal

from pydantic import Field

from boost_core.config.base import Config

BLOCK = 64  # tokens of a block of sparse attention
LAST_QUERIES = 64  # of a document, which choose what all its queries see
RUN_SCORES = 1 << 20  # of a run of its queries, unless one block of these has more
SAMPLED_QUERIES = 32  # of a document, by which recall is measured


class SparseAttentionConfig(Config):
    """Attention to a part of the keys, which each layer, head and step chooses anew for each document.

    The last 64 queries of a document choose what all its queries see: verticals, keys that all see, and slashes, whole
    blocks of 64 keys at a distance at which all see them.
    """

    kind: Literal["vertical_slash"] = Field(description="Keys that all see, and distances at which all see.")
    budget: float = Field(
        0.05, gt=0, le=0.5, description="The most that may be seen, as a share of a document's causal pairs."
    )
    mass: float = Field(
        0.98, gt=0, le=1,
        description="Nothing is added once this share of the last queries' attention is kept, even below the budget.",
    )  # fmt: skip
    sink: int = Field(30, ge=0, le=4096, description="First tokens of a document, which are always seen.")
    window: int = Field(
        100, ge=1, le=65536, description="Tokens that a query always sees, itself included; whole blocks of 64."
    )
    from_length: int = Field(
        16384, ge=256, le=1_048_576, description="Documents with fewer tokens are attended to densely."
    )
    recall: float = Field(
        0.95, gt=0, le=1, description="The share of dense attention to be kept; less of it is reported as a fault."
    )

    @property
    def near_blocks(self) -> int:
        """Distances in blocks that are always seen, the queries' own block included."""
        return 1 + -(-(self.window - 1) // BLOCK)

    def pairs(self, tokens: int) -> int:
        """Pairs of query and key that the budget has for a document."""
        return int(self.budget * (tokens * (tokens + 1) // 2))

    def always_pairs(self, tokens: int) -> int:
        """Those of what is always seen, at most."""
        own = tokens * (BLOCK + 1) // 2
        near = sum(BLOCK * max(0, tokens - BLOCK * distance) for distance in range(1, self.near_blocks))
        return own + near + self.sink * max(0, tokens - BLOCK * self.near_blocks)
