"""Rotary position embedding of queries and keys, between their up-projection and attention.

For position t of a sequence and each pair (a, b) of elements i and i + e/2 of a head, with angle φ = t θ^(−2i/e)::

    a′ = a cos φ − b sin φ,   b′ = b cos φ + a sin φ

and backward the same with −φ (RoFormer, arXiv 2104.09864; pairs as in LLaMA). Queries, keys and values come from
batched up-projections one after the other in one tensor; queries and keys are rotated in place, which is the
layout that attention reads, and backward the three gradients are written side by side, as the projections' backward
pass reads them: nothing is permuted or copied in between. Shape suffixes: g projections, T = b·s tokens, d = heads · e,
s positions, e head size.
"""

from __future__ import annotations

from typing import Any

import torch

from boost_core.kernels.launch import block_of, jit, members, rows, runs_on_triton, tl, triton, warps_of

LARGEST_BLOCK = 1024


def rotary(parts: list[torch.Tensor], cosine_se: torch.Tensor, sine_se: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Rotate queries and keys, and leave values alone.

    Args:
        parts: Queries, keys and values in this order, in tensors ``[g, T, d]`` of one or more of them: ``[3, T, d]``,
            or ``[1, T, d]`` and ``[2, T, d′]``, or three of one; or keys and values alone, or queries with values of no
            width. Owned by this call: their memory may be reused for the result.
        cosine_se: Cosines of each position's angles, ``[s, e/2]``, at least fp32; T is a multiple of s.
        sine_se: Their sines.

    Returns:
        Each as ``[T, d]``.
    """
    if runs_on_triton(parts[0]):
        cosine_se, sine_se = cosine_se.float().contiguous(), sine_se.float().contiguous()
        return _Rotary.apply(cosine_se, sine_se, *map(rows, parts))  # type: ignore[no-any-return, no-untyped-call]
    # The reference: out of place, differentiated by autograd.
    *compared, value_Td = members(parts)
    positions, half = cosine_se.shape
    cosine_s1e, sine_s1e = cosine_se.unsqueeze(1), sine_se.unsqueeze(1)
    results = []
    for x_Td in compared:
        x_bshte = x_Td.reshape(-1, positions, x_Td.shape[1] // (2 * half), 2, half)
        a_bshe, b_bshe = x_bshte.to(cosine_se.dtype).unbind(-2)
        pair = (a_bshe * cosine_s1e - b_bshe * sine_s1e, b_bshe * cosine_s1e + a_bshe * sine_s1e)
        results.append(torch.stack(pair, dim=-2).to(x_Td.dtype).view(x_Td.shape))
    return *results, value_Td


# The Triton kernel: a block of pairs of one token at a time, of the queries, of the keys, and of the values, which are
# copied if they have to be; fp32 arithmetic, in place.


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, cosine_se: torch.Tensor, sine_se: torch.Tensor, *parts: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        # No one else reads a part, a matrix product's backward pass does not need its output, and this one needs only
        # the angles: so the parts' memory is reused for the result.
        rotated = members([part_gTd.detach() for part_gTd in parts])
        _launch(rotated[:-1], rotated[:-1], None, cosine_se, sine_se, 1.0)
        ctx.save_for_backward(cosine_se, sine_se)
        ctx.layouts = [(part_gTd.shape, part_gTd.stride()) for part_gTd in parts]
        return tuple(rotated)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        cosine_se, sine_se = ctx.saved_tensors
        dparts = [gradients[0].new_empty_strided(*layout) for layout in ctx.layouts]
        *compared, gradient_Td = map(rows, gradients)
        *dcompared, dvalue_Td = members(dparts)
        _launch(compared, dcompared, (gradient_Td, dvalue_Td), cosine_se, sine_se, -1.0)
        return None, None, *dparts


@jit
def _rotate(
    x_ptr, y_ptr, v_ptr, x_out_ptr, y_out_ptr, v_out_ptr, cosine_ptr, sine_ptr,
    x_stride, y_stride, v_stride, x_out_stride, y_out_stride, v_out_stride,
    positions, x_pairs, y_pairs, v_columns, x_blocks, y_blocks, sign,
    HALF: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    angles = (row % positions) * HALF
    if block < x_blocks:
        source, out = x_ptr + row * x_stride, x_out_ptr + row * x_out_stride
        rotate_block(source, out, block, x_pairs, cosine_ptr + angles, sine_ptr + angles, sign, HALF, BLOCK)
    elif block < x_blocks + y_blocks:
        source, out, block = y_ptr + row * y_stride, y_out_ptr + row * y_out_stride, block - x_blocks
        rotate_block(source, out, block, y_pairs, cosine_ptr + angles, sine_ptr + angles, sign, HALF, BLOCK)
    else:
        source, out = v_ptr + row * v_stride, v_out_ptr + row * v_out_stride
        column = (block - x_blocks - y_blocks) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
        inside = column < v_columns
        tl.store(out + column, tl.load(source + column, mask=inside), mask=inside)


@jit
def rotate_block(x, out, block, pairs, cosine, sine, sign, HALF: tl.constexpr, BLOCK: tl.constexpr):
    """Rotate one block of a token's pairs."""
    pair = block * BLOCK + tl.arange(0, BLOCK)
    inside = pair < pairs
    place = pair % HALF
    first = pair // HALF * (2 * HALF) + place
    cos = tl.load(cosine + place, mask=inside, other=0.0)
    sin = tl.load(sine + place, mask=inside, other=0.0) * sign
    a = tl.load(x + first, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(x + first + HALF, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + first, (a * cos - b * sin).to(out.dtype.element_ty), mask=inside)
    tl.store(out + first + HALF, (b * cos + a * sin).to(out.dtype.element_ty), mask=inside)


def _launch(
    compared: list[torch.Tensor], outs: list[torch.Tensor], value: tuple[torch.Tensor, torch.Tensor] | None,
    cosine_se: torch.Tensor, sine_se: torch.Tensor, sign: float,
) -> None:  # fmt: skip
    """Rotate one or two tensors ``[T, d]``, and copy the values, ``(from, to)``, if they are given."""
    (tokens, columns), (positions, half) = compared[0].shape, cosine_se.shape
    block = min(block_of(columns // 2), LARGEST_BLOCK)
    from_to = [*zip(compared, outs, strict=True)]
    tensors = [*from_to, *(from_to[:1] * (2 - len(from_to))), value or from_to[0]]  # what is not there is not read
    pairs = [each.shape[1] // 2 for each in compared] + [0] * (2 - len(compared))
    copied = 0 if value is None else value[0].shape[1]
    blocks = [triton.cdiv(each, block) for each in (*pairs, copied // 2)]
    froms, tos = zip(*tensors, strict=True)
    _rotate[(tokens, sum(blocks))](
        *froms, *tos, cosine_se, sine_se, *(each.stride(0) for each in froms), *(each.stride(0) for each in tos),
        positions, *pairs, copied, *blocks[:2], sign, HALF=half, BLOCK=block, num_warps=warps_of(2 * block),
    )  # fmt: skip
