"""The Triton kernels: one program per token, one projection's latent in registers at a time, fp32 arithmetic."""

from typing import Any

import torch
import triton
import triton.language as tl

from boost_core.kernels.fp8_product.triton import empty_quantised, store_quantised, with_quantised
from boost_core.kernels.launch import block_of, rows, warps_of


@triton.jit
def _forward(
    h_ptr, s_ptr, z_ptr, value_ptr, row_scale_ptr, h_stride, z_group_stride, z_stride, rank, width, epsilon,
    COUNT: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < rank
    inverse_rms = 1.0
    if NORM:
        inverse_rms = tl.rsqrt(tl.load(s_ptr + row).to(tl.float32) / width + epsilon)
    for index in tl.static_range(COUNT):
        group = tl.cast(index, tl.int64)
        y = tl.load(h_ptr + row * h_stride + group * rank + column, mask=inside, other=0.0).to(tl.float32)
        y *= inverse_rms
        if ACTIVATION:
            y *= tl.sigmoid(y)
        z = y.to(z_ptr.dtype.element_ty)
        to = group * z_group_stride + row * z_stride + column
        tl.store(z_ptr + to, z, mask=inside)
        if FP8:
            store_quantised(z, value_ptr + to, row_scale_ptr + group * tl.num_programs(0) + row, inside)


@triton.jit
def _backward(
    h_ptr, s_ptr, dz_ptr, dh_ptr, ds_ptr, h_stride, dz_group_stride, dz_stride, dh_stride, rank, width, epsilon,
    COUNT: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < rank
    inverse_rms = 1.0
    mean_square = 1.0
    if NORM:
        mean_square = tl.load(s_ptr + row).to(tl.float32) / width + epsilon
        inverse_rms = tl.rsqrt(mean_square)
    products = tl.zeros([BLOCK], dtype=tl.float32)
    for index in tl.static_range(COUNT):
        group = tl.cast(index, tl.int64)
        y = tl.load(h_ptr + row * h_stride + group * rank + column, mask=inside, other=0.0).to(tl.float32)
        dz = dz_ptr + group * dz_group_stride + row * dz_stride + column
        dy = tl.load(dz, mask=inside, other=0.0).to(tl.float32)
        y *= inverse_rms
        if ACTIVATION:
            sigmoid = tl.sigmoid(y)
            dy *= sigmoid * (1.0 + y * (1.0 - sigmoid))
        products += dy * y
        dh = dh_ptr + row * dh_stride + group * rank + column
        tl.store(dh, (dy * inverse_rms).to(dh_ptr.dtype.element_ty), mask=inside)
    if NORM:
        ds = -tl.sum(products, axis=0) / (2.0 * width * mean_square)
        tl.store(ds_ptr + row, ds.to(ds_ptr.dtype.element_ty))


@triton.jit
def _statistic_gradient(
    dh_ptr, h_ptr, s_ptr, ds_ptr, dh_stride, h_stride, columns, width, epsilon, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    products = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < columns
        dh = tl.load(dh_ptr + row * dh_stride + column, mask=inside, other=0.0).to(tl.float32)
        products += dh * tl.load(h_ptr + row * h_stride + column, mask=inside, other=0.0).to(tl.float32)
    ds = -tl.sum(products, axis=0) / (2.0 * (tl.load(s_ptr + row).to(tl.float32) + width * epsilon))
    tl.store(ds_ptr + row, ds)


class _LatentEpilogue(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_Tc: torch.Tensor, s_T: torch.Tensor | None, count: int, width: int, epsilon: float,
        activation: bool, fp8: bool, made_gTr: torch.Tensor | None,
    ) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(h_Tc, s_T)
        ctx.count, ctx.width, ctx.epsilon, ctx.activation = count, width, epsilon, activation
        if made_gTr is not None:
            return made_gTr.detach(), None, None
        tokens, rank = h_Tc.shape[0], h_Tc.shape[1] // count
        z_gTr = torch.empty((count, tokens, rank), dtype=h_Tc.dtype, device=h_Tc.device)
        values, scales = empty_quantised(z_gTr.shape, h_Tc.device) if fp8 else (None, None)
        block = block_of(rank)
        _forward[(tokens,)](
            h_Tc, h_Tc if s_T is None else s_T, z_gTr, z_gTr if values is None else values,
            z_gTr if scales is None else scales, h_Tc.stride(0), z_gTr.stride(0), z_gTr.stride(1), rank, width, epsilon,
            COUNT=count, NORM=s_T is not None, ACTIVATION=activation, FP8=fp8, BLOCK=block,
            num_warps=warps_of(block),
        )  # fmt: skip
        ctx.mark_non_differentiable(*(each for each in (values, scales) if each is not None))
        return z_gTr, values, scales

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h_Tc, s_T = ctx.saved_tensors
        dz_gTr = rows(gradients[0])
        tokens, rank = h_Tc.shape[0], h_Tc.shape[1] // ctx.count
        dh_Tc = torch.empty(h_Tc.shape, dtype=h_Tc.dtype, device=h_Tc.device)
        ds_T = None if s_T is None else torch.empty_like(s_T)
        block = block_of(rank)
        _backward[(tokens,)](
            h_Tc, h_Tc if s_T is None else s_T, dz_gTr, dh_Tc, dh_Tc if ds_T is None else ds_T, h_Tc.stride(0),
            dz_gTr.stride(0), dz_gTr.stride(1), dh_Tc.stride(0), rank, ctx.width, ctx.epsilon,
            COUNT=ctx.count, NORM=s_T is not None, ACTIVATION=ctx.activation, BLOCK=block, num_warps=warps_of(block),
        )  # fmt: skip
        return dh_Tc, ds_T, None, None, None, None, None, None


def latent_epilogue(
    h_Tc: torch.Tensor, s_T: torch.Tensor | None, count: int, width: int, epsilon: float, activation: bool,
    fp8: bool, made_gTr: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """The same function as :func:`naive.latent_epilogue`; see the package for the arguments."""
    statistic = None if s_T is None else s_T.contiguous()
    z_gTr, *made = _LatentEpilogue.apply(  # type: ignore[no-untyped-call]
        rows(h_Tc), statistic, count, width, epsilon, activation, fp8, made_gTr
    )
    return with_quantised(z_gTr, made)


def statistic_gradient(
    dh_Tc: torch.Tensor, h_Tc: torch.Tensor, s_T: torch.Tensor, width: int, epsilon: float
) -> torch.Tensor:
    """The same function as :func:`naive.statistic_gradient`; see the package for the arguments."""
    dh_Tc, h_Tc = rows(dh_Tc), rows(h_Tc)
    tokens, columns = h_Tc.shape
    ds_T = torch.empty(tokens, dtype=torch.float32, device=h_Tc.device)
    block = min(block_of(columns), 4096)
    _statistic_gradient[(tokens,)](
        dh_Tc, h_Tc, s_T.contiguous(), ds_T, dh_Tc.stride(0), h_Tc.stride(0), columns, width, epsilon,
        BLOCK=block, num_warps=warps_of(block),
    )  # fmt: skip
    return ds_T
