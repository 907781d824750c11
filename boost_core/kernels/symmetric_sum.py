"""The sum over ranks of what each has written into memory that all of them can read: an all-reduce in a few kernels.

With ``x_k`` written by rank k of p, and latents, statistic, scale and activation as in ``latent_epilogue``::

    h = round(Σ_k x_k)                   summed in rank order in fp32, so that all ranks have the same bits
    z = f(h / sqrt(s / d + epsilon))     if the same pass continues with h and the statistic s behind it

*One shot*: every rank sums everything, and reads (p − 1) n. *Two shots*: every rank sums its p-th part and writes it to
all, then reads its own memory: (p − 1)/p · n read and as much written, and one more meeting of the ranks. Either way
h and s are rounded to the type that was sent before anything is computed from them, so that z is what
``latent_epilogue`` computes.

*Meeting*: each rank counts its meetings, writes the count into every rank's signals, and waits until all counts in its
own signals are as high. Whatever a rank wrote before is then visible, and whatever it was to read has been read. Counts
only grow, so nothing is reset, and a rank may be a meeting ahead. Ranks meet before and after reading others' memory.

Shape suffixes: T tokens, c = g·r columns, g projections, r rank of a latent, n elements, p ranks.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import torch

from boost_core.kernels.latent_epilogue import Epilogue, activate, latent_epilogue_reference
from boost_core.kernels.launch import block_of, jit, precise, runs_on_triton, tl, triton, warps_of

_BLOCK = 2048


@dataclass(frozen=True)
class Peers:
    """The memory of some ranks, from the first to the last.

    Attributes:
        memory: Each rank's, flat and of one type.
        address_p: Where each begins, int64, on the device that reads it.
    """

    memory: list[torch.Tensor]
    address_p: torch.Tensor

    @classmethod
    def of(cls, memory: list[torch.Tensor]) -> Peers:
        """Make peers from tensors."""
        addresses = [each.data_ptr() for each in memory]
        return cls(memory, torch.tensor(addresses, dtype=torch.int64, device=memory[0].device))


def meet(signals: Peers, rank: int, met: torch.Tensor, aborted: torch.Tensor, seconds: float) -> None:
    """Wait until all ranks have come to this meeting; on a GPU, the wait precedes whatever is enqueued next.

    Args:
        signals: Each rank's counts of meetings, int32 ``[p]``, one from each rank.
        rank: This rank.
        met: How many meetings it has had, int32 ``[1]``; incremented.
        aborted: Nonzero to stop waiting, int32 ``[1]``; in pinned memory for a GPU. Sums computed from then on are
            invalid.
        seconds: How long the reference waits; a kernel waits until it is aborted.

    Raises:
        TimeoutError: A rank has not come; only from the reference.
    """
    size = len(signals.memory)
    if runs_on_triton(met):
        _meet[(1,)](signals.address_p, met, aborted, rank, WORLD=size, LANES=block_of(size), num_warps=1)
        return
    # The reference: count, tell all others, and wait.
    met += 1
    for signal_p in signals.memory:
        signal_p[rank] = met[0]
    deadline, local_p = time.monotonic() + seconds, signals.memory[rank]
    while (missing := (local_p - met < 0).nonzero().flatten().tolist()) and not aborted.item():
        if time.monotonic() > deadline:
            raise TimeoutError(f"rank {rank} has waited {seconds:g} s in a collective for ranks {missing} of its group")
        time.sleep(0)


def symmetric_sum(peers: Peers, out_n: torch.Tensor) -> None:
    """Sum the first n elements of all ranks into ``out_n``, of the same type."""
    if not runs_on_triton(out_n):
        symmetric_sum_reference(peers.memory, out_n)
        return
    _sum[(triton.cdiv(len(out_n), _BLOCK),)](
        peers.address_p, out_n, len(out_n), WORLD=len(peers.memory), BLOCK=_BLOCK, num_warps=warps_of(_BLOCK)
    )


def symmetric_sum_reference(memory: list[torch.Tensor], out_n: torch.Tensor) -> None:
    """The same in plain torch, one rank after the other."""
    total_n = precise(memory[0][: len(out_n)]).clone()
    for each in memory[1:]:
        total_n += precise(each[: len(out_n)])
    out_n.copy_(total_n)


def spread_sum(peers: Peers, begin: int, end: int) -> None:
    """Sum the elements from ``begin`` to ``end`` of all ranks into all of them."""
    memory = peers.memory
    if not runs_on_triton(memory[0]):  # the reference
        parts = [each[begin:end] for each in memory]
        total = torch.empty_like(parts[0])
        symmetric_sum_reference(parts, total)
        for part in parts:
            part.copy_(total)
    elif begin < end:
        _spread[(triton.cdiv(end - begin, _BLOCK),)](
            peers.address_p, memory[0], begin, end, WORLD=len(memory), BLOCK=_BLOCK, num_warps=warps_of(_BLOCK)
        )


def sum_of_latents(peers: Peers, out_n: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
    """Do ``symmetric_sum``, and in the same pass what ``latent_epilogue`` computes from it.

    Args:
        peers: As above.
        out_n: As above: latents, followed by statistics, if there are any.
        epilogue: What to compute.

    Returns:
        ``z_gTr``, outside of autograd.
    """
    tokens, count = epilogue.tokens, epilogue.count
    latents = len(out_n) - (tokens if epilogue.statistic else 0)
    if not runs_on_triton(out_n):  # the reference: the sum, then the epilogue
        symmetric_sum_reference(peers.memory, out_n)
        h_Tc, s_T = out_n[:latents].view(tokens, -1), out_n[latents:] if epilogue.statistic else None
        return latent_epilogue_reference(h_Tc, s_T, count, epilogue.width, epilogue.epsilon, epilogue.activation)
    rank = latents // (tokens * count)
    z_gTr = torch.empty((count, tokens, rank), dtype=out_n.dtype, device=out_n.device)
    block = block_of(rank)
    _latents[(tokens,)](
        peers.address_p, out_n, z_gTr, z_gTr.stride(0), rank, tokens, epilogue.width, epilogue.epsilon,
        WORLD=len(peers.memory), COUNT=count, NORM=epilogue.statistic, ACTIVATION=epilogue.activation.value,
        BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip
    return z_gTr


# The Triton kernels: others' memory by address, each element in registers once, fp32 arithmetic.


@jit
def _meet(signal_address_ptr, met_ptr, aborted_ptr, rank, WORLD: tl.constexpr, LANES: tl.constexpr):
    peer = tl.arange(0, LANES)
    inside = peer < WORLD
    met = tl.load(met_ptr) + 1
    signals = tl.load(signal_address_ptr + peer, mask=inside, other=0).to(tl.pointer_type(tl.int32))
    tl.atomic_xchg(signals + rank, met, mask=inside, sem="release", scope="sys")
    own = tl.load(signal_address_ptr + rank).to(tl.pointer_type(tl.int32)) + peer
    missing = WORLD
    while missing > 0:
        count = tl.atomic_add(own, 0, mask=inside, sem="acquire", scope="sys")
        behind = inside & (count - met < 0)
        aborted = tl.load(aborted_ptr, volatile=True)
        missing = tl.where(aborted != 0, 0, tl.sum(behind.to(tl.int32), axis=0))
    tl.store(met_ptr, met)


@jit
def _summed(addresses, at, inside, WORLD: tl.constexpr, element: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in tl.static_range(WORLD):
        memory = tl.multiple_of(tl.load(addresses + k).to(tl.pointer_type(element)), 16)
        total += tl.load(memory + at, mask=inside, other=0.0).to(tl.float32)
    return total.to(element)


@jit
def _sum(address_ptr, out_ptr, end, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < end
    tl.store(out_ptr + at, _summed(address_ptr, at, inside, WORLD, out_ptr.dtype.element_ty, BLOCK), mask=inside)


@jit
def _spread(address_ptr, own_ptr, begin, end, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    at = begin + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < end
    element = own_ptr.dtype.element_ty
    total = _summed(address_ptr, at, inside, WORLD, element, BLOCK)
    for k in tl.static_range(WORLD):
        memory = tl.multiple_of(tl.load(address_ptr + k).to(tl.pointer_type(element)), 16)
        tl.store(memory + at, total, mask=inside)


@jit
def _latents(
    address_ptr, h_ptr, z_ptr, z_group_stride, rank, tokens, width, epsilon,
    WORLD: tl.constexpr, COUNT: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    element = h_ptr.dtype.element_ty
    column = tl.arange(0, BLOCK)
    inside = column < rank
    inverse_rms = 1.0
    if NORM:
        at = tokens * (tl.cast(rank, tl.int64) * COUNT) + row
        total = 0.0
        for k in tl.static_range(WORLD):
            total += tl.load(tl.load(address_ptr + k).to(tl.pointer_type(element)) + at).to(tl.float32)
        s = tl.cast(total, element)
        tl.store(h_ptr + at, s)
        inverse_rms = tl.rsqrt(s.to(tl.float32) / width + epsilon)
    for index in tl.static_range(COUNT):
        group = tl.cast(index, tl.int64)
        at = (row * COUNT + group) * rank + column
        h = _summed(address_ptr, at, inside, WORLD, element, BLOCK)
        tl.store(h_ptr + at, h, mask=inside)
        y = activate(h.to(tl.float32) * inverse_rms, ACTIVATION)
        tl.store(z_ptr + group * z_group_stride + row * rank + column, y.to(element), mask=inside)
