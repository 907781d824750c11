"""What an attention layer and a machine make of areas and tokens: bytes and seconds."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from boost_core.hardware import BYTES

Exchange = Literal["keys", "latents"]  # what goes between nodes

BACKWARD = 2.5  # products of attention's backward pass for each forward: five for two


@dataclass(frozen=True)
class AttentionLayer:
    """One layer's attention on a tensor parallel rank, whose group is the part of a node next to it.

    Attributes:
        hidden_size: Of queries, all heads together.
        key_size: Of keys, all key heads together; values have as much.
        heads: Query heads.
        rank: Of the latents that keys and values are made of; ``None`` without any.
        tensor_parallel_size: How many ranks heads are split over.
        element_bytes: Of what is sent and kept.
    """

    hidden_size: int
    key_size: int
    heads: int
    rank: int | None = None
    tensor_parallel_size: int = 1
    element_bytes: int = 2

    @property
    def key_bytes(self) -> int:
        """Keys and values of a token, that a rank sends."""
        return 2 * self.key_size * self.element_bytes // self.tensor_parallel_size

    @property
    def query_bytes(self) -> int:
        """Queries of a token, or outputs."""
        return self.hidden_size * self.element_bytes // self.tensor_parallel_size

    @property
    def latent_bytes(self) -> int:
        """Both latents of a token: a rank's share, as only shares cross the fabric.

        Raises:
            ValueError: Keys and values of this layer are made of no latents.
        """
        if self.rank is None:
            raise ValueError("a layer without a rank has no latents to send; send keys")
        return 2 * self.rank * self.element_bytes // self.tensor_parallel_size

    @property
    def gathered_bytes(self) -> int:
        """What the node's other ranks give to make a token's latents whole."""
        return (self.tensor_parallel_size - 1) * self.latent_bytes

    @property
    def projection_flops(self) -> float:
        """Of a received token: its keys and values, from latents."""
        return 4 * (self.rank or 0) * self.key_size / self.tensor_parallel_size

    @property
    def kept_bytes(self) -> int:
        """Of a token, from the forward pass to the backward: the output, and a log-sum-exp of each head in fp32."""
        return self.query_bytes + max(BYTES["fp32"], self.element_bytes) * self.heads // self.tensor_parallel_size

    def asking_bytes(self, backward: bool) -> int:
        """Of a token whose attention is computed elsewhere, on the way there.

        Forward its queries; backward these, the output's gradient, and what is kept.
        """
        return 2 * self.query_bytes + self.kept_bytes if backward else self.query_bytes

    def answering_bytes(self, backward: bool) -> int:
        """The same on the way back: what is kept, or the gradient of its queries."""
        return self.query_bytes if backward else self.kept_bytes

    def sent_bytes(self, exchange: Exchange) -> int:
        """Of a token that goes to another node."""
        return self.key_bytes if exchange == "keys" else self.latent_bytes

    def flops(self, area: float) -> float:
        """Forward, of some pairs: two products of a multiplication and an addition each."""
        return 4 * area * self.hidden_size / self.tensor_parallel_size


@dataclass(frozen=True)
class Rates:
    """What a rank does in a second, while all do.

    Attributes:
        flops: Of attention over long pieces, and of products.
        node_bytes: To ranks of its node, in one direction.
        fabric_bytes: To ranks of other nodes.
        by_piece: Whether kernels take each chunk by itself, so that attention over short ones is slower.
    """

    flops: float
    node_bytes: float
    fabric_bytes: float
    by_piece: bool = True


def efficiency(piece_tokens: float) -> float:
    """The share of the full rate that attention reaches where documents are cut into pieces of so many tokens.

    A quarter at 512 (FCP, arXiv 2605.08524), 90 % at 2K, all from 4K; even on a logarithmic scale between these, and in
    proportion below: blocks by themselves, on one kind of GPU. Kernels that take many pieces at once are said to lose
    nothing from 128 tokens on (DistCA, arXiv 2510.18121), so this is on the safe side.
    """
    points = ((512, 0.25), (2048, 0.9), (4096, 1.0))
    if piece_tokens <= points[0][0]:
        return points[0][1] * piece_tokens / points[0][0]
    for (low, share), (high, more) in pairwise(points):
        if piece_tokens <= high:
            return share + (more - share) * math.log(piece_tokens / low) / math.log(high / low)
    return 1.0
