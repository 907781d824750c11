"""Bytes and seconds of areas and tokens, for an attention layer on a machine."""

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

from boost_core.hardware import BYTES

Exchange = Literal["keys", "latents"]  # what goes between nodes; or keys for queries and outputs as they are

BACKWARD = 2.5  # products of attention's backward pass for each forward: five for two


@dataclass(frozen=True)
class AttentionLayer:
    """One layer's attention on a tensor parallel rank, whose group is the part of a node next to it.

    Attributes:
        hidden_size: Width of the queries of all heads.
        key_size: Width of the keys of all key heads; values have the same.
        heads: Query heads.
        rank: Rank of the latents from which keys and values are computed; ``None`` if there are none.
        tensor_parallel_size: Number of ranks over which heads are split.
        element_bytes: Bytes per element sent and kept.
    """

    hidden_size: int
    key_size: int
    heads: int
    rank: int | None = None
    tensor_parallel_size: int = 1
    element_bytes: int = 2

    @property
    def key_bytes(self) -> int:
        """Bytes of a token's keys and values that a rank sends."""
        return 2 * self.key_size * self.element_bytes // self.tensor_parallel_size

    @property
    def query_bytes(self) -> int:
        """Bytes of a token's queries, or of its outputs."""
        return self.hidden_size * self.element_bytes // self.tensor_parallel_size

    @property
    def latent_bytes(self) -> int:
        """Bytes of a rank's share of a token's two latents, as only shares cross the fabric.

        Raises:
            ValueError: This layer does not compute keys and values from latents.
        """
        return 2 * self.share_bytes

    @property
    def share_bytes(self) -> int:
        """Bytes of a rank's share of one latent of a token.

        Raises:
            ValueError: As for ``latent_bytes``.
        """
        if self.rank is None:
            raise ValueError("a layer without a rank has no latents to send; send keys")
        return self.rank * self.element_bytes // self.tensor_parallel_size

    @property
    def gathered_bytes(self) -> int:
        """Bytes that the node's other ranks contribute to make a token's latents whole."""
        return (self.tensor_parallel_size - 1) * self.latent_bytes

    @property
    def projection_flops(self) -> float:
        """FLOPs to compute a received token's keys and values from latents."""
        return 4 * (self.rank or 0) * self.key_size / self.tensor_parallel_size

    @property
    def kept_bytes(self) -> int:
        """Bytes kept per token until the backward pass: the output, and a log-sum-exp of each head in fp32."""
        return self.query_bytes + max(BYTES["fp32"], self.element_bytes) * self.heads // self.tensor_parallel_size

    def asking_bytes(self, backward: bool, moved: Exchange = "keys") -> int:
        """Bytes sent per token whose attention is computed elsewhere.

        Forward, its queries; backward, also the output's gradient and what is kept. As latents, a share of one either
        way, as what is kept stays where it is computed.
        """
        if moved == "latents":
            return self.share_bytes
        return 2 * self.query_bytes + self.kept_bytes if backward else self.query_bytes

    def answering_bytes(self, backward: bool, moved: Exchange = "keys") -> int:
        """Bytes sent back per such token: what is kept, or the gradient of its queries; or a share of a latent."""
        if moved == "latents":
            return self.share_bytes
        return self.query_bytes if backward else self.kept_bytes

    def moved_bytes(self, backward: bool, moved: Exchange = "keys") -> tuple[int, int]:
        """Bytes sent per such token, and sent back."""
        return self.asking_bytes(backward, moved), self.answering_bytes(backward, moved)

    def asking_gathered_bytes(self, backward: bool) -> int:
        """Bytes that the node's other ranks contribute to what is sent of such a token as latents.

        Backward, the latents of its queries are gathered again.
        """
        return (2 if backward else 1) * self.answering_summed_bytes

    @property
    def answering_summed_bytes(self) -> int:
        """Bytes that they contribute to the sum that is sent back."""
        return (self.tensor_parallel_size - 1) * self.share_bytes

    def moved_flops(self, backward: bool) -> float:
        """FLOPs per such token to make queries from latents and latents from outputs.

        Backward, queries are made again; then come the gradients of both products' inputs and weights.
        """
        return (10 if backward else 4) * (self.rank or 0) * self.hidden_size / self.tensor_parallel_size

    @property
    def foreign_bytes(self) -> int:
        """Bytes kept per such token where it is computed, if latents travel: what is kept, and a share of latents."""
        return self.kept_bytes + self.share_bytes

    def sent_bytes(self, exchange: Exchange) -> int:
        """Bytes of a token that is sent to another node."""
        return self.key_bytes if exchange == "keys" else self.latent_bytes

    def flops(self, area: float) -> float:
        """FLOPs of some pairs, forward: two products of a multiplication and an addition each."""
        return 4 * area * self.hidden_size / self.tensor_parallel_size


@dataclass(frozen=True)
class Rates:
    """What a rank does per second while all ranks are at work.

    Attributes:
        flops: FLOPs of attention over long pieces, and of products.
        node_bytes: Bytes to ranks of its node, in one direction.
        fabric_bytes: Bytes to ranks of other nodes.
        by_piece: Whether kernels process each chunk separately, so that attention over short ones is slower.
    """

    flops: float
    node_bytes: float
    fabric_bytes: float
    by_piece: bool = True


def efficiency(piece_tokens: float) -> float:
    """The share of the full rate that attention reaches if documents are cut into pieces of this many tokens.

    A quarter at 512 (FCP, arXiv 2605.08524), 90 % at 2K, all from 4K; interpolated on a logarithmic scale in between,
    and proportional below. This is for single blocks on one kind of GPU. Kernels that process many pieces at once are
    reported to lose nothing from 128 tokens on (DistCA, arXiv 2510.18121), so this is a conservative estimate.
    """
    points = ((512, 0.25), (2048, 0.9), (4096, 1.0))
    if piece_tokens <= points[0][0]:
        return points[0][1] * piece_tokens / points[0][0]
    for (low, share), (high, more) in pairwise(points):
        if piece_tokens <= high:
            return share + (more - share) * math.log(piece_tokens / low) / math.log(high / low)
    return 1.0
