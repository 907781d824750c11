"""What happens to a latent between its all-reduce and its up-projection.

With ``h`` the reduced product of the raw residual and A∘γ, ``s`` the reduced sum of squares and ``d`` the
full hidden size::

    y = h / sqrt(s / d + epsilon)        (only where a norm precedes the projection)
    z = f(y)                             (f the activation of the bottleneck)

and backward, with ``dz`` given::

    dy = dz · f'(y)
    dh = dy / sqrt(s / d + epsilon)
    ds = −(Σ_r dy ∘ y) / (2 d (s / d + epsilon))

``h``, ``s`` and ``z`` are the same on all tensor parallel ranks, each of which has a part of ``dz``: both gradients are
linear in it, so that their sums over the ranks are the whole gradients (BOOST, arXiv 2512.12131, online RMSNorm; the
backward is derived here).

The latents of g projections stand side by side in h, as one matrix product returned them, and one after the other in z,
as the batched up-projection reads them: the kernel writes them that way. Shape suffixes: T tokens, c = g·r columns,
r rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.functional import silu

from boost_core.config.model import Activation
from boost_core.kernels.fp8_product import PrecomputedRows, store_quantised
from boost_core.kernels.launch import Part, block_of, jit, precise, rows, runs_on_triton, tl, warps_of

# The activations, which the MLP's gate and LaX's crossing share, in torch and in Triton:
#
#     linear   f(x) = x
#     silu     f(x) = x σ(x)      f'(x) = σ(x) (1 + x (1 − σ(x)))
#
# One more is a member of ``Activation`` and a branch in each of these functions.


def activation_reference(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """f(x), differentiated by autograd."""
    return silu(x) if activation is Activation.SILU else x


@jit
def activate(x, ACTIVATION: tl.constexpr):
    """f(x); ``ACTIVATION`` is the value of an ``Activation``, as in all kernels."""
    if ACTIVATION == "silu":
        x *= tl.sigmoid(x)
    return x


@jit
def activation_gradient(dy, x, ACTIVATION: tl.constexpr):
    """``dy · f'(x)``."""
    if ACTIVATION == "silu":
        sigmoid = tl.sigmoid(x)
        dy *= sigmoid * (1.0 + x * (1.0 - sigmoid))
    return dy


@dataclass
class Epilogue:
    """What ``latent_epilogue`` will be asked to compute from latents, which an exchange may do in the pass that sums.

    Attributes:
        tokens: T, their rows.
        count: Number of projections g, whose latents stand side by side in a row.
        statistic: Whether the norm's statistics follow the rows, one per token.
        width: The full hidden size d that these were summed over.
        epsilon: Added to the mean square.
        activation: The bottleneck's.
        result: The result, if the exchange has computed it.
    """

    tokens: int
    count: int
    statistic: bool
    width: int
    epsilon: float
    activation: Activation
    result: torch.Tensor | None = None

    def take(self) -> torch.Tensor | None:
        """Return the result once, ``[g, T, r]``, so that use frees it; a recomputation computes its own."""
        result, self.result = self.result, None
        return result


def latent_epilogue(
    h_Tc: torch.Tensor, s_T: torch.Tensor | None, count: int, width: int, epsilon: float, activation: Activation,
    quantised: PrecomputedRows | None = None, precomputed_gTr: torch.Tensor | None = None, part: Part | None = None,
) -> torch.Tensor:  # fmt: skip
    """Scale by the norm's statistic (if there is one), apply the activation, and separate the projections.

    Args:
        h_Tc: Reduced latents of all projections, ``[T, g·r]``; rows may be strided, columns not.
        s_T: Sum of squares of each residual row over the full hidden size, ``[T]``; ``None`` without a norm.
        count: Number of projections g.
        width: The full hidden size d that the squares were summed over.
        epsilon: Added to the mean square.
        activation: The bottleneck's.
        quantised: Where the kernel leaves the result's rows in 8 bits; ``None`` if no product reads them so.
        precomputed_gTr: The result, if already computed (``symmetric_sum``); the reference computes its own.
        part: The part of the tokens, if there are others; not with ``quantised``, whose kernels compute all again.

    Returns:
        ``z_gTr`` in the type of ``h``; a view of it where there is nothing to compute.
    """
    if s_T is None and activation is Activation.LINEAR:
        return h_Tc.view(len(h_Tc), count, h_Tc.shape[1] // count).transpose(0, 1)
    if not runs_on_triton(h_Tc):
        return latent_epilogue_reference(h_Tc, s_T, count, width, epsilon, activation)
    s_T = None if s_T is None else s_T.contiguous()
    return _LatentEpilogue.apply(rows(h_Tc), s_T, count, width, epsilon, activation, quantised, precomputed_gTr, part)  # type: ignore[no-any-return, no-untyped-call]


def latent_epilogue_reference(
    h_Tc: torch.Tensor, s_T: torch.Tensor | None, count: int, width: int, epsilon: float, activation: Activation
) -> torch.Tensor:
    """The same in plain torch, in at least fp32, differentiated by autograd."""
    y_Tc = precise(h_Tc)
    if s_T is not None:
        y_Tc = y_Tc * torch.rsqrt(s_T.to(y_Tc.dtype) / width + epsilon).unsqueeze(-1)
    z_Tc = activation_reference(y_Tc, activation).to(h_Tc.dtype)
    return z_Tc.view(len(z_Tc), count, z_Tc.shape[1] // count).transpose(0, 1)


def with_room(like_Tc: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """New memory for such rows, ``[T, c]``, and behind it for one element a token, ``[T]``, to be sent together."""
    memory = like_Tc.new_empty(like_Tc.numel() + len(like_Tc))
    return memory[: like_Tc.numel()].view(like_Tc.shape), memory[like_Tc.numel() :]


# The Triton kernels: one program per token, one projection's latent in registers at a time, fp32 arithmetic.


class _LatentEpilogue(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h_Tc: torch.Tensor, s_T: torch.Tensor | None, count: int, width: int, epsilon: float,
        activation: Activation, quantised: PrecomputedRows | None, precomputed_gTr: torch.Tensor | None,
        part: Part | None,
    ) -> torch.Tensor:  # fmt: skip
        ctx.save_for_backward(h_Tc, s_T)
        ctx.count, ctx.width, ctx.epsilon, ctx.activation = count, width, epsilon, activation
        if precomputed_gTr is not None:
            return precomputed_gTr.detach()
        tokens, rank = h_Tc.shape[0], h_Tc.shape[1] // count
        if part is None or quantised is not None:
            z_gTr = torch.empty((count, tokens, rank), dtype=h_Tc.dtype, device=h_Tc.device)
        else:
            z_gTr, computed = part.result(h_Tc, (count, tokens, rank))
            if computed:
                return z_gTr
        # Not written to as such if there is nothing to quantise.
        values, scales = (z_gTr, z_gTr) if quantised is None else quantised.allocate(z_gTr)
        block = block_of(rank)
        _forward[(tokens,)](
            h_Tc, h_Tc if s_T is None else s_T, z_gTr, values, scales, h_Tc.stride(0), z_gTr.stride(0), z_gTr.stride(1),
            rank, width, epsilon, COUNT=count, NORM=s_T is not None, ACTIVATION=activation.value,
            FP8=quantised is not None, BLOCK=block, num_warps=warps_of(block),
        )  # fmt: skip
        return z_gTr

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        h_Tc, s_T = ctx.saved_tensors
        dz_gTr = rows(gradients[0])
        tokens, rank = h_Tc.shape[0], h_Tc.shape[1] // ctx.count
        # Several ranks send both together, and have the statistics in the latents' type.
        dh_Tc, ds_T = with_room(h_Tc)
        if s_T is not None and s_T.dtype != ds_T.dtype:
            ds_T = torch.empty_like(s_T)
        block = block_of(rank)
        _backward[(tokens,)](
            h_Tc, h_Tc if s_T is None else s_T, dz_gTr, dh_Tc, ds_T, h_Tc.stride(0),
            dz_gTr.stride(0), dz_gTr.stride(1), dh_Tc.stride(0), rank, ctx.width, ctx.epsilon,
            COUNT=ctx.count, NORM=s_T is not None, ACTIVATION=ctx.activation.value, BLOCK=block,
            num_warps=warps_of(block),
        )  # fmt: skip
        return dh_Tc, None if s_T is None else ds_T, None, None, None, None, None, None, None


@jit
def _forward(
    h_ptr, s_ptr, z_ptr, value_ptr, row_scale_ptr, h_stride, z_group_stride, z_stride, rank, width, epsilon,
    COUNT: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr, FP8: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < rank
    inverse_rms = 1.0
    if NORM:
        inverse_rms = tl.rsqrt(tl.load(s_ptr + row).to(tl.float32) / width + epsilon)
    for index in tl.static_range(COUNT):
        group = tl.cast(index, tl.int64)
        y = tl.load(h_ptr + row * h_stride + group * rank + column, mask=inside, other=0.0).to(tl.float32)
        z = activate(y * inverse_rms, ACTIVATION).to(z_ptr.dtype.element_ty)
        to = group * z_group_stride + row * z_stride + column
        tl.store(z_ptr + to, z, mask=inside)
        if FP8:
            store_quantised(z, value_ptr + to, row_scale_ptr + group * tl.num_programs(0) + row, inside)


@jit
def _backward(
    h_ptr, s_ptr, dz_ptr, dh_ptr, ds_ptr, h_stride, dz_group_stride, dz_stride, dh_stride, rank, width, epsilon,
    COUNT: tl.constexpr, NORM: tl.constexpr, ACTIVATION: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row, column = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = column < rank
    mean_square, inverse_rms = 1.0, 1.0
    if NORM:
        mean_square = tl.load(s_ptr + row).to(tl.float32) / width + epsilon
        inverse_rms = tl.rsqrt(mean_square)
    products = tl.zeros([BLOCK], dtype=tl.float32)
    for index in tl.static_range(COUNT):
        group = tl.cast(index, tl.int64)
        y = inverse_rms * tl.load(h_ptr + row * h_stride + group * rank + column, mask=inside, other=0.0).to(tl.float32)
        dy = tl.load(dz_ptr + group * dz_group_stride + row * dz_stride + column, mask=inside, other=0.0).to(tl.float32)
        dy = activation_gradient(dy, y, ACTIVATION)
        products += dy * y
        dh = dh_ptr + row * dh_stride + group * rank + column
        tl.store(dh, (dy * inverse_rms).to(dh_ptr.dtype.element_ty), mask=inside)
    if NORM:
        ds = -tl.sum(products, axis=0) / (2.0 * width * mean_square)
        tl.store(ds_ptr + row, ds.to(ds_ptr.dtype.element_ty))
