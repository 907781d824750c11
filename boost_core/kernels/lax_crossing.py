"""LaX's crossing: a latent meets the gated latent of the previous block, then a norm and the activation.

With ``h`` and ``s`` as in ``latent_epilogue`` and ``c`` what the gate (``model.low_rank.LaxCrossing``) let through::

    u = h / sqrt(s / d + epsilon) + c        (h + c where no norm precedes the projection)
    n = (u − mean(u)) / sqrt(var(u) + norm_epsilon)
    z = f(n ∘ scale + shift)                 (f the activation of the bottleneck)

and backward, with ``dy = dz · f'(y)`` and ``dn = dy ∘ scale``::

    dc = du = (dn − mean(dn) − n mean(dn ∘ n)) / sqrt(var(u) + norm_epsilon)
    dscale = Σ_T dy ∘ n,  dshift = Σ_T dy
    dh = du / sqrt(s / d + epsilon),  ds = −(Σ_r du ∘ (u − c)) / (2 d (s / d + epsilon))

where Σ_r du ∘ u = norm_epsilon / (var(u) + norm_epsilon) Σ_r dn ∘ n: du is nearly orthogonal to u, and summed term by
term most of it would cancel. (LaX, arXiv 2505.21732.) Shape suffixes: T tokens, g projections, r rank, c = g·r columns.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import layer_norm

from boost_core.config.model import Activation
from boost_core.kernels.fp8_product import PrecomputedRows, store_quantised
from boost_core.kernels.latent_epilogue import activate, activation_gradient, activation_reference
from boost_core.kernels.launch import block_of, jit, precise, rows, runs_on_triton, tl, warps_of

LARGEST_PROGRAMS = 512  # per projection; enough to fill a GPU, few enough to sum


def lax_crossing(
    h_Tc: torch.Tensor, s_T: torch.Tensor | None, width: int, epsilon: float, crossed_gTr: torch.Tensor,
    scale_gr: torch.Tensor, shift_gr: torch.Tensor, norm_epsilon: float, activation: Activation,
    quantised: PrecomputedRows | None = None,
) -> torch.Tensor:  # fmt: skip
    """Compute the latents ``z_gTr`` that go on to the up-projection and to the next block.

    Args:
        h_Tc: Reduced latents of all projections, ``[T, g·r]``.
        s_T: Sum of squares of each residual row, ``[T]``; ``None`` where no norm precedes the projection.
        width: The full hidden size d that the squares were summed over.
        epsilon: Added to the mean square.
        crossed_gTr: The gate's output for the previous block's latents.
        scale_gr: Scale of the latents' norm.
        shift_gr: Its shift.
        norm_epsilon: Added to the latents' variance.
        activation: The bottleneck's.
        quantised: Where the kernel leaves the result's rows in 8 bits; ``None`` if no product reads them so.
    """
    if runs_on_triton(h_Tc):
        return _LatentCrossing.apply(  # type: ignore[no-any-return, no-untyped-call]
            rows(h_Tc), None if s_T is None else s_T.contiguous(), width, epsilon, rows(crossed_gTr),
            scale_gr.contiguous(), shift_gr.contiguous(), norm_epsilon, activation, quantised,
        )  # fmt: skip
    # The reference, differentiated by autograd: scale, add, norm and activation in at least fp32. A product even
    # without a norm, so that the gradient of h has memory of its own, as in the kernel.
    inverse_rms_T = h_Tc.new_ones(len(h_Tc)) if s_T is None else torch.rsqrt(precise(s_T) / width + epsilon)
    u_Tc = precise(h_Tc) * inverse_rms_T.unsqueeze(-1)
    count, rank = scale_gr.shape
    u_gTr = u_Tc.view(-1, count, rank).transpose(0, 1) + crossed_gTr
    n_gTr = layer_norm(u_gTr, (rank,), eps=norm_epsilon)
    y_gTr = n_gTr * scale_gr.unsqueeze(1) + shift_gr.unsqueeze(1)
    return activation_reference(y_gTr, activation).to(h_Tc.dtype)


# The Triton kernels: one latent in registers at a time, fp32 arithmetic. Backward, a program handles tokens at a fixed
# stride, so that it can sum the gradients of scale and shift in registers; the few remaining partial sums are added up
# by torch. Its reductions wait for one another, so that mean and deviation come from the forward pass, and the two sums
# that du needs are one reduction. A thread has half as many elements as elsewhere: it then needs at most 64 registers,
# with which half of a multiprocessor's threads are resident.


class _LatentCrossing(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_Tc: torch.Tensor, s_T: torch.Tensor | None, width: int, epsilon: float, crossed_gTr: torch.Tensor,
        scale_gr: torch.Tensor, shift_gr: torch.Tensor, norm_epsilon: float, activation: Activation,
        quantised: PrecomputedRows | None,
    ) -> torch.Tensor:  # fmt: skip
        count, tokens, rank = crossed_gTr.shape
        z_gTr = torch.empty((count, tokens, rank), dtype=h_Tc.dtype, device=h_Tc.device)
        # Not written to as such if there is nothing to quantise.
        values, scales = (z_gTr, z_gTr) if quantised is None else quantised.allocate(z_gTr)
        mean_gT, inverse_std_gT = torch.empty((2, count, tokens), dtype=torch.float32, device=h_Tc.device)
        block = block_of(rank)
        _forward[(tokens, count)](
            h_Tc, h_Tc if s_T is None else s_T, crossed_gTr, scale_gr, shift_gr, z_gTr, mean_gT, inverse_std_gT, values,
            scales, h_Tc.stride(0), crossed_gTr.stride(0), crossed_gTr.stride(1), z_gTr.stride(0), z_gTr.stride(1),
            rank, width, epsilon, norm_epsilon, NORM=s_T is not None, ACTIVATION=activation.value,
            FP8=quantised is not None, BLOCK=block, num_warps=warps_of(block),
        )  # fmt: skip
        ctx.save_for_backward(h_Tc, s_T, crossed_gTr, scale_gr, shift_gr, mean_gT, inverse_std_gT)
        ctx.width, ctx.epsilon, ctx.norm_epsilon, ctx.activation = width, epsilon, norm_epsilon, activation
        return z_gTr

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h_Tc, s_T, crossed_gTr, scale_gr, shift_gr, mean_gT, inverse_std_gT = ctx.saved_tensors
        dz_gTr = rows(gradients[0])
        count, tokens, rank = crossed_gTr.shape
        dh_Tc = torch.empty(h_Tc.shape, dtype=h_Tc.dtype, device=h_Tc.device)
        dcrossed_gTr = torch.empty(crossed_gTr.shape, dtype=crossed_gTr.dtype, device=h_Tc.device)
        programs = min(tokens, LARGEST_PROGRAMS)
        dscale_Pgr, dshift_Pgr = torch.empty((2, programs, count, rank), dtype=torch.float32, device=h_Tc.device)
        ds_gT = torch.empty((count, tokens), dtype=torch.float32, device=h_Tc.device)
        block = block_of(rank)
        _backward[(programs, count)](
            h_Tc, h_Tc if s_T is None else s_T, crossed_gTr, scale_gr, shift_gr, mean_gT, inverse_std_gT, dz_gTr, dh_Tc,
            ds_gT, dcrossed_gTr, dscale_Pgr, dshift_Pgr, h_Tc.stride(0), crossed_gTr.stride(0), crossed_gTr.stride(1),
            dz_gTr.stride(0), dz_gTr.stride(1), dh_Tc.stride(0), dcrossed_gTr.stride(0), dcrossed_gTr.stride(1), tokens,
            rank, ctx.width, ctx.epsilon, ctx.norm_epsilon,
            NORM=s_T is not None, ACTIVATION=ctx.activation.value, BLOCK=block, num_warps=warps_of(2 * block),
        )  # fmt: skip
        ds_T = None if s_T is None else ds_gT.sum(dim=0).to(s_T.dtype)
        dscale_gr, dshift_gr = (each_Pgr.sum(dim=0).to(scale_gr.dtype) for each_Pgr in (dscale_Pgr, dshift_Pgr))
        return dh_Tc, ds_T, None, None, dcrossed_gTr, dscale_gr, dshift_gr, None, None, None


@jit
def _forward(
    h_ptr, s_ptr, crossed_ptr, scale_ptr, shift_ptr, z_ptr, mean_ptr, inverse_std_ptr, value_ptr, row_scale_ptr,
    h_stride, crossed_group_stride, crossed_stride, z_group_stride, z_stride, rank, width, epsilon, norm_epsilon,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, group = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < rank
    u = tl.load(h_ptr + row * h_stride + group * rank + column, mask=inside, other=0.0).to(tl.float32)
    if NORM:
        u *= tl.rsqrt(tl.load(s_ptr + row).to(tl.float32) / width + epsilon)
    crossed = crossed_ptr + group * crossed_group_stride + row * crossed_stride + column
    u += tl.load(crossed, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(u, axis=0) / rank
    centred = tl.where(inside, u - mean, 0.0)
    inverse_std = tl.rsqrt(tl.sum(centred * centred, axis=0) / rank + norm_epsilon)
    n = centred * inverse_std
    statistic = group * tl.num_programs(0) + row
    tl.store(mean_ptr + statistic, mean)
    tl.store(inverse_std_ptr + statistic, inverse_std)
    scale = tl.load(scale_ptr + group * rank + column, mask=inside, other=0.0).to(tl.float32)
    z = n * scale + tl.load(shift_ptr + group * rank + column, mask=inside, other=0.0).to(tl.float32)
    z = activate(z, ACTIVATION).to(z_ptr.dtype.element_ty)
    to = group * z_group_stride + row * z_stride + column
    tl.store(z_ptr + to, z, mask=inside)
    if FP8:
        # Scale and shift are 0 outside, and so is z.
        store_quantised(z, value_ptr + to, row_scale_ptr + statistic, inside)


@jit
def _add_pairs(first, second, other_first, other_second):
    return first + other_first, second + other_second


@jit
def _backward(
    h_ptr, s_ptr, crossed_ptr, scale_ptr, shift_ptr, mean_ptr, inverse_std_ptr, dz_ptr, dh_ptr, ds_ptr, dcrossed_ptr,
    dscale_ptr, dshift_ptr, h_stride, crossed_group_stride, crossed_stride, dz_group_stride, dz_stride, dh_stride,
    dcrossed_group_stride, dcrossed_stride, tokens, rank, width, epsilon, norm_epsilon,
    NORM: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    group, column = tl.program_id(1).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < rank
    scale = tl.load(scale_ptr + group * rank + column, mask=inside, other=0.0).to(tl.float32)
    shift = tl.load(shift_ptr + group * rank + column, mask=inside, other=0.0).to(tl.float32)
    dscale, dshift = tl.zeros([BLOCK], dtype=tl.float32), tl.zeros([BLOCK], dtype=tl.float32)
    for token in range(tl.program_id(0), tokens, tl.num_programs(0)):
        row = tl.cast(token, tl.int64)
        u = tl.load(h_ptr + row * h_stride + group * rank + column, mask=inside, other=0.0).to(tl.float32)
        mean_square, inverse_rms = 1.0, 1.0
        if NORM:
            mean_square = tl.load(s_ptr + row).to(tl.float32) / width + epsilon
            inverse_rms = tl.rsqrt(mean_square)
        crossed_at = crossed_ptr + group * crossed_group_stride + row * crossed_stride + column
        crossed = tl.load(crossed_at, mask=inside, other=0.0).to(tl.float32)
        u = u * inverse_rms + crossed
        statistic = group * tokens + row
        inverse_std = tl.load(inverse_std_ptr + statistic)
        n = tl.where(inside, (u - tl.load(mean_ptr + statistic)) * inverse_std, 0.0)
        dy = tl.load(dz_ptr + group * dz_group_stride + row * dz_stride + column, mask=inside, other=0.0).to(tl.float32)
        dy = activation_gradient(dy, n * scale + shift, ACTIVATION)
        dscale += dy * n
        dshift += dy
        dn = dy * scale
        total, along_n = tl.reduce((dn, dn * n), 0, _add_pairs)
        du = tl.where(inside, inverse_std * (dn - total / rank - n * (along_n / rank)), 0.0)
        dcrossed = dcrossed_ptr + group * dcrossed_group_stride + row * dcrossed_stride + column
        tl.store(dcrossed, du.to(dcrossed_ptr.dtype.element_ty), mask=inside)
        dh = dh_ptr + row * dh_stride + group * rank + column
        tl.store(dh, (du * inverse_rms).to(dh_ptr.dtype.element_ty), mask=inside)
        if NORM:
            du_u = norm_epsilon * inverse_std * inverse_std * along_n
            ds = (tl.sum(du * crossed, axis=0) - du_u) / (2.0 * width * mean_square)
            tl.store(ds_ptr + statistic, ds)
    partial = (tl.program_id(0) * tl.num_programs(1) + group) * rank + column
    tl.store(dscale_ptr + partial, dscale, mask=inside)
    tl.store(dshift_ptr + partial, dshift, mask=inside)
