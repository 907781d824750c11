"""Matrix products of 8-bit floating-point numbers, with a separate scale for each row of either factor.

With ``e4m3`` denoting rounding to one sign, four exponent and three mantissa bits, whose largest number is 448, rows
``x_t`` of the left factor and rows ``w_c`` of the right, along both of which the product sums::

    σ(x) = 2^⌈log₂(max |x| / 448)⌉,   q(x) = e4m3(x / σ(x))
    y_tc = σ(x_t) σ(w_c) Σ_k q(x_t)_k q(w_c)_k

**Why a scale per row, taken from the row itself.** One scale per tensor must be known before the first element is
written: that takes either another pass over the whole tensor, or the largest values of recent steps ("delayed scaling",
Micikevicius et al., arXiv 2209.05433), which is state that a checkpoint, a resize and a repeated step would all have to
carry. The kernels that write activations have a token's row in registers, so its scale costs no pass and no state, and
is the same on any number of ranks; and an outlier costs its own token precision, not the others. Low-rank shapes suit
it: rows are short.

**Why e4m3 for gradients, too.** e5m2 gives gradients range under one scale per tensor (arXiv 2209.05433, §3); with
scales this fine, precision is worth more than range (DeepSeek-V3, arXiv 2412.19437, §3.3.2).

**Why powers of two.** Dividing by one rounds nothing, so kernel and reference agree in every bit, and a weight
scaled along either axis becomes the same numbers except for those that underflow.

**Which products.** Those of the forward pass and of the inputs' gradients. Weight gradients sum over tokens, so both
of their factors would have to be scaled along the other axis, transposed and written again; they are also the longest
sums. They stay in bf16 (torchao's recipe ``rowwise_with_gw_hp`` does the same), as do norms, the embedding, the
head, exchanges, masters and the optimizer.

Shape suffixes: T rows, k the summed axis, c rows of the right factor, g products of a batch; leading axes are g.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from boost_core.kernels.launch import block_of, jit, rows, runs_on_triton, tl, triton, warps_of

LARGEST = 448.0  # torch.finfo(torch.float8_e4m3fn).max, 0.875 · 2⁹
_LEAST_EXPONENT = -126
_COLUMNS, _DEPTH = 16, 128  # a tile: 32 bytes of bf16 are read at a time, 128 of 8-bit numbers written


class QuantisedRows(NamedTuple):
    """A matrix in 8 bits.

    Attributes:
        values: ``[…, T, k]``, ``torch.float8_e4m3fn``, rows dense.
        scales: Factors for each row's values, ``[…, T]``, fp32: powers of two.
    """

    values: torch.Tensor
    scales: torch.Tensor


def fp8_product(
    left: QuantisedRows, right: QuantisedRows, out: torch.Tensor, fast_accumulation: bool = False
) -> torch.Tensor:
    """``left · rightᵀ``, written into ``out`` and returned.

    Args:
        left: ``[T, k]`` or ``[g, T, k]``.
        right: ``[c, k]`` or ``[g, c, k]``.
        out: ``[T, c]`` or ``[g, T, c]``; bf16 on a GPU.
        fast_accumulation: Whether tensor cores may sum in fewer bits than fp32 has, as in NVIDIA's Transformer Engine
            for the forward pass but not for the backward.
    """
    if not runs_on_triton(left.values):  # the reference: multiplied in fp32
        return out.copy_(dequantised(left) @ dequantised(right).mT)
    batch = (*left, *right, out)
    for x_Tk, x_scale_T, w_ck, w_scale_c, y_Tc in zip(*batch, strict=True) if out.ndim == 3 else [batch]:
        # The public torch.nn.functional.scaled_mm takes no output tensor.
        torch._scaled_mm(
            x_Tk, w_ck.mT, x_scale_T.unsqueeze(-1), w_scale_c.unsqueeze(0),
            out_dtype=out.dtype, use_fast_accum=fast_accumulation, out=y_Tc,
        )  # fmt: skip
    return out


def dequantised(x: QuantisedRows) -> torch.Tensor:
    """Convert 8-bit numbers back to fp32."""
    return x.values.float() * x.scales.unsqueeze(-1)


def unavailable(device: torch.device) -> str | None:
    """Return why a device lacks such products, in words; ``None`` if it has them."""
    if device.type != "cuda":
        return "a CPU has no 8-bit products"
    major, minor = torch.cuda.get_device_capability(device)
    if (major, minor) >= (8, 9):
        return None
    return f"{torch.cuda.get_device_name(device)} has compute capability {major}.{minor}, but 8-bit products need 8.9"


def quantise_rows(x: torch.Tensor, factor_T: torch.Tensor | None = None) -> QuantisedRows:
    """Quantise the rows of a matrix, or of several, to 8 bits.

    Args:
        x: ``[…, T, k]``, at most three axes; columns are dense.
        factor_T: Multiplies each row beforehand, ``[T]``.
    """
    if not runs_on_triton(x):
        return quantise_rows_reference(x, factor_T)
    x_gTk = rows(x if x.ndim == 3 else x.unsqueeze(0))
    count, tokens, columns = x_gTk.shape
    result = empty_quantised(x.shape, x.device)
    values_gTk, block = result.values.view(x_gTk.shape), block_of(columns)
    _rows[(tokens, count)](
        x_gTk, x_gTk if factor_T is None else factor_T, values_gTk, result.scales, x_gTk.stride(0), x_gTk.stride(1),
        values_gTk.stride(0), values_gTk.stride(1), columns,
        FACTOR=factor_T is not None, BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip
    return result


def quantise_rows_reference(x: torch.Tensor, factor_T: torch.Tensor | None = None) -> QuantisedRows:
    """The same as torch rounds to 8 bits."""
    scaled = x.float() if factor_T is None else x.float() * factor_T.float().unsqueeze(-1)
    largest = scaled.abs().amax(dim=-1)
    # The smallest power of two that brings the largest number to 448 or less; non-finite values stay so.
    mantissa, exponent = torch.frexp(largest.clamp(min=2.0**_LEAST_EXPONENT))  # mantissa from 0.5
    exponent = (exponent - 9 + (mantissa > LARGEST / 2**9)).clamp(min=_LEAST_EXPONENT)
    scales = torch.where(largest.isfinite(), torch.ldexp(torch.ones_like(largest), exponent), largest)
    return QuantisedRows((scaled / scales.unsqueeze(-1)).to(torch.float8_e4m3fn), scales)


def quantise_columns(x: torch.Tensor, factor_k: torch.Tensor | None = None) -> QuantisedRows:
    """Quantise the columns of a matrix, or of several, as the rows of a right factor.

    Args:
        x: ``[…, k, c]``, at most three axes.
        factor_k: Multiplies each row beforehand, ``[k]``.

    Returns:
        ``[…, c, k]``.
    """
    if not runs_on_triton(x):  # the reference
        scaled = x.float() if factor_k is None else x.float() * factor_k.float().unsqueeze(-1)
        values, scales = quantise_rows_reference(scaled.mT)
        return QuantisedRows(values.contiguous(), scales)
    x_gkc = rows(x if x.ndim == 3 else x.unsqueeze(0))
    count, depth, columns = x_gkc.shape
    result = empty_quantised((*x.shape[:-2], columns, depth), x.device)
    values_gck = result.values.view(count, columns, depth)
    _columns[(triton.cdiv(columns, _COLUMNS), count)](
        x_gkc, x_gkc if factor_k is None else factor_k, values_gck, result.scales, x_gkc.stride(0), x_gkc.stride(1),
        values_gck.stride(0), values_gck.stride(1), depth, columns,
        FACTOR=factor_k is not None, COLUMNS=_COLUMNS, DEPTH=_DEPTH,
    )  # fmt: skip
    return result


# How the kernels that write activations leave their rows for the product that reads them.


def empty_quantised(shape: tuple[int, ...], device: torch.device) -> QuantisedRows:
    """Allocate memory for values of a shape and for their scales."""
    values = torch.empty(shape, dtype=torch.float8_e4m3fn, device=device)
    return QuantisedRows(values, torch.empty(shape[:-1], dtype=torch.float32, device=device))


@dataclass
class PrecomputedRows:
    """The rows of a tensor in 8 bits, where the kernel that writes it leaves them for the one product that reads it.

    Attributes:
        rows: The rows; ``None`` where there are none: the product then quantises the tensor itself.
    """

    rows: QuantisedRows | None = None

    def allocate(self, like: torch.Tensor) -> QuantisedRows:
        """Allocate memory for the rows of such a tensor, and return it to be written."""
        self.rows = empty_quantised(like.shape, like.device)
        return self.rows

    def take(self) -> QuantisedRows | None:
        """Return them once, so that use frees them."""
        rows, self.rows = self.rows, None
        return rows


# The Triton kernels: rows in registers; columns in tiles, read twice, of which a weight has few.
#
# Scales are made from the bits of fp32 numbers, so that they are exact powers of two.


@jit
def scale_of(largest):
    """The smallest power of two that brings ``largest`` to 448 or less, and its inverse; non-finite values stay so."""
    bits = largest.to(tl.int32, bitcast=True)
    exponent = tl.maximum((bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000).to(tl.int32), 1)  # 448 is 1.75 · 2⁸
    infinite = bits >= 0x7F800000
    scale = tl.where(infinite, bits, exponent << 23).to(tl.float32, bitcast=True)
    inverse = tl.where(infinite, bits, (254 - exponent) << 23).to(tl.float32, bitcast=True)
    return scale, inverse


@jit
def store_quantised(x, values, scale, inside):
    """Write a row held in registers, 0 outside, in 8 bits."""
    x = x.to(tl.float32)
    factor, inverse = scale_of(tl.max(tl.abs(x), axis=0))
    tl.store(values, (x * inverse).to(values.dtype.element_ty), mask=inside)
    tl.store(scale, factor)


@jit
def _rows(
    x_ptr, factor_ptr, value_ptr, row_scale_ptr, x_group_stride, x_stride, value_group_stride, value_stride, columns,
    FACTOR: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + group * x_group_stride + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if FACTOR:
        x *= tl.load(factor_ptr + row).to(tl.float32)
    values = value_ptr + group * value_group_stride + row * value_stride + column
    store_quantised(x, values, row_scale_ptr + group * tl.num_programs(0) + row, inside)


@jit
def _columns(
    x_ptr, factor_ptr, value_ptr, row_scale_ptr, x_group_stride, x_stride, value_group_stride, value_stride, depth,
    columns, FACTOR: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    group = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0).to(tl.int64) * COLUMNS + tl.arange(0, COLUMNS)
    here = column < columns
    largest = tl.zeros([COLUMNS], dtype=tl.float32)
    x_begin = x_ptr + group * x_group_stride
    for begin in range(0, depth, DEPTH):
        x, _, _ = _tile(x_begin, factor_ptr, x_stride, begin, depth, column, here, FACTOR, DEPTH)
        largest = tl.maximum(largest, tl.max(tl.abs(x), axis=0))
    scale, inverse = scale_of(largest)
    tl.store(row_scale_ptr + group * columns + column, scale, mask=here)
    for begin in range(0, depth, DEPTH):
        x, row, inside = _tile(x_begin, factor_ptr, x_stride, begin, depth, column, here, FACTOR, DEPTH)
        value = value_ptr + group * value_group_stride + column[None, :] * value_stride + row[:, None]
        tl.store(value, (x * inverse[None, :]).to(value_ptr.dtype.element_ty), mask=inside)


@jit
def _tile(weight, factor, x_stride, begin, depth, column, here, FACTOR: tl.constexpr, DEPTH: tl.constexpr):
    row = tl.cast(begin, tl.int64) + tl.arange(0, DEPTH)
    inside = (row < depth)[:, None] & here[None, :]
    x = tl.load(weight + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0).to(tl.float32)
    if FACTOR:
        x *= tl.load(factor + row, mask=row < depth, other=0.0).to(tl.float32)[:, None]
    return x, row, inside
