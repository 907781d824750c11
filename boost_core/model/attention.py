"""Causal attention over the local heads, with rotary position embeddings.

Where positions see only a sliding window (Longformer, arXiv 2004.05150), or documents that share a sequence must not
see each other, each document is attended to by itself. Where a rank has some of a sequence's tokens,
``Rotation.attention`` is context-parallel attention (``context.attention``).

Shape suffixes: b sequences, s positions, h heads, e head size; g projections, T = b·s tokens, d = h·e; n places for
documents in a sequence.
"""

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from functools import cache, partial
from inspect import signature
from typing import Any, Protocol

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import pad, rms_norm, scaled_dot_product_attention

from boost_core.config.model import ModelConfig, RopeScalingConfig
from boost_core.kernels.launch import Part
from boost_core.kernels.rotary import rotary
from boost_core.model.low_rank import Bottleneck, Dense
from boost_core.parallel.btp import Exchanged, GradientSinks, PartialLatents
from boost_core.parallel.recompute import Crossing, Segments, end_turn

# The frequencies of rotary position embeddings, and their scaling for sequences longer than a model was trained on.
#
# Pair i of a head's e elements turns by θ^(−2i/e) per position (RoFormer, arXiv 2104.09864). Scaled by a factor s, slow
# pairs turn s times more slowly and fast ones as before, with a ramp between the two:
#
# ======  ============================================================================================================
# llama3  by how often a pair turns in the original length: up to ``low_freq_factor`` times it is slow, from
#         ``high_freq_factor`` times on fast (Llama 3.1's reference code)
# yarn    by the pair's number, between those that turn ``beta_slow`` and ``beta_fast`` times; and queries and keys are
#         multiplied by ``attention_factor`` (YaRN, arXiv 2309.00071)
# ======  ============================================================================================================
#
# Shape suffixes: e here stands for the pairs of a head.


def rotary_frequencies(
    head_size: int, theta: float, scaling: RopeScalingConfig | None, device: torch.device
) -> torch.Tensor:
    """Radians per position for each pair, ``[e/2]`` in float64, so that far positions keep the bits of their angles."""
    plain_e: torch.Tensor = theta ** -(torch.arange(0, head_size, 2, dtype=torch.float64, device=device) / head_size)
    if scaling is None:
        return plain_e

    original_length = scaling.original_max_position_embeddings
    if scaling.rope_type == "llama3":
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        assert low is not None and high is not None
        turns_e = original_length * plain_e / (2 * math.pi)
        fast_e = ((turns_e - low) / (high - low)).clamp(0, 1)  # how fast each pair is taken to be, from 0 to 1
    else:
        assert scaling.beta_fast is not None and scaling.beta_slow is not None
        fast, slow = (  # the pairs that turn so often
            head_size * math.log(original_length / (times * 2 * math.pi)) / (2 * math.log(theta))
            for times in (scaling.beta_fast, scaling.beta_slow)
        )
        first, last = max(math.floor(fast), 0), min(math.ceil(slow), head_size - 1)
        number_e = torch.arange(len(plain_e), dtype=plain_e.dtype, device=plain_e.device)
        fast_e = 1 - ((number_e - first) / (last - first or 0.001)).clamp(0, 1)
    return plain_e * (fast_e + (1 - fast_e) / scaling.factor)


# Attention of whole sequences, by kernels that torch has.


@cache
def backends(device: torch.device) -> list[SDPBackend]:
    """Return the kernels to attend with, the first that take a type and shape before the others.

    cuDNN's are the fastest from Hopper on (release notes of torch 2.5: up to 75 % faster than FlashAttention 2), unless
    the process has them switched off. What torch prefers by itself has changed from version to version.
    """
    preferred = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    if device.type == "cuda" and torch.backends.cuda.cudnn_sdp_enabled():  # type: ignore[no-untyped-call]
        hopper = torch.cuda.get_device_capability(device) >= (9, 0)
        preferred.insert(0 if hopper else 1, SDPBackend.CUDNN_ATTENTION)
    return preferred


def dense_attention(
    query_bhse: torch.Tensor, key_bjse: torch.Tensor, value_bjse: torch.Tensor, sees: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention of sequences, ``[b, h, s, e]``: causal, or as a mask says; h is a multiple of j."""
    with sdpa_kernel(backends(query_bhse.device), set_priority=True):
        return scaled_dot_product_attention(
            query_bhse, key_bjse, value_bjse, attn_mask=sees, is_causal=sees is None, enable_gqa=True
        )


# Attention within consecutive documents, separated by their start positions: no mask of all pairs.
#
# A document's query sees the keys of its own past, or of a window of it. On a GPU flash attention reads the starts of
# documents from the device's memory, so that a captured step serves whatever lengths the next batch has; elsewhere
# each document is attended to by itself.
#
# Shape suffixes: T tokens, h heads, j heads of keys and values, e head size; m tokens of one document; n places for
# documents, b sequences of s tokens.

_LARGEST_HEAD, _HEAD_MULTIPLE = 256, 8  # limits of flash attention


def begins(start_bn: torch.Tensor, length: int) -> torch.Tensor:
    """Return where the documents of all sequences begin and the last one ends, ``[b·n + 1]``, 32 bits, non-decreasing.

    Args:
        start_bn: Where each begins in its sequence, in order; s in unused places.
        length: Tokens of a sequence, s.
    """
    tokens = len(start_bn) * length
    sequence_b1 = torch.arange(0, tokens, length, dtype=torch.int32, device=start_bn.device).unsqueeze(1)
    return pad((start_bn + sequence_b1).flatten(), (0, 1), value=tokens)


def reads_lengths_on_device(query_The: torch.Tensor) -> bool:
    """Return whether attention for such queries needs no lengths on the host."""
    head_size = query_The.shape[-1]
    fits = head_size <= _LARGEST_HEAD and head_size % _HEAD_MULTIPLE == 0
    return query_The.is_cuda and query_The.dtype in (torch.bfloat16, torch.float16) and fits


def attention_within(
    query_The: torch.Tensor, key_Tje: torch.Tensor, value_Tje: torch.Tensor, begin_n: torch.Tensor, longest: int,
    window: int | None,
) -> torch.Tensor:  # fmt: skip
    """Causal attention of each document to itself.

    Args:
        query_The: Queries; h is a multiple of j.
        key_Tje: Keys.
        value_Tje: Values.
        begin_n: As returned by ``begins``; a document may have no tokens.
        longest: Upper bound on the tokens of a document.
        window: How many tokens each sees, itself included; ``None`` for all before it.

    Returns:
        ``[T, h, e]``.
    """
    if not reads_lengths_on_device(query_The):
        return one_by_one(query_The, key_Tje, value_Tje, begin_n, window)
    seen = (-1 if window is None else window - 1, 0)  # tokens before a query, and after it
    return _varlen_attention()(query_The, key_Tje, value_Tje, begin_n, begin_n, longest, longest, window_size=seen)  # type: ignore[no-any-return]


def one_by_one(
    query_The: torch.Tensor, key_Tje: torch.Tensor, value_Tje: torch.Tensor, begin_n: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Reference for which the host reads the lengths; arguments as for ``attention_within``.

    A long document is attended to a window of queries at a time, so no mask is larger than two windows.
    """
    lengths = [length for length in begin_n.diff().tolist() if length]
    queries, keys, values = (torch.split(x, lengths) for x in (query_The, key_Tje, value_Tje))
    outs = []
    for length, query_mhe, key_mje, value_mje in zip(lengths, queries, keys, values, strict=True):
        step = length if window is None else min(window, length)
        for first in range(0, length, step):
            past, end, sees = min(first, step - 1), min(first + step, length), None
            parts = query_mhe, key_mje, value_mje  # slicing all of them would cost their gradients a pass
            if step < length:
                sees = torch.ones(end - first, end - first + past, dtype=torch.bool, device=query_mhe.device)
                sees = sees.tril(past).triu(past + 1 - step)
                parts = query_mhe[first:end], key_mje[first - past : end], value_mje[first - past : end]
            query_1hme, key_1jme, value_1jme = (part.transpose(0, 1).unsqueeze(0) for part in parts)
            outs.append(dense_attention(query_1hme, key_1jme, value_1jme, sees).squeeze(0).transpose(0, 1))
    return torch.cat(outs)


@cache
def _varlen_attention() -> Callable[..., Any]:
    # Imported here because it registers operations, which takes time, and only this function needs them.
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 accepts fewer heads of keys without an option.
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    return partial(varlen_attn, **grouped)


class Attend(Protocol):
    """A custom way for the tokens of whole sequences to attend."""

    def for_layer(self) -> "Attend":
        """Return one for a single layer, whose forward pass and recomputation call it."""

    def __call__(self, query_The: torch.Tensor, key_Tje: torch.Tensor, value_Tje: torch.Tensor) -> torch.Tensor:
        """Compute attention, ``[T, h, e]``."""


class Heads(Protocol):
    """The projections in front of attention and behind it, of one block.

    Attributes:
        head_size: Width of a head.
        qk_norm: Whether each head of queries and keys is normed.
        query_key_value: The projections of which attention has the results.
        output: Those of attention's output.
        sinks: Where weight gradients that are computed outside of autograd go.
    """

    head_size: int
    qk_norm: bool
    query_key_value: Bottleneck | Dense
    output: Bottleneck | Dense
    sinks: GradientSinks

    def heads(
        self, exchanged: list[Exchanged], carried: Crossing, part: Part | None = None
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Return queries, keys and values, not rotated yet (``causal_attention``), and their latents."""


# The output projections' partial latents, the latents that cross into the next block, and what is called with the
# block's output.
Attended = tuple[list[PartialLatents], list[torch.Tensor], Callable[[torch.Tensor], None]]


class Attention(Protocol):
    """How a part of the tokens attends in one layer where it needs keys of others.

    Attributes:
        exchanges_keys: Whether these come from other ranks; another computation then goes on there alone.
    """

    exchanges_keys: bool

    def for_layer(self) -> "Attention":
        """Return one for a single layer, whose forward pass and recomputation call it."""

    async def __call__(
        self, block: Heads, segments: Segments, exchanged: list[Exchanged], carried: Crossing, rotation: "Rotation"
    ) -> Attended:
        """Run a block from the exchange of its latents of queries, keys and values to that of its output's.

        Args:
            block: The projections.
            segments: Runs what is recomputed.
            exchanged: The latents.
            carried: Those that cross into the block.
            rotation: The rotation of the tokens.
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
    turned, length = rotary(parts, *rotation.angles(parts[0].dtype)), rotation.sequence_length
    attend: Callable[..., torch.Tensor] | None = rotation.attend
    if attend is None and (begin_n := rotation.begins_of(parts[0])) is not None:
        attend = partial(attention_within, begin_n=begin_n, longest=length, window=rotation.window)
    if attend is not None:
        return attend(*(x_Td.view(len(x_Td), -1, head_size) for x_Td in turned)).flatten(1)
    by_head = [x_Td.view(-1, length, x_Td.shape[-1] // head_size, head_size).transpose(1, 2) for x_Td in turned]
    return dense_attention(*by_head).transpose(1, 2).flatten(2).flatten(0, 1)


@dataclass
class PartAttention:
    """Attention of a part of the tokens of sequences, whose halves are computed in turns (``kernels.launch.Part``).

    All but attention treats each token by itself. Attention is computed for all tokens in one call: a kernel with half
    of the queries would leave most of a GPU's multiprocessors idle at its end.

    Attributes:
        part: The part.
        exchanges_keys: As in ``Attention``.
    """

    part: Part
    exchanges_keys: bool = False

    def for_layer(self) -> "PartAttention":
        """Return itself: all parts are in the same layer."""
        return self

    async def __call__(
        self, block: Heads, segments: Segments, exchanged: list[Exchanged], carried: Crossing, rotation: "Rotation"
    ) -> Attended:
        """As in ``Attention``."""
        heads, of_qkv = segments(partial(block.heads, part=self.part), exchanged, carried)
        if self.part.place is None:
            out_Td = causal_attention(heads, rotation, block.head_size)
            # Detached: the graph's nodes refer to the halves, which must not refer to the graph.
            self.part.halves.attended[:] = [out_Td.detach()]
        await end_turn()
        if self.part.place is not None:
            out_Td = self.part.of(*self.part.halves.attended)
        return block.output.down_project(out_Td, part=self.part), of_qkv, lambda _: None


def normed_heads(x_Td: torch.Tensor, scale_e: torch.Tensor, epsilon: float) -> torch.Tensor:
    """Norm each head of queries or keys by itself (RMSNorm).

    Scores then do not grow with the weights that queries and keys come from (arXiv 2302.05442).
    """
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
        attention: How a block's tokens attend; ``None`` where this rank has all tokens of its sequences.
        parts: The rotation of each part of the tokens, where they are split into parts of which it has some each.
    """

    def __init__(
        self, sequence_length: int, head_size: int, theta: float, device: torch.device,
        scaling: RopeScalingConfig | None = None, window: int | None = None,
    ) -> None:  # fmt: skip
        self.sequence_length = sequence_length
        self.window = None if window is None or window >= sequence_length else window
        self.attend: Attend | None = None
        self.attention: Attention | None = None
        frequency_e = rotary_frequencies(head_size, theta, scaling, device)
        angle_se = torch.outer(torch.arange(sequence_length, dtype=torch.float64, device=device), frequency_e)
        growth = 1.0 if scaling is None else scaling.attention_factor or 1.0
        self._cosine_se, self._sine_se = growth * angle_se.cos(), growth * angle_se.sin()
        self._start_bn: torch.Tensor | None = None
        self._begin_n: torch.Tensor | None = None
        self._cast: dict[torch.dtype, tuple[torch.Tensor, torch.Tensor]] = {}
        self._whole: dict[int, torch.Tensor] = {}
        self.parts: Sequence[Rotation] = ()

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

    def of_tokens(self, position_T: torch.Tensor, attention: Attention | None = None) -> "Rotation":
        """Return a copy for tokens at these positions of their sequences, and how they attend, if not locally."""
        own = copy(self)
        own._cosine_se, own._sine_se = self._cosine_se[position_T], self._sine_se[position_T]
        own._cast, own.attention = {}, attention or self.attention
        return own

    def attending(
        self, attend: Attend | None, attention: Attention | None = None, parts: Sequence["Rotation"] = ()
    ) -> "Rotation":
        """Return a copy for tokens that attend in custom ways; arguments are as the attributes."""
        own = copy(self)
        own.attend, own.attention, own.parts = attend, attention, parts
        return own

    def for_layer(self) -> "Rotation":
        """Return a copy for one layer, for its forward pass and its recomputation."""
        if self.attend is None and self.attention is None:
            return self
        attend = None if self.attend is None else self.attend.for_layer()
        attention = None if self.attention is None else self.attention.for_layer()
        return self.attending(attend, attention, self.parts)

    def splits(self, token_T: torch.Tensor, count: int) -> list[tuple[torch.Tensor, "Rotation"]]:
        """Split tokens, ``[T]``, in parts, each with its rotation.

        Args:
            token_T: The tokens.
            count: Number of parts with as many sequences, unless the parts are known.
        """
        if self.parts:
            sizes = [len(part._cosine_se) for part in self.parts]
            return list(zip(torch.split(token_T, sizes), self.parts, strict=True))
        parts = [part_bs.flatten() for part_bs in token_T.view(-1, self.sequence_length).chunk(count)]
        if self._start_bn is None:
            return [(part_T, self) for part_T in parts]
        starts = self._start_bn.chunk(len(parts))
        return [(part_T, self.with_documents(start_bn)) for part_T, start_bn in zip(parts, starts, strict=True)]

    def begins_of(self, tokens_gTd: torch.Tensor) -> torch.Tensor | None:
        """Return where a micro-batch's documents begin and the last one ends; ``None`` if all see all before them."""
        if self._begin_n is not None or self.window is None:
            return self._begin_n
        tokens, length = tokens_gTd.shape[1], self.sequence_length
        if tokens not in self._whole:  # each sequence is one document
            self._whole[tokens] = torch.arange(0, tokens + 1, length, dtype=torch.int32, device=tokens_gTd.device)
        return self._whole[tokens]

    def angles(self, compute_type: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cosines and sines, ``[s, e/2]``, in at least fp32."""
        dtype = torch.promote_types(compute_type, torch.float32)
        if dtype not in self._cast:
            self._cast[dtype] = (self._cosine_se.to(dtype), self._sine_se.to(dtype))
        return self._cast[dtype]
