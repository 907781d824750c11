"""The attention of one stage, piece by piece, forward and backward, by torch's kernels with log-sum-exps.

On a GPU, flash attention takes all pieces with the same mask at once; elsewhere each piece is one call. Given the
output and log-sum-exps over all keys, the backward pass gives each piece's exact part of the gradients:
p = exp(q·k − l), and dO ∘ O summed over a head is that of all keys.

Shape suffixes: T queries of the rank, n keys of the stage, h heads, j heads of keys and values, e head size; m queries
of a piece.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from boost_core.context.plan import Piece, Span
from boost_core.model.attention import reads_lengths_on_device

Attended = tuple[Piece, torch.Tensor, torch.Tensor]  # output ``[m, h, e]`` and log-sum-exps ``[m, h]`` of a piece
Gradients = tuple[Piece, torch.Tensor, torch.Tensor, torch.Tensor]  # of its queries, keys and values

_MASKED_QUERIES = (
    512  # of a call on CPU: of these and a window's keys, about as many as the queries are hidden from each
)

_flash = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward
_on_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_on_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class StageAttention:
    """Attention of a rank's queries to the keys of a stage.

    Args:
        pieces: Its pieces.
        sees: Number of tokens that each query sees, itself included; ``None`` for all before it.
        device: Where the tokens are.
    """

    def __init__(self, pieces: Sequence[Piece], sees: int | None, device: torch.device) -> None:
        self._pieces, self._sees, self._device = pieces, sees, device

    def forward(self, query_The: torch.Tensor, key_nje: torch.Tensor, value_nje: torch.Tensor) -> Iterator[Attended]:
        """Each piece's output and log-sum-exps, in a fixed order.

        Raises:
            ValueError: The queries are on a GPU, and flash attention does not support their type or head size.
        """
        if not _is_by_flash(query_The):
            for piece in self._short:
                yield piece, *_forward(piece, self._sees, query_The, key_nje, value_nje)
            return
        for batch in self._batches:
            out, lse, *_ = _flash(
                *batch.of(query_The, key_nje, value_nje), *batch.begins, *batch.longest, 0.0, batch.is_causal, False,
                window_size_left=batch.window[0], window_size_right=batch.window[1],
            )  # fmt: skip
            rows = [piece.queries[1] - piece.queries[0] for piece in batch.pieces]
            yield from zip(batch.pieces, out.split(rows), lse.t().split(rows), strict=True)

    def backward(
        self, dout_The: torch.Tensor, query_The: torch.Tensor, key_nje: torch.Tensor, value_nje: torch.Tensor,
        out_The: torch.Tensor, lse_Th: torch.Tensor,
    ) -> Iterator[Gradients]:  # fmt: skip
        """Each piece's part of the gradients, in a fixed order.

        Args:
            dout_The: The gradient of the output.
            query_The: The queries.
            key_nje: The keys of the stage.
            value_nje: The values of the stage.
            out_The: The output over all stages.
            lse_Th: Its log-sum-exps.
        """
        if not _is_by_flash(query_The):
            for piece in self._short:
                inputs = dout_The, query_The, key_nje, value_nje, out_The, lse_Th
                dquery_mhe, dkey_nje, dvalue_nje = _backward(piece, self._sees, *inputs)
                yield piece, dquery_mhe, dkey_nje, dvalue_nje
            return
        for batch in self._batches:
            dout, out, lse = (_rows(x, [piece.queries for piece in batch.pieces]) for x in (dout_The, out_The, lse_Th))
            drawn, unused = (
                torch.zeros(size, dtype=torch.uint64, device=self._device) for size in (2, 0)
            )  # no dropout
            found = _flash_backward(
                dout, *batch.of(query_The, key_nje, value_nje), out, lse.t().contiguous(), *batch.begins,
                *batch.longest, 0.0, batch.is_causal, drawn, unused,
                window_size_left=batch.window[0], window_size_right=batch.window[1],
            )  # fmt: skip
            rows, columns = ([end - first for first, end in spans] for spans in (batch.queries, batch.keys))
            parts = (x.split(lengths) for x, lengths in zip(found, (rows, columns, columns), strict=True))
            yield from zip(batch.pieces, *parts, strict=True)

    @cached_property
    def _short(self) -> Sequence[Piece]:
        return [short for piece in self._pieces for short in _cut(piece, self._sees)]

    @cached_property
    def _batches(self) -> Sequence["_Batch"]:
        by_window: dict[Span, list[Piece]] = {}
        for piece in self._pieces:
            by_window.setdefault(_window(piece, self._sees), []).append(piece)
        return [
            _Batch(together, window, self._device)
            for window, pieces in by_window.items()
            for together in _with_few_keys(pieces)
        ]


@dataclass(frozen=True)
class _Batch:
    """The pieces for one call of flash attention.

    Attributes:
        pieces: The pieces.
        window: Keys before a query and after it that it sees, if the last query and the last key stood side by side;
            −1 for all.
        device: Where the tokens are.
    """

    pieces: Sequence[Piece]
    window: Span
    device: torch.device

    @property
    def is_causal(self) -> bool:
        """Whether the causal mask is the only one."""
        return self.window == (-1, 0)

    @cached_property
    def queries(self) -> Sequence[Span]:
        """Where each piece's queries are."""
        return [piece.queries for piece in self.pieces]

    @cached_property
    def keys(self) -> Sequence[Span]:
        """Where each piece's keys are."""
        return [piece.keys for piece in self.pieces]

    @cached_property
    def begins(self) -> Sequence[torch.Tensor]:
        """Where each piece's queries and keys begin, and the last one's end; copied without waiting for the device."""
        both = ([0, *accumulate(end - first for first, end in spans)] for spans in (self.queries, self.keys))
        return [integers(begins, torch.int32, self.device) for begins in both]

    @cached_property
    def longest(self) -> Sequence[int]:
        """The largest numbers of queries and of keys in a piece.

        With a window, the maximum of keys is raised to that of queries: the kernel reads "no right limit" as this many
        keys after a query, aligned at the last query and the last key, and would hide keys from the first queries.
        """
        rows, columns = (max(end - first for first, end in spans) for spans in (self.queries, self.keys))
        return [rows, max(rows, columns) if self.window[0] >= 0 else columns]

    def of(self, query_The: torch.Tensor, *keys_and_values: torch.Tensor) -> Sequence[torch.Tensor]:
        """Queries, keys and values of the pieces, piece by piece."""
        return [_rows(query_The, self.queries), *(_rows(x, self.keys) for x in keys_and_values)]


def _with_few_keys(pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
    """Group pieces into calls: a single call for all would copy the keys for every run of queries."""
    most, together, keys = max(piece.keys[1] for piece in pieces), list[Piece](), 0
    for piece in pieces:
        its = piece.keys[1] - piece.keys[0]
        if together and keys + its > most:
            yield together
            together, keys = [], 0
        together.append(piece)
        keys += its
    yield together


def integers(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy numbers from the host to a device without waiting for it."""
    on_host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def _rows(x: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    return torch.cat([x[first:end] for first, end in spans])


def _window(piece: Piece, sees: int | None) -> Span:
    """``_Batch.window`` of a piece."""
    if piece.lag is None:
        return -1, -1
    rows, columns = (end - first for first, end in (piece.queries, piece.keys))
    after = 0 if piece.lag == 0 else -1
    return (-1 if sees is None else sees - 1 - (piece.lag + rows - columns)), after


def _is_by_flash(query_The: torch.Tensor) -> bool:
    if not query_The.is_cuda or reads_lengths_on_device(query_The):
        return reads_lengths_on_device(query_The)
    raise ValueError(
        f"on GPUs, context parallelism needs flash attention, which does not support {query_The.dtype} with heads of "
        f"{query_The.shape[-1]}; use bf16 with a head size that is a multiple of 8, up to 256"
    )


def _forward(
    piece: Piece, sees: int | None, query_The: torch.Tensor, key_nje: torch.Tensor, value_nje: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    query = _heads_first(query_The, piece.queries)
    key, value = (_spread(_heads_first(x, piece.keys), query.shape[1]) for x in (key_nje, value_nje))
    out, lse = _on_cpu(query, key, value, 0.0, piece.lag == 0, attn_mask=_mask(piece, sees, query))
    return out.squeeze(0).transpose(0, 1), lse.squeeze(0).t()


def _backward(
    piece: Piece, sees: int | None, dout_The: torch.Tensor, query_The: torch.Tensor, key_nje: torch.Tensor,
    value_nje: torch.Tensor, out_The: torch.Tensor, lse_Th: torch.Tensor,
) -> Sequence[torch.Tensor]:  # fmt: skip
    dout, query, out = (_heads_first(x, piece.queries) for x in (dout_The, query_The, out_The))
    key, value = (_spread(_heads_first(x, piece.keys), query.shape[1]) for x in (key_nje, value_nje))
    lse = lse_Th[slice(*piece.queries)].t().unsqueeze(0)
    mask = _mask(piece, sees, query)
    dquery, dkey, dvalue = _on_cpu_backward(dout, query, key, value, out, lse, 0.0, piece.lag == 0, attn_mask=mask)
    shared = (x.unflatten(1, (key_nje.shape[1], -1)).sum(dim=2) for x in (dkey, dvalue))
    return [x.squeeze(0).transpose(0, 1) for x in (dquery, *shared)]


def _cut(piece: Piece, sees: int | None) -> Iterator[Piece]:
    """Cut a piece into parts, each causal or with a mask, not both; masks are small and hide few of a part's keys."""
    rows, columns = (end - first for first, end in (piece.queries, piece.keys))
    if piece.lag is None or sees is None or (piece.lag == 0 and rows <= sees):
        yield piece
        return
    step = min(sees, _MASKED_QUERIES)
    for first in range(0, rows, step):
        end = min(first + step, rows)
        begin, last = max(0, piece.lag + first + 1 - sees), min(columns, piece.lag + end)
        queries = piece.queries[0] + first, piece.queries[0] + end
        yield Piece(queries, (piece.keys[0] + begin, piece.keys[0] + last), piece.lag + first - begin)


def _mask(piece: Piece, sees: int | None, query_1hme: torch.Tensor) -> torch.Tensor | None:
    """The mask added to scores, ``[m, keys]``, where neither a causal mask nor none is right."""
    if not piece.lag:
        return None
    assert sees is not None
    rows, columns = (end - first for first, end in (piece.queries, piece.keys))
    hidden = query_1hme.new_full((rows, columns), -torch.inf)
    return hidden.triu(piece.lag + 1) + hidden.tril(piece.lag - sees)


def _heads_first(x: torch.Tensor, span: Span) -> torch.Tensor:
    return x[slice(*span)].transpose(0, 1).unsqueeze(0)


def _spread(x_1jme: torch.Tensor, heads: int) -> torch.Tensor:
    """Keys or values with as many heads as queries."""
    return x_1jme if x_1jme.shape[1] == heads else x_1jme.repeat_interleave(heads // x_1jme.shape[1], dim=1)
