"""The Triton kernels: elementwise over blocks of a row, fp32 arithmetic."""

from typing import Any

import torch
import triton
import triton.language as tl

from boost_core.kernels.launch import block_of, rows, warps_of

LARGEST_BLOCK = 1024


@triton.jit
def _forward(
    gate_ptr,
    up_ptr,
    out_ptr,
    gate_stride,
    up_stride,
    out_stride,
    columns,
    ACTIVATION: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    if ACTIVATION:
        gate *= tl.sigmoid(gate)
    tl.store(out_ptr + row * out_stride + column, (gate * up).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    gate_ptr, up_ptr, dout_ptr, dgate_ptr, dup_ptr, gate_stride, up_stride, dout_stride, dgate_stride, dup_stride,
    columns, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < columns
    gate = tl.load(gate_ptr + row * gate_stride + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + column, mask=inside, other=0.0).to(tl.float32)
    dout = tl.load(dout_ptr + row * dout_stride + column, mask=inside, other=0.0).to(tl.float32)
    dgate = dout * up
    if ACTIVATION:
        sigmoid = tl.sigmoid(gate)
        dgate *= sigmoid * (1.0 + gate * (1.0 - sigmoid))
        gate *= sigmoid
    tl.store(dgate_ptr + row * dgate_stride + column, dgate.to(dgate_ptr.dtype.element_ty), mask=inside)
    tl.store(dup_ptr + row * dup_stride + column, (dout * gate).to(dup_ptr.dtype.element_ty), mask=inside)


def _members(parts: list[torch.Tensor]) -> list[torch.Tensor]:
    return [member_Tf for part_gTf in parts for member_Tf in part_gTf.unbind(0)]


def _grid(tokens: int, columns: int, block: int) -> tuple[int, int]:
    return tokens, triton.cdiv(columns, block)


class _GatedProduct(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, activation: bool, *parts: torch.Tensor) -> torch.Tensor:
        gate_Tf, up_Tf = _members(list(parts))
        tokens, columns = gate_Tf.shape
        out_Tf = torch.empty((tokens, columns), dtype=gate_Tf.dtype, device=gate_Tf.device)
        block = min(block_of(columns), LARGEST_BLOCK)
        _forward[_grid(tokens, columns, block)](
            gate_Tf, up_Tf, out_Tf, gate_Tf.stride(0), up_Tf.stride(0), out_Tf.stride(0), columns,
            ACTIVATION=activation, BLOCK=block, num_warps=warps_of(block),
        )  # fmt: skip
        ctx.save_for_backward(*parts)
        ctx.activation = activation
        return out_Tf

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = list(ctx.saved_tensors)
        dout_Tf = rows(gradients[0])
        dparts = [torch.empty_like(part_gTf) for part_gTf in parts]
        gate_Tf, up_Tf = _members(parts)
        dgate_Tf, dup_Tf = _members(dparts)
        tokens, columns = gate_Tf.shape
        block = min(block_of(columns), LARGEST_BLOCK)
        _backward[_grid(tokens, columns, block)](
            gate_Tf, up_Tf, dout_Tf, dgate_Tf, dup_Tf, gate_Tf.stride(0), up_Tf.stride(0), dout_Tf.stride(0),
            dgate_Tf.stride(0), dup_Tf.stride(0), columns, ACTIVATION=ctx.activation, BLOCK=block,
            num_warps=warps_of(block),
        )  # fmt: skip
        return None, *dparts


def gated_product(parts: list[torch.Tensor], activation: bool) -> torch.Tensor:
    """The same function as :func:`naive.gated_product`; see the package for the arguments."""
    return _GatedProduct.apply(activation, *(rows(part_gTf) for part_gTf in parts))  # type: ignore[no-any-return, no-untyped-call]
