"""The Triton kernels: rows in registers; columns in tiles, read twice, of which a weight has few.

Scales are made from the bits of fp32 numbers, so that they are exact powers of two.
"""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from boost_core.kernels.fp8_product import QuantisedRows, leave_quantised
from boost_core.kernels.launch import block_of, rows, warps_of

_COLUMNS, _DEPTH = 16, 128  # a tile: 32 bytes of bf16 are read at a time, 128 of 8-bit numbers written


@triton.jit
def scale_of(largest):
    """The smallest power of two that brings ``largest`` to 448 or less, and its inverse; non-finite values stay so."""
    bits = largest.to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32), 1)  # 448 is 1.75 · 2⁸
    infinite = bits >= 0x7F800000
    scale = tl.where(infinite, bits, exponent << 23).to(tl.float32, bitcast=True)
    inverse = tl.where(infinite, bits, (254 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, inverse


@triton.jit
def store_quantised(x, values, scale, inside):
    """Write a row held in registers, 0 outside, in 8 bits."""
    x = x.to(tl.float32)
    factor, inverse = scale_of(tl.max(tl.abs(x), axis=0))
    tl.store(values, (x * inverse).to(values.dtype.element_ty), mask=inside)
    tl.store(scale, factor)


@triton.jit
def _rows(
    x_ptr, factor_ptr, value_ptr, row_scale_ptr, x_group_stride, x_stride, value_group_stride, value_stride, columns,
    FACTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + group * x_group_stride + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if FACTOR:
        x *= tl.load(factor_ptr + row).to(tl.float32)
    values = value_ptr + group * value_group_stride + row * value_stride + column
    store_quantised(x, values, row_scale_ptr + group * tl.num_programs(0) + row, inside)


@triton.jit
def _columns(
    x_ptr, factor_ptr, value_ptr, row_scale_ptr, x_group_stride, x_stride, value_group_stride, value_stride, depth,
    columns, FACTOR: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    here = column < columns
    largest = tl.zeros([COLUMNS], dtype=tl.float32)
    for begin in range(0, depth, DEPTH):
        x, _, _ = _tile(x_ptr, factor_ptr, group * x_group_stride, x_stride, begin, depth, column, here, FACTOR, DEPTH)
        largest = tl.maximum(largest, tl.max(tl.abs(x), axis=0))
    scale, inverse = scale_of(largest)
    tl.store(row_scale_ptr + group * columns + column, scale, mask=here)
    for begin in range(0, depth, DEPTH):
        x, row, inside = _tile(
            x_ptr, factor_ptr, group * x_group_stride, x_stride, begin, depth, column, here, FACTOR, DEPTH
        )
        value = value_ptr + group * value_group_stride + column[None, :] * value_stride + row[:, None]
        tl.store(value, (x * inverse[None, :]).to(value_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _tile(weight, factor, offset, x_stride, begin, depth, column, here, FACTOR: tl.constexpr, DEPTH: tl.constexpr):
    row = tl.cast(begin, tl.int64) + tl.arange(0, DEPTH)
    inside = (row < depth)[:, None] & here[None, :]
    x = tl.load(weight + offset + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if FACTOR:
        x *= tl.load(factor + row, mask=row < depth, other=0.0).to(tl.float32)[:, None]
    return x, row, inside


def quantise_rows(x: torch.Tensor, factor_T: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The same function as :func:`naive.quantise_rows`; see the package for the arguments."""
    x_gTk = rows(x if x.ndim == 3 else x.unsqueeze(0))
    count, tokens, columns = x_gTk.shape
    values, scales = empty_quantised(x.shape, x.device)
    values_gTk, block = values.view(x_gTk.shape), block_of(columns)
    _rows[(tokens, count)](
        x_gTk, x_gTk if factor_T is None else factor_T, values_gTk, scales, x_gTk.stride(0), x_gTk.stride(1),
        values_gTk.stride(0), values_gTk.stride(1), columns,
        FACTOR=factor_T is not None, BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip
    return values, scales


def quantise_columns(x: torch.Tensor, factor_k: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """The same function as :func:`naive.quantise_columns`; see the package for the arguments."""
    x_gkc = rows(x if x.ndim == 3 else x.unsqueeze(0))
    count, depth, columns = x_gkc.shape
    values, scales = empty_quantised((*x.shape[:-2], columns, depth), x.device)
    values_gck = values.view(count, columns, depth)
    _columns[(triton.cdiv(columns, _COLUMNS), count)](
        x_gkc, x_gkc if factor_k is None else factor_k, values_gck, scales, x_gkc.stride(0), x_gkc.stride(1),
        values_gck.stride(0), values_gck.stride(1), depth, columns,
        FACTOR=factor_k is not None, COLUMNS=_COLUMNS, DEPTH=_DEPTH,
    )  # fmt: skip
    return values, scales


def empty_quantised(shape: tuple[int, ...], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Allocate memory for values of a shape and for their scales."""
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    return values, torch.empty(shape[:-1], dtype=torch.float32, device=device)


def with_quantised(x: torch.Tensor, made: Sequence[torch.Tensor | None]) -> torch.Tensor:
    """Return ``x``, with its values and scales attached if a kernel has made them."""
    values, scales = made
    if values is not None and scales is not None:
        leave_quantised(x, QuantisedRows(values, scales))
    return x
