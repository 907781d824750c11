"""The Triton kernels: others' memory by address, each element in registers once, fp32 arithmetic."""

import torch
import triton
import triton.language as tl

from boost_core.kernels.launch import block_of, warps_of
from boost_core.kernels.symmetric_sum.memory import Epilogue, Peers

_BLOCK = 2048


@triton.jit
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


@triton.jit
def _summed(addresses, at, inside, WORLD: tl.constexpr, element: tl.constexpr, BLOCK: tl.constexpr):
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for k in tl.static_range(WORLD):
        memory = tl.multiple_of(tl.load(addresses + k).to(tl.pointer_type(element)), 16)
        total += tl.load(memory + at, mask=inside, other=0.0).to(tl.float32)
    return total.to(element)


@triton.jit
def _sum(address_ptr, out_ptr, end, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < end
    tl.store(out_ptr + at, _summed(address_ptr, at, inside, WORLD, out_ptr.dtype.element_ty, BLOCK), mask=inside)


@triton.jit
def _spread(address_ptr, own_ptr, begin, end, WORLD: tl.constexpr, BLOCK: tl.constexpr):
    at = begin + tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < end
    element = own_ptr.dtype.element_ty
    total = _summed(address_ptr, at, inside, WORLD, element, BLOCK)
    for k in tl.static_range(WORLD):
        memory = tl.multiple_of(tl.load(address_ptr + k).to(tl.pointer_type(element)), 16)
        tl.store(memory + at, total, mask=inside)


@triton.jit
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
        y = h.to(tl.float32) * inverse_rms
        if ACTIVATION:
            y *= tl.sigmoid(y)
        tl.store(z_ptr + group * z_group_stride + row * rank + column, y.to(element), mask=inside)


def meet(signals: Peers, rank: int, met: torch.Tensor, aborted: torch.Tensor) -> None:
    """The same function as :func:`naive.meet`, without a limit; see the package for the arguments."""
    size = len(signals.memory)
    _meet[(1,)](signals.address_p, met, aborted, rank, WORLD=size, LANES=block_of(size), num_warps=1)


def symmetric_sum(peers: Peers, out_n: torch.Tensor) -> None:
    """The same function as :func:`naive.symmetric_sum`; see the package for the arguments."""
    grid = (triton.cdiv(len(out_n), _BLOCK),)
    _sum[grid](
        peers.address_p, out_n, len(out_n), WORLD=len(peers.memory), BLOCK=_BLOCK, num_warps=warps_of(_BLOCK)
    )  # fmt: skip


def spread_sum(peers: Peers, begin: int, end: int) -> None:
    """The same function as :func:`naive.spread_sum`; see the package for the arguments."""
    if begin == end:
        return
    _spread[(triton.cdiv(end - begin, _BLOCK),)](
        peers.address_p, peers.memory[0], begin, end, WORLD=len(peers.memory), BLOCK=_BLOCK, num_warps=warps_of(_BLOCK)
    )  # fmt: skip


def sum_of_latents(peers: Peers, out_n: torch.Tensor, epilogue: Epilogue) -> torch.Tensor:
    """The same function as :func:`naive.sum_of_latents`; see the package for the arguments."""
    h_Tc, _ = epilogue.split(out_n)
    tokens, rank = epilogue.tokens, h_Tc.shape[1] // epilogue.count
    z_gTr = torch.empty((epilogue.count, tokens, rank), dtype=out_n.dtype, device=out_n.device)
    block = block_of(rank)
    _latents[(tokens,)](
        peers.address_p, out_n, z_gTr, z_gTr.stride(0), rank, tokens, epilogue.width, epilogue.epsilon,
        WORLD=len(peers.memory), COUNT=epilogue.count, NORM=epilogue.statistic, ACTIVATION=epilogue.activation,
        BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip
    return z_gTr
