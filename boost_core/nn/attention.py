"""Causal attention over the local heads, with rotary position embeddings.

Where positions see only a sliding window (Longformer, arXiv 2004.05150), or documents that share a sequence must not
see each other, ``documents`` attends to each document by itself. Where a rank has some of a sequence's tokens, whoever
deals them says how they attend.

Shape suffixes: b sequences, s positions, h heads, e head size; g projections, T = b·s tokens, d = h·e; n places for
documents in a sequence.
"""

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Protocol

import torch
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from boost_core.config.model import ModelConfig, RopeScalingConfig
from boost_core.kernels.rotary import rotary
from boost_core.nn.documents import attention_within, begins
from boost_core.nn.rope import rotary_frequencies


@dataclass(frozen=True)
class KeyMaker:
    """How keys and values are made from latents, for any tokens.

    Attributes:
        weights: What it uses: parameters, or parts of them.
        make: From both latents, ``[n, r]`` each, such weights and the tokens' rotation: rotated keys, and values,
            ``[n, j, e]`` with j heads each.
    """

    weights: Sequence[torch.Tensor]
    make: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], "Rotation"], tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class KeyLatents:
    """What keys and values are made from: ranks that attend to them may receive this, and make them themselves.

    Attributes:
        of_keys: ``[T, r]``.
        of_values: The same.
        maker: Makes them.
    """

    of_keys: torch.Tensor
    of_values: torch.Tensor
    maker: KeyMaker


@dataclass(frozen=True)
class TaskMaker:
    """What it takes to compute attention for other ranks whose queries and outputs travel as latents.

    Attributes:
        weights: What queries are made with: parameters, or parts of them.
        make: From latents, ``[n, r]``, such weights and the tokens' rotation: rotated queries, ``[n, h, e]``.
        down: The weight that turns outputs into latents, ``[h·e, r]``: a parameter, or a view of one.
    """

    weights: Sequence[torch.Tensor]
    make: Callable[[torch.Tensor, Sequence[torch.Tensor], "Rotation"], torch.Tensor]
    down: torch.Tensor


@dataclass(frozen=True)
class QueryLatents:
    """What queries are made from: ranks that compute their attention may receive this, and make them themselves.

    Attributes:
        of_queries: ``[T, r]``.
        maker: Makes them, and turns their outputs into latents.
    """

    of_queries: torch.Tensor
    maker: TaskMaker


class Attend(Protocol):
    """A custom way for the tokens of whole sequences to attend."""

    def for_layer(self) -> "Attend":
        """Return one for a single layer, whose forward pass and recomputation call it."""

    def __call__(self, query_The: torch.Tensor, key_Tje: torch.Tensor, value_Tje: torch.Tensor) -> torch.Tensor:
        """Compute attention, ``[T, h, e]``."""


class DealtAttention(Protocol):
    """Attention of tokens whose sequences are dealt to several ranks; other work may run while keys are under way.

    Attributes:
        sends_latents: Whether ``start`` needs what keys and values are made from.
        moves_latents: Whether ``start`` needs what queries are made from; the output's latents are then incomplete
            without ``with_returned``.
    """

    @property
    def sends_latents(self) -> bool: ...  # noqa: D102

    @property
    def moves_latents(self) -> bool: ...  # noqa: D102

    def for_layer(self) -> "DealtAttention":
        """Return one for a single layer, whose forward pass and recomputation call it."""

    def start(
        self, query_The: torch.Tensor, key_Tje: torch.Tensor, value_Tje: torch.Tensor, latents: KeyLatents | None,
        of_queries: QueryLatents | None,
    ) -> torch.Tensor:  # fmt: skip
        """Start to exchange keys, and return the queries for ``finish``; may be recomputed, without sending again."""

    def finish(self, query_The: torch.Tensor) -> torch.Tensor:
        """Wait for the keys, and compute attention, ``[T, h, e]``, which is kept for the backward pass."""

    def with_returned(self, query_The: torch.Tensor, latent_Tr: torch.Tensor) -> torch.Tensor:
        """Put what other ranks have computed of this rank's outputs into their latents, in place.

        Args:
            query_The: What ``start`` has returned.
            latent_Tr: This rank's part of the latents, from what ``finish`` has returned.
        """

    def send_ahead_of(self, query_The: torch.Tensor, stream_Td: torch.Tensor) -> None:
        """Let the backward pass send keys again as soon as it has the gradient of the block's output.

        Args:
            query_The: What ``start`` has returned.
            stream_Td: The output.
        """


def causal_attention(parts: list[torch.Tensor], rotation: "Rotation", head_size: int) -> torch.Tensor:
    """Attend from each position to the past of its own sequence.

    Args:
        parts: Queries, keys and values in this order, in tensors ``[g, T, d]`` of one or more of them, sequences one
            after the other; fewer heads in keys and values for grouped-query attention. Owned by this call.
        rotation: The rotary embedding; its length is the length of a sequence.
        head_size: Width of a head.

    Returns:
        ``[T, d]``.
    """
    turned = rotary(parts, *rotation.angles(parts[0].dtype))
    if rotation.attend is not None:
        query, key, value = (x_Td.view(len(x_Td), -1, head_size) for x_Td in turned)
        return rotation.attend(query, key, value).flatten(1)
    length = rotation.sequence_length
    begin_n = rotation.begins_of(parts[0])
    if begin_n is not None:
        query, key, value = (x_Td.view(len(x_Td), -1, head_size) for x_Td in turned)
        return attention_within(query, key, value, begin_n, length, rotation.window).flatten(1)
    query, key, value = (
        x_Td.view(-1, length, x_Td.shape[-1] // head_size, head_size).transpose(1, 2) for x_Td in turned
    )
    out_bhse = scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
    return out_bhse.transpose(1, 2).flatten(2).flatten(0, 1)


def start_dealt_attention(
    parts: list[torch.Tensor], rotation: "Rotation", dealt: DealtAttention, head_size: int, latents: KeyLatents | None,
    of_queries: QueryLatents | None,
) -> torch.Tensor:  # fmt: skip
    """Start attention whose keys are exchanged; returns the rotated queries, ``[T, h, e]``, for ``dealt.finish``.

    Args:
        parts: As in ``causal_attention``.
        rotation: The rotary embedding.
        dealt: Exchanges keys and attends.
        head_size: Width of a head.
        latents: What keys and values are made from, if ``dealt`` sends it.
        of_queries: What queries are made from, likewise.
    """
    turned = rotary(parts, *rotation.angles(parts[0].dtype))
    query, key, value = (x_Td.view(len(x_Td), -1, head_size) for x_Td in turned)
    return dealt.start(query, key, value, latents, of_queries)


def with_normed_heads(
    parts: list[torch.Tensor], query_scale_e: torch.Tensor, key_scale_e: torch.Tensor, epsilon: float
) -> list[torch.Tensor]:
    """Norm each head of queries and keys (RMSNorm), and leave values alone; ``parts`` as in ``causal_attention``.

    Scores then do not grow with the weights that queries and keys come from (arXiv 2302.05442).
    """
    query_Td, key_Td, value_Td = (member_Td for part_gTd in parts for member_Td in part_gTd)
    normed = (normed_heads(query_Td, query_scale_e, epsilon), normed_heads(key_Td, key_scale_e, epsilon))
    return [x_Td.unsqueeze(0) for x_Td in (*normed, value_Td)]


def normed_heads(x_Td: torch.Tensor, scale_e: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Norm each head of queries or keys by itself."""
    x_The = x_Td.reshape(len(x_Td), -1, len(scale_e))
    return rms_norm(x_The, (len(scale_e),), scale_e, epsilon).view(x_Td.shape)


class Rotation:
    """The angles of rotary position embeddings for positions 0 … s−1 (RoFormer, arXiv 2104.09864), and who sees whom.

    Args:
        sequence_length: Number of positions s.
        head_size: Width of a head; even.
        theta: Base of the frequencies.
        device: Where the angles live.
        scaling: How the frequencies are scaled, if they are.
        window: How many positions each sees, itself included; ``None`` for all before it.

    Attributes:
        attend: A custom way for tokens to attend; ``None`` where all see all before them.
        dealt: How tokens attend whose sequences are dealt to several ranks; ``None`` where a rank has all tokens.
    """

    def __init__(
        self,
        sequence_length: int,
        head_size: int,
        theta: float,
        device: torch.device,
        scaling: RopeScalingConfig | None = None,
        window: int | None = None,
    ) -> None:
        self.sequence_length = sequence_length
        self.window = None if window is None or window >= sequence_length else window
        self.attend: Attend | None = None
        self.dealt: DealtAttention | None = None
        frequency_e = rotary_frequencies(head_size, theta, scaling, device)
        angle_se = torch.outer(torch.arange(sequence_length, dtype=torch.float64, device=device), frequency_e)
        growth = 1.0 if scaling is None else scaling.attention
        self._cosine_se, self._sine_se = growth * angle_se.cos(), growth * angle_se.sin()
        self._start_bn: torch.Tensor | None = None
        self._begin_n: torch.Tensor | None = None
        self._cast: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}
        self._whole: dict[int, torch.Tensor] = {}
        self._parts: Sequence[Rotation] = ()

    @classmethod
    def of(cls, model: ModelConfig, sequence_length: int, device: torch.device) -> "Rotation":
        """Make a model's rotation."""
        return cls(sequence_length, model.head_size, model.rope_theta, device, model.rope_scaling, model.sliding_window)

    def with_documents(self, start_bn: torch.Tensor | None) -> "Rotation":
        """Return a copy for tokens that see only their own document; ``None``: their own sequence.

        Positions continue across documents: rotary embeddings depend on differences of positions alone.

        Args:
            start_bn: Where each document begins in its sequence, in order; s in unused places.
        """
        if start_bn is None:
            return self
        among = copy(self)
        among._start_bn, among._begin_n = start_bn, begins(start_bn, self.sequence_length)
        return among

    def of_tokens(self, position_T: torch.Tensor, dealt: DealtAttention | None = None) -> "Rotation":
        """Return a copy for tokens at these positions of their sequences, and how they attend, if they do."""
        own = copy(self)
        own._cosine_se, own._sine_se = self._cosine_se[position_T], self._sine_se[position_T]
        own._cast, own.dealt = {}, dealt
        return own

    def attending(self, attend: Attend) -> "Rotation":
        """Return a copy for tokens with a custom way to attend."""
        own = copy(self)
        own.attend = attend
        return own

    def in_parts(self, parts: Sequence["Rotation"]) -> "Rotation":
        """Return a copy for tokens that are split into parts: those of each rotation, made by ``of_tokens``."""
        whole = copy(self)
        whole._parts = parts
        return whole

    def for_layer(self) -> "Rotation":
        """Return a copy for one layer, for its forward pass and its recomputation."""
        if self.attend is None and self.dealt is None:
            return self
        own = copy(self)
        own.attend = None if self.attend is None else self.attend.for_layer()
        own.dealt = None if self.dealt is None else self.dealt.for_layer()
        return own

    def splits(self, token_T: torch.Tensor, count: int) -> list[tuple[torch.Tensor, "Rotation"]]:
        """Split tokens, ``[T]``, in parts, each with its rotation.

        Args:
            token_T: The tokens.
            count: Number of parts with as many sequences, unless the parts are known; a single sequence is one part.
        """
        if self._parts:
            sizes = [len(part._cosine_se) for part in self._parts]
            return list(zip(torch.split(token_T, sizes), self._parts, strict=True))
        parts = [part_bs.flatten() for part_bs in token_T.view(-1, self.sequence_length).chunk(count)]
        if self._start_bn is None:
            return [(part_T, self) for part_T in parts]
        starts = self._start_bn.chunk(len(parts))
        return [(part_T, self.with_documents(start_bn)) for part_T, start_bn in zip(parts, starts, strict=True)]

    def begins_of(self, tokens_gTd: torch.Tensor) -> torch.Tensor | None:
        """Return where a micro-batch's documents begin and the last one ends; ``None`` if all see all before them."""
        if self._begin_n is not None or self.window is None:
            return self._begin_n
        tokens = tokens_gTd.shape[1]
        if tokens not in self._whole:  # each sequence is one document
            self._whole[tokens] = torch.arange(
                0, tokens + 1, self.sequence_length, dtype=torch.int32, device=tokens_gTd.device
            )
        return self._whole[tokens]

    def angles(self, compute_type: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, ``[s, e/2]``, in at least fp32."""
        dtype = torch.promote_types(compute_type, torch.float32)
        if dtype not in self._cast:
            self._cast[dtype] = (self._cosine_se.to(dtype), self._sine_se.to(dtype))
        return self._cast[dtype]
