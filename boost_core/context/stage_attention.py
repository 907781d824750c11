"""Attention of a rank's queries to one stage's keys, and its sum over stages, by kernels that return log-sum-exps.

On a GPU, flash attention takes all pieces with the same mask at once; elsewhere each piece is one call. Parts are
combined by their log-sum-exps: with (o₁, l₁) and (o₂, l₂) of the same queries,

    l = log(e^l₁ + e^l₂),   o = e^(l₁ − l) o₁ + e^(l₂ − l) o₂,

in at least fp32 and in a fixed order, so that runs on CPU are bit-identical; on a GPU, flash attention adds up its
gradient of queries in any order. Given the output and log-sum-exps over all keys, the backward pass gives each piece's
exact part of the gradients: p = exp(q·k − l), and dO ∘ O summed over a head is that of all keys.

Shape suffixes: T queries of the rank, n keys of the stage, h heads, j heads of keys and values, e head size; m queries
of a piece; s = 2, keys and values.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch

from boost_core.context.plan import Piece, RankWork, Span, StageWork
from boost_core.model.attention import reads_lengths_on_device

Attended = tuple[Piece, torch.Tensor, torch.Tensor]  # output ``[m, h, e]`` and log-sum-exps ``[m, h]`` of a piece
Gradients = tuple[Piece, torch.Tensor, torch.Tensor, torch.Tensor]  # of its queries, keys and values

# Queries of a call on CPU: of these and a window's keys, about as many as the queries are hidden from each.
_MASKED_QUERIES = 512

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
                query, key, value, mask = self._piece_inputs(piece, query_The, key_nje, value_nje)
                out, lse = _on_cpu(query, key, value, 0.0, piece.lag == 0, attn_mask=mask)
                yield piece, out.squeeze(0).transpose(0, 1), lse.squeeze(0).t()
            return
        for batch in self._batches:
            out, lse, *_ = _flash(
                _rows(query_The, batch.queries), _rows(key_nje, batch.keys), _rows(value_nje, batch.keys),
                *batch.begins, *batch.longest, 0.0, batch.window == _CAUSAL, False,
                window_size_left=batch.window[0], window_size_right=batch.window[1],
            )  # fmt: skip
            rows = [end - first for first, end in batch.queries]
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
                query, key, value, mask = self._piece_inputs(piece, query_The, key_nje, value_nje)
                dout, out = (_heads_first(x, piece.queries) for x in (dout_The, out_The))
                lse = lse_Th[slice(*piece.queries)].t().unsqueeze(0)
                dquery, *dkeys = _on_cpu_backward(
                    dout, query, key, value, out, lse, 0.0, piece.lag == 0, attn_mask=mask
                )
                dkey, dvalue = (x.unflatten(1, (key_nje.shape[1], -1)).sum(dim=2) for x in dkeys)
                yield piece, *(x.squeeze(0).transpose(0, 1) for x in (dquery, dkey, dvalue))
            return
        for batch in self._batches:
            dout, out, lse = (_rows(x, batch.queries) for x in (dout_The, out_The, lse_Th))
            no_seed, no_offset = (torch.zeros(size, dtype=torch.uint64, device=self._device) for size in (2, 0))
            gradients = _flash_backward(
                dout, _rows(query_The, batch.queries), _rows(key_nje, batch.keys), _rows(value_nje, batch.keys),
                out, lse.t().contiguous(), *batch.begins, *batch.longest, 0.0, batch.window == _CAUSAL,
                no_seed, no_offset, window_size_left=batch.window[0], window_size_right=batch.window[1],
            )  # fmt: skip
            rows, columns = ([end - first for first, end in spans] for spans in (batch.queries, batch.keys))
            parts = (x.split(lengths) for x, lengths in zip(gradients, (rows, columns, columns), strict=True))
            yield from zip(batch.pieces, *parts, strict=True)

    def _piece_inputs(
        self, piece: Piece, query_The: torch.Tensor, key_nje: torch.Tensor, value_nje: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """A piece's queries, keys and values with heads first, keys and values with as many heads as queries.

        Then the mask added to scores, ``[m, keys]``, where neither a causal mask nor none is right.
        """
        query = _heads_first(query_The, piece.queries)
        share, mask = query.shape[1] // key_nje.shape[1], None
        both = (_heads_first(x, piece.keys) for x in (key_nje, value_nje))
        key, value = (x if share == 1 else x.repeat_interleave(share, dim=1) for x in both)
        if piece.lag:
            assert self._sees is not None
            rows, columns = (end - first for first, end in (piece.queries, piece.keys))
            hidden = query.new_full((rows, columns), -torch.inf)
            mask = hidden.triu(piece.lag + 1) + hidden.tril(piece.lag - self._sees)
        return query, key, value, mask

    @cached_property
    def _short(self) -> Sequence[Piece]:
        """The pieces in parts, each causal or with a mask, not both; masks are small and hide few of a part's keys."""
        short, sees = list[Piece](), self._sees
        for piece in self._pieces:
            rows, columns = (end - first for first, end in (piece.queries, piece.keys))
            if piece.lag is None or sees is None or (piece.lag == 0 and rows <= sees):
                short.append(piece)
                continue
            step = min(sees, _MASKED_QUERIES)
            for first in range(0, rows, step):
                end = min(first + step, rows)
                begin, last = max(0, piece.lag + first + 1 - sees), min(columns, piece.lag + end)
                queries = piece.queries[0] + first, piece.queries[0] + end
                keys = piece.keys[0] + begin, piece.keys[0] + last
                short.append(Piece(queries, keys, piece.lag + first - begin))
        return short

    @cached_property
    def _batches(self) -> Sequence["_Batch"]:
        by_window: dict[Span, list[Piece]] = {}
        for piece in self._pieces:
            window = -1, -1
            if piece.lag is not None:
                rows, columns = (end - first for first, end in (piece.queries, piece.keys))
                before = -1 if self._sees is None else self._sees - 1 - (piece.lag + rows - columns)
                window = before, 0 if piece.lag == 0 else -1
            by_window.setdefault(window, []).append(piece)

        batches = []
        for window, pieces in by_window.items():
            # A single call for all would copy the keys for every run of queries.
            most, groups, count = max(piece.keys[1] for piece in pieces), list[list[Piece]](), 0
            for piece in pieces:
                added = piece.keys[1] - piece.keys[0]
                if not groups or count + added > most:
                    groups.append([])
                    count = 0
                groups[-1].append(piece)
                count += added
            for group in groups:
                spans = [piece.queries for piece in group], [piece.keys for piece in group]
                lengths = [[end - first for first, end in each] for each in spans]
                begins = [integers([0, *accumulate(each)], torch.int32, self._device) for each in lengths]
                rows, columns = map(max, lengths)
                # With a window, the maximum of keys is raised to that of queries: the kernel reads "no right limit" as
                # this many keys after a query, aligned at the last query and the last key, and would hide keys from
                # the first queries.
                longest = rows, max(rows, columns) if window[0] >= 0 else columns
                batches.append(_Batch(group, *spans, window, begins, longest))
        return batches


_CAUSAL: Span = (-1, 0)  # the window of a batch whose only mask is the causal one


@dataclass(frozen=True)
class _Batch:
    """The pieces for one call of flash attention.

    Attributes:
        pieces: The pieces.
        queries: Where each piece's queries are.
        keys: Where each piece's keys are.
        window: Keys before a query and after it that it sees, if the last query and the last key stood side by side;
            −1 for all.
        begins: Where each piece's queries begin in the call, and the last one's end; and the same for keys.
        longest: The largest numbers of queries and of keys in a piece.
    """

    pieces: Sequence[Piece]
    queries: Sequence[Span]
    keys: Sequence[Span]
    window: Span
    begins: Sequence[torch.Tensor]
    longest: tuple[int, int]


def integers(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy numbers from the host to a device without waiting for it."""
    on_host = torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def _rows(x: torch.Tensor, spans: Sequence[Span]) -> torch.Tensor:
    return torch.cat([x[first:end] for first, end in spans])


def _is_by_flash(query_The: torch.Tensor) -> bool:
    if not query_The.is_cuda or reads_lengths_on_device(query_The):
        return reads_lengths_on_device(query_The)
    raise ValueError(
        f"on GPUs, context parallelism needs flash attention, which does not support {query_The.dtype} with heads of "
        f"{query_The.shape[-1]}; use bf16 with a head size that is a multiple of 8, up to 256"
    )


def _heads_first(x: torch.Tensor, span: Span) -> torch.Tensor:
    return x[slice(*span)].transpose(0, 1).unsqueeze(0)


@dataclass(frozen=True)
class StageAttentions:
    """Attention to a stage's keys.

    Attributes:
        local: Attention of the rank's own queries.
        remote: Attention of the queries received.
    """

    local: StageAttention
    remote: StageAttention

    @classmethod
    def of(cls, work: RankWork | StageWork, sees: int | None, device: torch.device) -> "StageAttentions":
        """Attention to a rank's own keys, or to a stage's."""
        return cls(*(StageAttention(pieces, sees, device) for pieces in (work.pieces, work.remote_pieces)))


@dataclass
class AttentionSum:
    """Queries, and their attention so far.

    Attributes:
        query: The queries.
        out: The output so far, in fp32 at least.
        lse: Its log-sum-exps.
    """

    query: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor

    @classmethod
    def begin(cls, query_The: torch.Tensor) -> "AttentionSum":
        """Of no keys yet."""
        out_The = torch.zeros_like(query_The, dtype=torch.promote_types(query_The.dtype, torch.float32))
        return cls(query_The, out_The, out_The.new_full(out_The.shape[:2], -torch.inf))

    def attend(self, attention: StageAttention, keys_nsje: torch.Tensor) -> None:
        """Add the attention to the keys of a stage."""
        for piece, part_mhe, part_lse_mh in attention.forward(self.query, *keys_nsje.unbind(1)):
            rows = slice(*piece.queries)
            whole_mh = torch.logaddexp(self.lse[rows], part_lse_mh)
            self.out[rows] *= (self.lse[rows] - whole_mh).exp().unsqueeze(-1)
            self.out[rows] += part_mhe * (part_lse_mh - whole_mh).exp().unsqueeze(-1)
            self.lse[rows] = whole_mh


@dataclass
class GradientSum:
    """Queries, their attention, and its gradients.

    Attributes:
        query: The queries.
        dout: The gradient of the output.
        out: The output.
        lse: Its log-sum-exps.
        dquery: The gradient of the queries so far, in fp32 at least.
    """

    query: torch.Tensor
    dout: torch.Tensor
    out: torch.Tensor
    lse: torch.Tensor
    dquery: torch.Tensor

    @classmethod
    def begin(
        cls, query_The: torch.Tensor, dout_The: torch.Tensor, out_The: torch.Tensor, lse_Th: torch.Tensor
    ) -> "GradientSum":
        """Zeros."""
        return cls(query_The, dout_The, out_The, lse_Th, torch.zeros_like(query_The, dtype=lse_Th.dtype))

    def add(self, attention: StageAttention, keys_nsje: torch.Tensor, dkeys_nsje: torch.Tensor) -> None:
        """Add a stage's gradients, of queries as well as keys and values."""
        inputs = self.dout, self.query, *keys_nsje.unbind(1), self.out, self.lse
        for piece, dquery_mhe, dkey_nje, dvalue_nje in attention.backward(*inputs):
            self.dquery[slice(*piece.queries)] += dquery_mhe
            dkeys_nsje[slice(*piece.keys), 0] += dkey_nje
            dkeys_nsje[slice(*piece.keys), 1] += dvalue_nje
