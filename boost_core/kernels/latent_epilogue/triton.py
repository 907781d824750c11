"""The Triton kernels: one program a token, the whole latent row in registers, fp32 arithmetic."""

from typing import Any

import torch
import triton
import triton.language as tl


@triton.jit
def _forward(
    h_ptr, s_ptr, z_ptr, h_stride, z_stride, columns, width, epsilon,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    y = tl.load(h_ptr + row * h_stride + column, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        y *= tl.rsqrt(tl.load(s_ptr + row).to(tl.float32) / width + epsilon)
    if ACTIVATION:
        y *= tl.sigmoid(y)
    tl.store(z_ptr + row * z_stride + column, y.to(z_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _backward(
    h_ptr, s_ptr, dz_ptr, dh_ptr, ds_ptr, h_stride, dz_stride, dh_stride, columns, width, epsilon,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < columns
    y = tl.load(h_ptr + row * h_stride + column, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(dz_ptr + row * dz_stride + column, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        mean_square = tl.load(s_ptr + row).to(tl.float32) / width + epsilon
        inverse_rms = tl.rsqrt(mean_square)
        y *= inverse_rms
    if ACTIVATION:
        sigmoid = tl.sigmoid(y)
        dy *= sigmoid * (1.0 + y * (1.0 - sigmoid))
    if NORM:
        ds = -tl.sum(dy * y, axis=0) / (2.0 * width * mean_square)
        tl.store(ds_ptr + row, ds.to(ds_ptr.dtype.element_ty))
        dy *= inverse_rms
    tl.store(dh_ptr + row * dh_stride + column, dy.to(dh_ptr.dtype.element_ty), mask=inside)


class _LatentEpilogue(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_Tr: torch.Tensor, s_T: torch.Tensor | None, width: int, epsilon: float, activation: bool
    ) -> torch.Tensor:
        z_Tr = torch.empty(h_Tr.shape, dtype=h_Tr.dtype, device=h_Tr.device)
        tokens, columns = h_Tr.shape
        _forward[(tokens,)](
            h_Tr, h_Tr if s_T is None else s_T, z_Tr, h_Tr.stride(0), z_Tr.stride(0), columns, width, epsilon,
            NORM=s_T is not None, ACTIVATION=activation, BLOCK=triton.next_power_of_2(columns),
        )  # fmt: skip
        ctx.save_for_backward(h_Tr, s_T)
        ctx.width, ctx.epsilon, ctx.activation = width, epsilon, activation
        return z_Tr

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h_Tr, s_T = ctx.saved_tensors
        dz_Tr = gradients[0].contiguous()
        dh_Tr = torch.empty(h_Tr.shape, dtype=h_Tr.dtype, device=h_Tr.device)
        ds_T = None if s_T is None else torch.empty_like(s_T)
        tokens, columns = h_Tr.shape
        _backward[(tokens,)](
            h_Tr, h_Tr if s_T is None else s_T, dz_Tr, dh_Tr, dh_Tr if ds_T is None else ds_T,
            h_Tr.stride(0), dz_Tr.stride(0), dh_Tr.stride(0), columns, ctx.width, ctx.epsilon,
            NORM=s_T is not None, ACTIVATION=ctx.activation, BLOCK=triton.next_power_of_2(columns),
        )  # fmt: skip
        return dh_Tr, ds_T, None, None, None


def latent_epilogue(
    h_Tr: torch.Tensor, s_T: torch.Tensor | None, width: int, epsilon: float, activation: bool
) -> torch.Tensor:
    """The same function as :func:`naive.latent_epilogue`; see the package for the arguments."""
    # The statistic arrives as a column of the reduced payload; the kernels read it densely.
    statistic = None if s_T is None else s_T.contiguous()
    return _LatentEpilogue.apply(h_Tr, statistic, width, epsilon, activation)  # type: ignore[no-any-return, no-untyped-call]
