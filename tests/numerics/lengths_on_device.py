"""Attention by lengths that stay on the device, on CPU: torch's operations with kernels that ours could not tell apart.

torch's function, its autograd formula and its operations are the real ones; only what they do on a GPU is done here by
masks.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch

from boost_core.model import attention


@contextmanager
def lengths_on_device() -> Iterator[None]:
    """Attend on CPU as a GPU does."""
    _register()
    with patch.object(attention, "reads_lengths_on_device", lambda _: True):
        yield


def masked(
    query_The: torch.Tensor, key_Tje: torch.Tensor, value_Tje: torch.Tensor, begin_n: torch.Tensor, window: int | None
) -> torch.Tensor:
    """What ``documents.attention_within`` gives, by a mask of all pairs."""
    value_The = value_Tje.repeat_interleave(query_The.shape[1] // value_Tje.shape[1], dim=1)
    return torch.einsum("hij,jhe->ihe", _shares(query_The, key_Tje, begin_n, window), value_The)


def _shares(query_The: torch.Tensor, key_Tje: torch.Tensor, begin_n: torch.Tensor, window: int | None) -> torch.Tensor:
    place_T = torch.arange(len(query_The), dtype=begin_n.dtype)
    document_T = torch.searchsorted(begin_n, place_T, right=True)
    sees_TT = (document_T[:, None] == document_T[None]).tril()
    if window is not None:
        sees_TT = sees_TT.triu(1 - window)
    key_The = key_Tje.repeat_interleave(query_The.shape[1] // key_Tje.shape[1], dim=1)
    score_hTT = torch.einsum("ihe,jhe->hij", query_The, key_The) * query_The.shape[-1] ** -0.5
    return score_hTT.masked_fill(~sees_TT, -torch.inf).softmax(dim=-1)


@cache
def _register() -> None:
    from torch.nn.attention import varlen  # noqa: F401, registers the operations

    @torch.library.register_kernel("torch_attn::_varlen_attn", "cpu")
    def forward(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, begin_q: torch.Tensor, begin_k: torch.Tensor,
        _max_q: int, _max_k: int, is_causal: bool = False, _scale: Any = None, window_size: Any = None, *_others: Any,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        assert torch.equal(begin_q, begin_k) and begin_q.dtype == torch.int32 and window_size[1] == 0
        assert is_causal == (window_size[0] == -1) and begin_q[-1] == len(query)
        window = None if is_causal else window_size[0] + 1
        out = masked(query.double(), key.double(), value.double(), begin_q, window).to(query.dtype).contiguous()
        return out, query.new_zeros(query.shape[1::-1], dtype=torch.float32), torch.zeros(2, dtype=torch.uint64)

    @torch.library.register_kernel("torch_attn::_varlen_attn_backward", "cpu")
    def backward(
        grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, _out: torch.Tensor,
        _lse: torch.Tensor, begin_q: torch.Tensor, _begin_k: torch.Tensor, _max_q: int, _max_k: int, is_causal: bool,
        _state: torch.Tensor, _scale: Any = None, window_size: Any = None,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        window = None if is_causal else window_size[0] + 1
        given, q, k, v = (x.double() for x in (grad, query, key, value))
        group, (tokens, heads, size) = q.shape[1] // k.shape[1], k.shape
        share = _shares(q, k, begin_q, window)
        of_share = torch.einsum("ihe,jhe->hij", given, v.repeat_interleave(group, dim=1))
        of_score = share * (of_share - (of_share * share).sum(dim=-1, keepdim=True)) * size**-0.5
        dq = torch.einsum("hij,jhe->ihe", of_score, k.repeat_interleave(group, dim=1))
        dk, dv = torch.einsum("hij,ihe->jhe", of_score, q), torch.einsum("hij,ihe->jhe", share, given)
        shared = (x.view(tokens, heads, group, size).sum(dim=2) for x in (dk, dv))
        return tuple(x.to(query.dtype).contiguous() for x in (dq, *shared))
