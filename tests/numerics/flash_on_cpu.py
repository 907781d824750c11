"""Flash attention of packed pieces on CPU: torch's operations, with kernels of ours that read the same arguments.

The operations and their schemas are the real ones; only what they do on a GPU is done here, by masks in fp64.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import torch

from boost_core.context import exchange

_registered = torch.library.Library("aten", "IMPL")


@contextmanager
def flash_on_cpu() -> Iterator[None]:
    """Attend on CPU as a GPU does."""
    _register()
    with patch.object(exchange, "reads_lengths_on_device", lambda _: True):
        yield


def _hidden(rows: int, columns: int, causal: bool, left: int | None, right: int | None, most_keys: int) -> torch.Tensor:
    """Which keys each query does not see, where the last query and the last key stand side by side.

    As torch's ``flash_api.cpp`` has it, "no limit after a query" is as many keys as any piece has at most.
    """
    after = torch.arange(columns)[None] - torch.arange(rows)[:, None] - (columns - rows)  # how far behind a query
    right = 0 if causal else right
    before, behind = (-1 if side is None or side >= most_keys else side for side in (left, right))
    if before >= 0 and behind < 0:
        behind = most_keys
    hidden = torch.zeros(rows, columns, dtype=torch.bool)
    if before >= 0:
        hidden |= after < -before
    if behind >= 0:
        hidden |= after > behind
    return hidden


def _spans(begin: torch.Tensor, longest: int) -> list[slice]:
    assert begin.dtype == torch.int32
    ends = begin.tolist()
    assert longest >= max(end - start for start, end in pairwise(ends))
    return [slice(start, end) for start, end in pairwise(ends)]


@cache
def _register() -> None:
    def forward(
        query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, begin_q: torch.Tensor, begin_k: torch.Tensor,
        max_q: int, max_k: int, dropout: float, causal: bool, mask_back: bool, *, scale: Any = None,
        window_size_left: int | None = None, window_size_right: int | None = None, **others: Any,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        assert (dropout, mask_back, scale) == (0.0, False, None) and not any(x is not None for x in others.values())
        group, outs, sums = query.shape[1] // key.shape[1], [], []
        for rows, columns in zip(_spans(begin_q, max_q), _spans(begin_k, max_k), strict=True):
            q, k, v = query[rows].double(), key[columns].double(), value[columns].double()
            hidden = _hidden(len(q), len(k), causal, window_size_left, window_size_right, max_k)
            score = torch.einsum("ihe,jhe->hij", q, k.repeat_interleave(group, 1)) * q.shape[-1] ** -0.5
            score = score.masked_fill(hidden, -torch.inf)
            outs.append(torch.einsum("hij,jhe->ihe", score.softmax(-1), v.repeat_interleave(group, 1)))
            sums.append(score.logsumexp(-1))
        unused = torch.empty(0)
        # On a GPU log-sum-exps are fp32; here as exact as the rest, so that one tolerance does.
        return torch.cat(outs).to(query.dtype), torch.cat(sums, dim=1), unused, unused, unused

    def backward(
        grad: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, out: torch.Tensor,
        lse: torch.Tensor, begin_q: torch.Tensor, begin_k: torch.Tensor, max_q: int, max_k: int, dropout: float,
        causal: bool, _state: torch.Tensor, _unused: torch.Tensor, *, scale: Any = None,
        window_size_left: int | None = None, window_size_right: int | None = None,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        assert (dropout, scale) == (0.0, None) and lse.is_contiguous() and lse.shape == query.shape[1::-1]
        group, size = query.shape[1] // key.shape[1], query.shape[-1]
        found: list[list[torch.Tensor]] = [[], [], []]
        for rows, columns in zip(_spans(begin_q, max_q), _spans(begin_k, max_k), strict=True):
            q, k, v = query[rows], key[columns].repeat_interleave(group, 1), value[columns].repeat_interleave(group, 1)
            hidden = _hidden(len(q), len(k), causal, window_size_left, window_size_right, max_k)
            score = (torch.einsum("ihe,jhe->hij", q, k) * size**-0.5).masked_fill(hidden, -torch.inf)
            share = (score - lse[:, rows].unsqueeze(-1)).exp()
            of_all = (grad[rows] * out[rows]).sum(-1).t().unsqueeze(-1)
            of_score = share * (torch.einsum("ihe,jhe->hij", grad[rows], v) - of_all) * size**-0.5
            wide = torch.einsum("hij,ihe->jhe", of_score, q), torch.einsum("hij,ihe->jhe", share, grad[rows])
            shared = (x.unflatten(1, (-1, group)).sum(2) for x in wide)
            for parts, part in zip(found, (torch.einsum("hij,jhe->ihe", of_score, k), *shared), strict=True):
                parts.append(part)
        return tuple(torch.cat(parts) for parts in found)

    _registered.impl("_flash_attention_forward", forward, "CPU")
    _registered.impl("_flash_attention_backward", backward, "CPU")
