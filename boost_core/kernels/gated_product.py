"""The MLP's gate: the product of two up-projections, one of them through an activation f.

::

    h = f(a) ∘ b          dh gives  db = dh ∘ f(a),  da = dh ∘ b ∘ f'(a)

(With a SiLU SwiGLU, arXiv 2002.05202; linear, CoLA's, arXiv 2502.10940.) The batched up-projection returns a and b one
after the other in one tensor, and its backward pass needs their gradients in the same form: they are written there
directly. Shape suffixes: g projections, T tokens, f MLP.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from boost_core.config.model import Activation
from boost_core.kernels.fp8_product import PrecomputedRows, scale_of, store_quantised
from boost_core.kernels.latent_epilogue import activate, activation_gradient, activation_reference
from boost_core.kernels.launch import Part, block_of, jit, members, rows, runs_on_triton, tl, triton, warps_of

LARGEST_BLOCK = 1024
LARGEST_BLOCK_FP8 = 4096  # backward: eight elements for each of 512 threads


def gated_product(
    parts: list[torch.Tensor], activation: Activation, quantised: PrecomputedRows | None = None,
    of_gradients: Sequence[PrecomputedRows] = (), part: Part | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute the gated product, ``[T, f]``.

    Args:
        parts: Gate and up, ``[2, T, f]`` or two of ``[1, T, f]``.
        activation: The gate's.
        quantised: Where the kernel leaves the result's rows in 8 bits; ``None`` if no product reads them so.
        of_gradients: Likewise those of each part's gradient, which goes unchanged to the one product that returned the
            part; with ``quantised``.
        part: The part of the tokens, if there are others; not with ``quantised``, whose kernels compute all again.
    """
    if runs_on_triton(parts[0]):
        return _GatedProduct.apply(activation, quantised, of_gradients, part, *map(rows, parts))  # type: ignore[no-any-return, no-untyped-call]
    # The reference, differentiated by autograd.
    gate_Tf, up_Tf = members(parts)
    return activation_reference(gate_Tf, activation) * up_Tf


# The Triton kernels: elementwise over blocks of a row, fp32 arithmetic. For fp8 a program has a whole row, because its
# scale is that of its largest element. Forward it is in registers. Backward, five rows of 30B would not fit into these:
# a program goes over its row in blocks, and again over the two gradients, which the caches still hold.


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, activation: Activation, quantised: PrecomputedRows | None, of_gradients: Sequence[PrecomputedRows],
        part: Part | None, *parts: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        gate_Tf, up_Tf = members(parts)
        tokens, columns = gate_Tf.shape
        fp8 = quantised is not None
        ctx.save_for_backward(*parts)
        ctx.activation, ctx.fp8, ctx.of_gradients = activation, fp8, of_gradients
        if part is None or fp8:
            out_Tf = torch.empty((tokens, columns), dtype=gate_Tf.dtype, device=gate_Tf.device)
        else:
            out_Tf, computed = part.result(gate_Tf, (tokens, columns))
            if computed:
                return out_Tf
        # Not written to as such if there is nothing to quantise.
        values, scales = (out_Tf, out_Tf) if quantised is None else quantised.allocate(out_Tf)
        block = block_of(columns) if fp8 else min(block_of(columns), LARGEST_BLOCK)
        _forward[(tokens, triton.cdiv(columns, block))](
            gate_Tf, up_Tf, out_Tf, values, scales, gate_Tf.stride(0), up_Tf.stride(0), out_Tf.stride(0), columns,
            ACTIVATION=activation.value, FP8=fp8, BLOCK=block, num_warps=warps_of(block),
        )  # fmt: skip
        return out_Tf

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = ctx.saved_tensors
        dout_Tf = rows(gradients[0])
        dparts = [torch.empty_like(part_gTf) for part_gTf in parts]
        gate_Tf, up_Tf = members(parts)
        dgate_Tf, dup_Tf = members(dparts)
        quantised = [(each, each) for each in dparts]  # never written through if there is nothing to quantise
        if ctx.fp8:
            quantised = [rows_of.allocate(each) for rows_of, each in zip(ctx.of_gradients, dparts, strict=True)]
        values, scales = (members(each) for each in zip(*quantised, strict=True))
        tokens, columns = gate_Tf.shape
        block = min(block_of(columns), LARGEST_BLOCK_FP8 if ctx.fp8 else LARGEST_BLOCK)
        _backward[(tokens, 1 if ctx.fp8 else triton.cdiv(columns, block))](
            gate_Tf, up_Tf, dout_Tf, dgate_Tf, dup_Tf, values[0], scales[0], values[-1], scales[-1],
            gate_Tf.stride(0), up_Tf.stride(0), dout_Tf.stride(0), dgate_Tf.stride(0), dup_Tf.stride(0), columns,
            ACTIVATION=ctx.activation.value, FP8=ctx.fp8, BLOCK=block, num_warps=warps_of(block),
        )  # fmt: skip
        return None, None, None, None, *dparts


@jit
def _forward(
    gate_ptr, up_ptr, out_ptr, value_ptr, row_scale_ptr, gate_stride, up_stride, out_stride, columns,
    ACTIVATION: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    out = (activate(gate, ACTIVATION) * up).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * out_stride + column, out, mask=inside)
    if FP8:  # the whole row is here
        store_quantised(out, value_ptr + row * columns + column, row_scale_ptr + row, inside)


@jit
def _backward(
    gate_ptr, up_ptr, dout_ptr, dgate_ptr, dup_ptr, gate_value_ptr, gate_row_scale_ptr, up_value_ptr, up_row_scale_ptr,
    gate_stride, up_stride, dout_stride, dgate_stride, dup_stride, columns,
    ACTIVATION: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    dgate_row, dup_row = dgate_ptr + row * dgate_stride, dup_ptr + row * dup_stride
    largest_dgate, largest_dup = tl.zeros([BLOCK], dtype=tl.float32), tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(tl.program_id(1) * BLOCK, columns, tl.num_programs(1) * BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < columns
        gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
        dout = tl.load(dout_ptr + row * dout_stride + column, mask=inside, other=0.0).to(tl.float32)
        dgate = activation_gradient(dout * up, gate, ACTIVATION).to(dgate_ptr.dtype.element_ty)
        dup = (dout * activate(gate, ACTIVATION)).to(dup_ptr.dtype.element_ty)
        tl.store(dgate_row + column, dgate, mask=inside)
        tl.store(dup_row + column, dup, mask=inside)
        if FP8:
            largest_dgate = tl.maximum(largest_dgate, tl.abs(dgate.to(tl.float32)))
            largest_dup = tl.maximum(largest_dup, tl.abs(dup.to(tl.float32)))
    if FP8:
        tl.debug_barrier()  # what a thread reads another may have written
        dgate_scale, dgate_inverse = scale_of(tl.max(largest_dgate, axis=0))
        dup_scale, dup_inverse = scale_of(tl.max(largest_dup, axis=0))
        tl.store(gate_row_scale_ptr + row, dgate_scale)
        tl.store(up_row_scale_ptr + row, dup_scale)
        for begin in range(0, columns, BLOCK):
            column = begin + tl.arange(0, BLOCK)
            inside = column < columns
            dgate = tl.load(dgate_row + column, mask=inside).to(tl.float32) * dgate_inverse
            dup = tl.load(dup_row + column, mask=inside).to(tl.float32) * dup_inverse
            to = row * columns + column
            tl.store(gate_value_ptr + to, dgate.to(gate_value_ptr.dtype.element_ty), mask=inside)
            tl.store(up_value_ptr + to, dup.to(up_value_ptr.dtype.element_ty), mask=inside)
