"""Attention within consecutive documents, separated by their start positions: no mask of all pairs.

A document's query sees the keys of its own past, or of a window of it. On a GPU flash attention reads the starts of
documents from the device's memory, so that a captured step serves whatever lengths the next batch has; elsewhere
each document is attended to by itself.

Shape suffixes: T tokens, h heads, j heads of keys and values, e head size; m tokens of one document; n places for
documents, b sequences of s tokens.
"""

from collections.abc import Callable
from functools import cache, partial
from inspect import signature
from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention

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
    if reads_lengths_on_device(query_The):
        return _flash(query_The, key_Tje, value_Tje, begin_n, longest, window)
    return one_by_one(query_The, key_Tje, value_Tje, begin_n, window)


def one_by_one(
    query_The: torch.Tensor, key_Tje: torch.Tensor, value_Tje: torch.Tensor, begin_n: torch.Tensor, window: int | None
) -> torch.Tensor:
    """Reference for which the host reads the lengths; arguments as for ``attention_within``."""
    lengths = [length for length in begin_n.diff().tolist() if length]
    queries, keys, values = (torch.split(x, lengths) for x in (query_The, key_Tje, value_Tje))
    return torch.cat(
        [_alone(query, key, value, window) for query, key, value in zip(queries, keys, values, strict=True)]
    )


def _flash(
    query_The: torch.Tensor, key_Tje: torch.Tensor, value_Tje: torch.Tensor, begin_n: torch.Tensor, longest: int,
    window: int | None,
) -> torch.Tensor:  # fmt: skip
    seen = (-1 if window is None else window - 1, 0)  # tokens before a query, and after it
    out_The: torch.Tensor = _varlen_attention()(
        query_The, key_Tje, value_Tje, begin_n, begin_n, longest, longest, window_size=seen
    )
    return out_The


@cache
def _varlen_attention() -> Callable[..., Any]:
    # Imported here because it registers operations, which takes time, and only this function needs them.
    from torch.nn.attention.varlen import varlen_attn

    # torch 2.11 accepts fewer heads of keys without an option.
    grouped: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in signature(varlen_attn).parameters else {}
    return partial(varlen_attn, **grouped)


def _alone(query_mhe: torch.Tensor, key_mje: torch.Tensor, value_mje: torch.Tensor, window: int | None) -> torch.Tensor:
    """Attend within one document; a long one a window of queries at a time, so no mask is larger than two windows."""
    length = len(query_mhe)
    if window is None or window >= length:
        return _scored(query_mhe, key_mje, value_mje, None)
    parts = []
    for first in range(0, length, window):
        past, end = min(first, window - 1), min(first + window, length)
        keys = slice(first - past, end)
        sees = torch.ones(end - first, end - first + past, dtype=torch.bool, device=query_mhe.device)
        parts.append(
            _scored(query_mhe[first:end], key_mje[keys], value_mje[keys], sees.tril(past).triu(past + 1 - window))
        )
    return torch.cat(parts)


def _scored(
    query_mhe: torch.Tensor, key_mje: torch.Tensor, value_mje: torch.Tensor, sees: torch.Tensor | None
) -> torch.Tensor:
    query_1hme, key_1jme, value_1jme = (x.transpose(0, 1).unsqueeze(0) for x in (query_mhe, key_mje, value_mje))
    out_1hme = scaled_dot_product_attention(
        query_1hme, key_1jme, value_1jme, attn_mask=sees, is_causal=sees is None, enable_gqa=True
    )
    return out_1hme.squeeze(0).transpose(0, 1)
