"""What a block adds to the residual stream, and the sum of squares that the next norm needs, in one pass.

::

    x = x + y
    s = Σ_d x²

and backward, where x continues in the stream and into the next projection, with gradients ``dx₁``, ``dx₂``, ``ds``::

    dx = dy = dx₁ + dx₂ + 2 x ds

One pass reads x and y, another one three gradients, where separate additions would read and write each sum again (the
fused norm's backward, BOOST, arXiv 2512.12131, derived here). Shape suffixes: T tokens, d hidden, whole or this rank's
shard.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from boost_core.kernels.fp8_product import PrecomputedRows, store_quantised
from boost_core.kernels.launch import Part, block_of, jit, precise, rows, runs_on_triton, tl, warps_of


class Residual(NamedTuple):
    """The residual stream between two additions.

    Attributes:
        stream: The values for the next addition, ``[T, d]``.
        inputs: The same values for the next projection. Two names for them, so that both gradients arrive together.
        squares: Sum of squares of each row, ``[T]``, at least fp32 unless rounded to be sent; ``None`` if no norm needs
            it.
        quantised: The rows of the inputs in 8 bits, if a product reads them.
    """

    stream: torch.Tensor
    inputs: torch.Tensor
    squares: torch.Tensor | None
    quantised: PrecomputedRows | None = None


def residual_add(
    x_Td: torch.Tensor, y_Td: torch.Tensor | None, quantised: PrecomputedRows | None = None, part: Part | None = None,
    rounded: bool = False,
) -> Residual:  # fmt: skip
    """Compute ``x + y`` and its sums of squares.

    Args:
        x_Td: The stream so far, ``[T, d]``.
        y_Td: A block's output, of the same shape and type; ``None`` before anything is added.
        quantised: Where the kernel leaves the sum's rows in 8 bits; ``None`` if no product reads them so.
        part: The part of the tokens, if there are others; not with ``quantised``, whose kernels compute all again.
        rounded: Whether the sums of squares are rounded to the type of ``x``, in which they are sent.
    """
    squares_type = x_Td.dtype if rounded else torch.promote_types(x_Td.dtype, torch.float32)
    if not runs_on_triton(x_Td):  # the reference, differentiated by autograd
        sum_Td = x_Td if y_Td is None else x_Td + y_Td
        return Residual(sum_Td, sum_Td, precise(sum_Td).square().sum(dim=-1).to(squares_type), quantised)
    y_Td = None if y_Td is None else rows(y_Td)
    stream_Td, input_Td, squares_T = _ResidualAdd.apply(rows(x_Td), y_Td, quantised, part, squares_type)  # type: ignore[no-untyped-call]
    return Residual(stream_Td, input_Td, squares_T, quantised)


# The Triton kernels: one program per token, the whole row in registers, fp32 arithmetic.


class _ResidualAdd(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_Td: torch.Tensor, y_Td: torch.Tensor | None, quantised: PrecomputedRows | None, part: Part | None,
        squares_type: torch.dtype,
    ) -> tuple[torch.Tensor, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        tokens, columns = x_Td.shape
        computed = False
        if part is not None and quantised is None:
            sum_Td, computed = part.result(x_Td, x_Td.shape)
            squares_T = part.result(x_Td, (tokens, 1), dtype=squares_type)[0].squeeze(-1)
        else:
            sum_Td = x_Td.view_as(x_Td) if y_Td is None else x_Td.new_empty(x_Td.shape)
            squares_T = torch.empty(tokens, dtype=squares_type, device=x_Td.device)
        ctx.save_for_backward(sum_Td)
        ctx.added = y_Td is not None
        if computed:
            return sum_Td, sum_Td.view_as(sum_Td), squares_T
        # Not written to as such if there is nothing to quantise.
        values, scales = (x_Td, x_Td) if quantised is None else quantised.allocate(x_Td)
        block, y = block_of(columns), x_Td if y_Td is None else y_Td
        _forward[(tokens,)](
            x_Td, y, sum_Td, squares_T, values, scales, x_Td.stride(0), y.stride(0), sum_Td.stride(0), columns,
            ADD=y_Td is not None, FP8=quantised is not None, BLOCK=block, num_warps=warps_of(block),
        )  # fmt: skip
        return sum_Td, sum_Td.view_as(sum_Td), squares_T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        (x_Td,), (stream_Td, input_Td, squares_T) = ctx.saved_tensors, gradients
        tokens, columns = x_Td.shape
        dx_Td = torch.empty(x_Td.shape, dtype=x_Td.dtype, device=x_Td.device)
        block = block_of(columns)
        # A pointer for a missing gradient is not read.
        stream = dx_Td if stream_Td is None else rows(stream_Td)
        inputs = dx_Td if input_Td is None else rows(input_Td)
        _backward[(tokens,)](
            x_Td, stream, inputs, dx_Td if squares_T is None else squares_T.contiguous(), dx_Td, x_Td.stride(0),
            stream.stride(0), inputs.stride(0), dx_Td.stride(0), columns, STREAM=stream_Td is not None,
            INPUT=input_Td is not None, SQUARES=squares_T is not None, BLOCK=block, num_warps=warps_of(block),
        )  # fmt: skip
        return dx_Td, dx_Td if ctx.added else None, None, None, None


@jit
def _forward(
    x_ptr, y_ptr, out_ptr, s_ptr, value_ptr, row_scale_ptr, x_stride, y_stride, out_stride, columns,
    ADD: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < columns
    x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ADD:
        x += tl.load(y_ptr + row * y_stride + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * out_stride + column, x.to(out_ptr.dtype.element_ty), mask=inside)
    tl.store(s_ptr + row, tl.sum(x * x, axis=0).to(s_ptr.dtype.element_ty))
    if FP8:
        # Computed from the stored values, as a separate pass would see them.
        store_quantised(x.to(out_ptr.dtype.element_ty), value_ptr + row * columns + column, row_scale_ptr + row, inside)


@jit
def _backward(
    x_ptr, stream_ptr, input_ptr, ds_ptr, dx_ptr, x_stride, stream_stride, input_stride, dx_stride, columns,
    STREAM: tl.constexpr, INPUT: tl.constexpr, SQUARES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < columns
    dx = tl.zeros([BLOCK], dtype=tl.float32)
    if STREAM:
        dx += tl.load(stream_ptr + row * stream_stride + column, mask=inside, other=0.0).to(tl.float32)
    if INPUT:
        dx += tl.load(input_ptr + row * input_stride + column, mask=inside, other=0.0).to(tl.float32)
    if SQUARES:
        x = tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0).to(tl.float32)
        dx += 2.0 * x * tl.load(ds_ptr + row).to(tl.float32)
    tl.store(dx_ptr + row * dx_stride + column, dx.to(dx_ptr.dtype.element_ty), mask=inside)
