"""What context parallel ranks send each other in stages, keys and values or their latents, and attention to it.

With r = d/4, latents between nodes are a quarter of the bytes. All ranks of a tensor parallel group have the whole
latents of their tokens, so each sends its share of the columns to its counterpart on the other node, where the group
gathers the rest over the node's own links. Each rank computes the keys and values of its own heads from the whole
latents. In the backward pass they are sent and computed again; the resulting gradients of the latents are summed within
the node, a share per rank, and go back over the fabric. The owner adds them to its own part of that gradient, which the
group sums in any case.

The gradients of the weights used are summed here over all stages, so that there is one per micro-batch even if nothing
was received: code that counts gradients finds the same number in each.

On a GPU, flash attention takes all pieces with the same mask at once; elsewhere each piece is one call. Parts are
combined by their log-sum-exps: with (o₁, l₁) and (o₂, l₂) of the same queries,

    l = log(e^l₁ + e^l₂),   o = e^(l₁ − l) o₁ + e^(l₂ − l) o₂,

in at least fp32 and in a fixed order, so that runs on CPU are bit-identical; on a GPU, flash attention adds up its
gradient of queries in any order. Given the output and log-sum-exps over all keys, the backward pass gives each piece's
exact part of the gradients: p = exp(q·k − l), and dO ∘ O summed over a head is that of all keys.

Shape suffixes: T tokens of a rank, n tokens received, in the order of the ranks that send them or, for a stage, all of
them in the stage's order; x any rows; c columns sent of a token; r latents, p tensor parallel ranks, c = 2r/p for both
latents; h heads, j heads of keys and values, e head size; m queries of a piece; s = 2, keys and values.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from boost_core.context.placement import Window
from boost_core.context.plan import Piece, Span, StageWork, Traffic
from boost_core.model.attention import Rotation, reads_lengths_on_device
from boost_core.parallel.btp import GradientSinks
from boost_core.parallel.communicator import Communicator

Attended = tuple[Piece, torch.Tensor, torch.Tensor]  # output ``[m, h, e]`` and log-sum-exps ``[m, h]`` of a piece
Gradients = tuple[Piece, torch.Tensor, torch.Tensor, torch.Tensor]  # of its queries, keys and values

# Queries of a call on CPU: of these and a window's keys, about as many as the queries are hidden from each.
_MASKED_QUERIES = 512

_flash = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward
_cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_cpu_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


@dataclass(frozen=True, eq=False)
class StageAttention:
    """Attention of a rank's queries to the keys of a stage.

    Attributes:
        pieces: Its pieces.
        sees: Number of tokens that each query sees, itself included; ``None`` for all before it.
        device: Where the tokens are.
    """

    pieces: Sequence[Piece]
    sees: int | None
    device: torch.device

    def forward(self, query_The: torch.Tensor, key_nje: torch.Tensor, value_nje: torch.Tensor) -> Iterator[Attended]:
        """Each piece's output and log-sum-exps, in a fixed order.

        Raises:
            ValueError: The queries are on a GPU, and flash attention does not support their type or head size.
        """
        if not _is_by_flash(query_The):
            for piece in self._short:
                query, key, value, mask = self._piece_inputs(piece, query_The, key_nje, value_nje)
                out, lse = _cpu(query, key, value, 0.0, piece.lag == 0, attn_mask=mask)
                yield piece, out.squeeze(0).transpose(0, 1), lse.squeeze(0).t()
            return
        for batch in self._batches:
            out, lse, *_ = _flash(
                _rows(query_The, batch.queries), _rows(key_nje, batch.keys), _rows(value_nje, batch.keys),
                *batch.begins, *batch.longest, 0.0, batch.window == _CAUSAL, False,
                window_size_left=batch.window[0], window_size_right=batch.window[1],
            )  # fmt: skip
            rows, _ = batch.lengths
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
                dquery, *dkeys = _cpu_backward(dout, query, key, value, out, lse, 0.0, piece.lag == 0, attn_mask=mask)
                dkey, dvalue = (x.unflatten(1, (key_nje.shape[1], -1)).sum(dim=2) for x in dkeys)
                yield piece, *(x.squeeze(0).transpose(0, 1) for x in (dquery, dkey, dvalue))
            return
        for batch in self._batches:
            dout, out, lse = (_rows(x, batch.queries) for x in (dout_The, out_The, lse_Th))
            no_seed, no_offset = (torch.zeros(size, dtype=torch.uint64, device=self.device) for size in (2, 0))
            gradients = _flash_backward(
                dout, _rows(query_The, batch.queries), _rows(key_nje, batch.keys), _rows(value_nje, batch.keys),
                out, lse.t().contiguous(), *batch.begins, *batch.longest, 0.0, batch.window == _CAUSAL,
                no_seed, no_offset, window_size_left=batch.window[0], window_size_right=batch.window[1],
            )  # fmt: skip
            rows, columns = batch.lengths
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
            assert self.sees is not None
            rows, columns = (end - first for first, end in (piece.queries, piece.keys))
            hidden = query.new_full((rows, columns), -torch.inf)
            mask = hidden.triu(piece.lag + 1) + hidden.tril(piece.lag - self.sees)
        return query, key, value, mask

    @cached_property
    def _short(self) -> Sequence[Piece]:
        """The pieces in parts, each causal or with a mask, not both; masks are small and hide few of a part's keys."""
        short, sees = list[Piece](), self.sees
        for piece in self.pieces:
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
        for piece in self.pieces:
            window = -1, -1
            if piece.lag is not None:
                rows, columns = (end - first for first, end in (piece.queries, piece.keys))
                before = -1 if self.sees is None else self.sees - 1 - (piece.lag + rows - columns)
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
                begins = [integers([0, *accumulate(each)], torch.int32, self.device) for each in lengths]
                rows, columns = map(max, lengths)
                # With a window, the maximum of keys is raised to that of queries: the kernel reads "no right limit" as
                # this many keys after a query, aligned at the last query and the last key, and would hide keys from
                # the first queries.
                longest = rows, max(rows, columns) if window[0] >= 0 else columns
                batches.append(_Batch(group, *spans, lengths, window, begins, longest))
        return batches


_CAUSAL: Span = (-1, 0)  # the window of a batch whose only mask is the causal one


class _Batch(NamedTuple):
    """The pieces for one call of flash attention.

    Attributes:
        pieces: The pieces.
        queries: Where each piece's queries are.
        keys: Where each piece's keys are.
        lengths: Number of queries and of keys in each piece.
        window: Keys before a query and after it that it sees, if the last query and the last key stood side by side;
            −1 for all.
        begins: Where each piece's queries begin in the call, and the last one's end; and the same for keys.
        longest: The largest numbers of queries and of keys in a piece.
    """

    pieces: Sequence[Piece]
    queries: Sequence[Span]
    keys: Sequence[Span]
    lengths: Sequence[Sequence[int]]
    window: Span
    begins: Sequence[torch.Tensor]
    longest: tuple[int, int]


def integers(values: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Copy numbers from the host to a device without waiting for it."""
    return torch.tensor(values, dtype=dtype, pin_memory=device.type == "cuda").to(device, non_blocking=True)


def token_places(chunks: Sequence[int], chunk_tokens: int, device: torch.device) -> torch.Tensor:
    """Where the tokens of chunks are among those of all chunks."""
    first_n = integers(chunks, torch.int64, device) * chunk_tokens
    return (first_n.unsqueeze(1) + torch.arange(chunk_tokens, device=device)).flatten()


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


class AttentionSum:
    """Queries, and their attention so far, at first to no keys.

    Attributes:
        query: The queries.
        out: The output so far, in fp32 at least.
        lse: Its log-sum-exps.
    """

    def __init__(self, query_The: torch.Tensor) -> None:
        self.query = query_The
        self.out = torch.zeros_like(query_The, dtype=torch.promote_types(query_The.dtype, torch.float32))
        self.lse = self.out.new_full(self.out.shape[:2], -torch.inf)

    def attend(self, attention: StageAttention, keys_nsje: torch.Tensor) -> None:
        """Add the attention to the keys of a stage."""
        for piece, part_mhe, part_lse_mh in attention.forward(self.query, *keys_nsje.unbind(1)):
            rows = slice(*piece.queries)
            whole_mh = torch.logaddexp(self.lse[rows], part_lse_mh)
            self.out[rows] *= (self.lse[rows] - whole_mh).exp().unsqueeze(-1)
            self.out[rows] += part_mhe * (part_lse_mh - whole_mh).exp().unsqueeze(-1)
            self.lse[rows] = whole_mh


class GradientSum:
    """Queries, their attention, and its gradients, at first zeros.

    Attributes:
        query: The queries.
        dout: The gradient of the output.
        out: The output.
        lse: Its log-sum-exps.
        dquery: The gradient of the queries so far, in fp32 at least.
    """

    def __init__(
        self, query_The: torch.Tensor, dout_The: torch.Tensor, out_The: torch.Tensor, lse_Th: torch.Tensor
    ) -> None:
        self.query, self.dout, self.out, self.lse = query_The, dout_The, out_The, lse_Th
        self.dquery = torch.zeros_like(query_The, dtype=lse_Th.dtype)

    def add(self, attention: StageAttention, keys_nsje: torch.Tensor, dkeys_nsje: torch.Tensor) -> None:
        """Add a stage's gradients, of queries as well as keys and values."""
        inputs = self.dout, self.query, *keys_nsje.unbind(1), self.out, self.lse
        for piece, dquery_mhe, dkey_nje, dvalue_nje in attention.backward(*inputs):
            self.dquery[slice(*piece.queries)] += dquery_mhe
            dkeys_nsje[slice(*piece.keys), 0] += dkey_nje
            dkeys_nsje[slice(*piece.keys), 1] += dvalue_nje


class ChunkExchange:
    """One stage's exchange of keys, or of latents.

    Args:
        traffic: What goes where.
        chunk_tokens: Tokens of a chunk.
        communicator: The context parallel group.
        what: What is sent, for the ledger.
        device: Where the tokens are.
    """

    def __init__(
        self, traffic: Traffic, chunk_tokens: int, communicator: Communicator, what: str, device: torch.device
    ) -> None:
        self._tokens, self._communicator, self._what = chunk_tokens, communicator, what
        self._goes, self._comes = [len(chunks) for chunks in traffic.sends], list(traffic.receives)
        self._sent = integers([chunk for chunks in traffic.sends for chunk in chunks], torch.int64, device)
        self._sent_to = self._sent.tensor_split(list(accumulate(self._goes))[:-1])
        self._places = integers(list(traffic.places), torch.int64, device)

    def start(self, local_Tc: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Start to send and receive; the returned function waits, and returns ``[n, c]``."""
        payload = self._chunks(local_Tc).index_select(0, self._sent)
        wait = start_rows(self._communicator, payload, self._goes, self._comes, self._what)
        return lambda: wait().view(-1, local_Tc.shape[1])

    def start_back(self, gradient_nc: torch.Tensor) -> Callable[[torch.Tensor], None]:
        """Start to return gradients of what came; the returned function waits, and adds up those of this rank's own."""
        purpose = f"{self._what.removesuffix('s')} gradients"
        wait = start_rows(self._communicator, self._chunks(gradient_nc), self._comes, self._goes, purpose)

        def add_to(local_Tc: torch.Tensor) -> None:
            local, parts = self._chunks(local_Tc), wait()
            # A rank's part has each chunk once, so sums are always made in the order of ranks.
            for chunks, part in zip(self._sent_to, parts.split_with_sizes(self._goes), strict=True):
                local.index_add_(0, chunks, part.to(local.dtype))

        return add_to

    def put(self, came_nc: torch.Tensor, stage_nc: torch.Tensor) -> None:
        """Put what came where it belongs among all tokens of a stage."""
        self._chunks(stage_nc).index_copy_(0, self._places, self._chunks(came_nc))

    def take(self, stage_nc: torch.Tensor) -> torch.Tensor:
        """The inverse of ``put``, ``[n, c]``."""
        return self._chunks(stage_nc).index_select(0, self._places).view(-1, stage_nc.shape[1])

    def _chunks(self, x_Tc: torch.Tensor) -> torch.Tensor:
        """One row per chunk."""
        return x_Tc.view(len(x_Tc) // self._tokens, self._tokens * x_Tc.shape[1])


def start_rows(
    communicator: Communicator, payload_xc: torch.Tensor, goes: Sequence[int], comes: Sequence[int], purpose: str
) -> Callable[[], torch.Tensor]:
    """Start to exchange rows; the returned function waits, and returns those that come, rank after rank.

    Args:
        communicator: The ranks.
        payload_xc: The rows to send, of any shape, rank after rank.
        goes: Number of rows for each rank.
        comes: Number of rows from each rank.
        purpose: The purpose, for the ledger.
    """
    received = payload_xc.new_empty((sum(comes), *payload_xc.shape[1:]))
    pending = communicator.start_uneven_all_to_all(received, payload_xc, (comes, goes), purpose)

    def wait() -> torch.Tensor:
        pending.wait()
        return received

    return wait


class HeadMaker(NamedTuple):
    """How heads are made from latents, for any tokens; ranks may receive these and make them themselves.

    Attributes:
        weights: What it uses: parameters, or parts of them. That of queries ends with the weight that turns outputs
            into latents, ``[h·e, r]``, which ``make`` is not given.
        make: From latents, ``[n, r]`` each, such weights and the tokens' rotation: rotated keys, and values,
            ``[n, j, e]`` with j heads each; or rotated queries, and no values.
        sinks: Where the weights' gradients go.
    """

    weights: Sequence[torch.Tensor]
    make: Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor], Rotation], tuple[torch.Tensor, torch.Tensor]]
    sinks: GradientSinks


class LatentRoute(NamedTuple):
    """How latents travel.

    Attributes:
        nodes: The node of each context parallel rank, between which latents are sent and within which keys and values
            are; ``None`` if these are sent everywhere.
        moves: Whether the queries and outputs of offloaded tasks travel as latents.
        tensor: The tensor parallel group.
        at: Returns the rotation of the tokens of some chunks.
    """

    nodes: Sequence[int] | None
    moves: bool
    tensor: Communicator
    at: Callable[[Sequence[int]], Rotation]

    def columns(self, x_Tr: torch.Tensor) -> torch.Tensor:
        """This rank's columns of a latent: a view."""
        return x_Tr.tensor_split(self.tensor.size, dim=1)[self.tensor.rank]

    def in_place(self, share_Tc: torch.Tensor, count: int) -> Sequence[torch.Tensor]:
        """Spread a share over ``count`` full-width tensors, ``[T, r]`` each, with zeros in other ranks' columns."""
        before, width = self.tensor.rank, share_Tc.shape[1] // count
        around = before * width, (self.tensor.size - 1 - before) * width
        return [pad(part_Tc, around) for part_Tc in share_Tc.chunk(count, dim=1)]

    def gathered(self, came_nc: torch.Tensor, count: int, purpose: str) -> Sequence[torch.Tensor]:
        """Gather ``count`` full-width tensors, ``[n, r]`` each, from the shares that all ranks have received."""
        if self.tensor.size == 1:
            return came_nc.chunk(count, dim=1)
        shares_pnc = self.tensor.all_gather(came_nc.contiguous(), purpose)
        return [part.transpose(0, 1).flatten(1) for part in shares_pnc.chunk(count, dim=2)]

    def scattered(self, parts_nr: Sequence[torch.Tensor], purpose: str) -> torch.Tensor:
        """This rank's share, ``[n, c]``, of the sums over every rank's heads: of latents, or of their gradients."""
        if self.tensor.size == 1:
            return torch.cat(list(parts_nr), dim=1)
        parts = zip(*(x_nr.chunk(self.tensor.size, dim=1) for x_nr in parts_nr), strict=True)
        return self.tensor.reduce_scatter(torch.stack([torch.cat(part, dim=1) for part in parts]), purpose)


class LocalKeys(NamedTuple):
    """What a rank has to send to others, without its gradients' history.

    Attributes:
        query: Queries of its tokens, ``[T, h, e]``, of which those of offloaded tasks are sent.
        keys: Their keys and values, ``[T, s, j, e]``.
        maker: Makes them from latents, if these are sent.
        task_maker: Makes queries from latents, if these are sent.
        latents: The latents that are sent, ``[T, r]`` each, those of queries last.
        share: Its share of those of keys and values, ``[T, c]``, as it is sent; ``None`` if none are.
        backward: Whether gradients come back.
    """

    query: torch.Tensor
    keys: torch.Tensor
    maker: HeadMaker | None
    task_maker: HeadMaker | None
    latents: Sequence[torch.Tensor]
    share: torch.Tensor | None = None
    backward: bool = False


class LocalGradients(NamedTuple):
    """Gradients of ``LocalKeys``, in at least fp32.

    Attributes:
        keys: For the keys and values, ``[T, s, j, e]``.
        share: For this rank's share of its tokens' latents, ``[T, c]``, from other ranks' queries; ``None`` if none are
            sent.
        weights: For the weights of keys and values, from other ranks' tokens.
    """

    keys: torch.Tensor
    share: torch.Tensor | None
    weights: Sequence[torch.Tensor]


class StageKeys(NamedTuple):
    """The keys of a stage.

    Attributes:
        keys: Keys and values, ``[n, s, j, e]``.
        inputs: What this rank has computed some of them from, for gradients: the latents of keys and of values,
            ``[n, r]`` each, and the weights.
        outputs: These keys and values, ``[n, j, e]`` each.
    """

    keys: torch.Tensor
    inputs: Sequence[torch.Tensor] = ()
    outputs: Sequence[torch.Tensor] = ()


class Stage:
    """A stage of one rank: what it sends and receives, and the attention to it.

    Args:
        work: The rank's work in it.
        window: The window whose tokens are partitioned.
        communicator: The context parallel group.
        route: How latents travel, if any do.
        device: Where the tokens are.

    Attributes:
        local: Attention of the rank's own queries to the keys received.
        remote: Attention of the queries received.
    """

    def __init__(
        self, work: StageWork, window: Window, communicator: Communicator, route: LatentRoute | None,
        device: torch.device,
    ) -> None:  # fmt: skip
        both = (StageAttention(pieces, window.sees, device) for pieces in (work.pieces, work.remote_pieces))
        self.local, self.remote = both
        self._tokens, self._route = len(work.chunks) * window.chunk_tokens, route
        self._keys, self._latents = None, None
        self._rotation: Rotation | None = None  # of the tokens whose latents are received, if there are any
        if work.keys is not None:
            self._keys = ChunkExchange(work.keys, window.chunk_tokens, communicator, "keys", device)
        if work.latents is not None and route is not None:
            self._latents = ChunkExchange(work.latents, window.chunk_tokens, communicator, "key latents", device)
            chunks = [work.chunks[place] for place in work.latents.places]
            self._rotation = route.at(chunks) if chunks else None

    def start(self, local: LocalKeys) -> Sequence[Callable[[], torch.Tensor] | None]:
        """Start to send and receive; the functions returned wait for keys and values, and for shares of latents."""
        keys = self._keys.start(local.keys.flatten(1)) if self._keys else None
        latents = self._latents.start(local.share) if self._latents and local.share is not None else None
        return keys, latents

    def received(self, local: LocalKeys, keys_nc: torch.Tensor | None, shares_nc: torch.Tensor | None) -> StageKeys:
        """The stage's keys from what ``start`` has waited for, computed from latents where these have come."""
        stage_nc = local.keys.new_empty(self._tokens, local.keys[0].numel())
        inputs, outputs = list[torch.Tensor](), tuple[torch.Tensor, ...]()
        if self._keys and keys_nc is not None:
            self._keys.put(keys_nc, stage_nc)
        maker, rotation = local.maker, self._rotation
        if self._latents and self._route and rotation is not None and maker and shares_nc is not None:
            latents_nr = self._route.gathered(shares_nc, 2, "key latents")
            inputs = [x.detach().requires_grad_() for x in (*latents_nr, *maker.weights)]
            with torch.set_grad_enabled(local.backward):
                outputs = maker.make(inputs[:2], inputs[2:], rotation)
            self._latents.put(torch.stack([x_nje.detach() for x_nje in outputs], dim=1).flatten(1), stage_nc)
        return StageKeys(stage_nc.view(self._tokens, *local.keys.shape[1:]), inputs, outputs)

    def start_back(
        self, stage: StageKeys, dkeys_nsje: torch.Tensor, gradients: LocalGradients
    ) -> Sequence[Callable[[], None]]:
        """Start to return gradients of what came; the functions returned wait, and add up those of this rank's tokens.

        The weights' gradients are added at once.
        """
        dtype, adds = stage.keys.dtype, list[Callable[[], None]]()
        dkeys_nc = dkeys_nsje.flatten(1)
        if self._keys:
            add_keys = self._keys.start_back(self._keys.take(dkeys_nc).to(dtype))
            adds.append(lambda: add_keys(gradients.keys.flatten(1)))
        if self._latents and self._route and (share_Tc := gradients.share) is not None:
            dshare_nc = dkeys_nc.new_empty(0, share_Tc.shape[1], dtype=dtype)  # of no tokens
            if stage.outputs:
                douts = self._latents.take(dkeys_nc).to(dtype).view(-1, *dkeys_nsje.shape[1:]).unbind(1)
                dinputs = torch.autograd.grad(stage.outputs, stage.inputs, douts)
                for whole, part in zip(gradients.weights, dinputs[2:], strict=True):
                    whole += part
                dshare_nc = self._route.scattered(dinputs[:2], "key latent gradients")
            adds.append(partial(self._latents.start_back(dshare_nc), share_Tc))
        return adds
