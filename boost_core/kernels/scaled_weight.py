"""The gradients of a weight and of the scale of its rows, from the gradient of the weight that they are together.

A norm's scale γ is part of the projection behind it, A∘γ, whose gradient G is summed over a step's micro-batches. At
its end::

    dA = G ∘ γ,   dγ = Σ_c G ∘ A

in one pass, dA in G's place: 10 bytes of each element in bf16, where a product with A, its sum, the addition to dγ and
a product with γ would move 22. Clipping needs the norms of dA: they may come with it, or be another pass over dA.
Shape suffixes: d rows, c columns.
"""

from __future__ import annotations

import torch

from boost_core.kernels.launch import block_of, jit, precise, runs_on_triton, tl, warps_of

LARGEST_BLOCK = 4096


def unscale_(
    gradient_dc: torch.Tensor, weight_dc: torch.Tensor, scale_d: torch.Tensor, dscale_d: torch.Tensor, first: bool,
    norms: torch.Tensor | None = None,
) -> None:  # fmt: skip
    """Turn the gradient of ``weight ∘ scale`` into the weight's, in place, and add the scale's to ``dscale_d``.

    Args:
        gradient_dc: The gradient of both together, rows dense, at least fp32.
        weight_dc: The weight, rows dense.
        scale_d: The scale of its rows.
        dscale_d: The sum of the scale's gradients, in the type of the gradient.
        first: Whether that sum begins with this one, whatever its memory has.
        norms: Gets the norms of equal parts of the weight's gradient, each of some power of two of elements, whole ones
            in each row; ``None`` if they are not needed.
    """
    rows, columns = gradient_dc.shape
    part = 0 if norms is None else gradient_dc.numel() // len(norms)
    if runs_on_triton(gradient_dc):
        block = min(block_of(columns), LARGEST_BLOCK)
        _unscale[(rows,)](
            gradient_dc, weight_dc, scale_d, dscale_d, norms if part else dscale_d, gradient_dc.stride(0),
            weight_dc.stride(0), columns, FIRST=first, PART=part, BLOCK=block, num_warps=warps_of(block),
        )  # fmt: skip
        return
    # The reference.
    found_d = (gradient_dc * precise(weight_dc)).sum(dim=1)
    dscale_d.copy_(found_d if first else dscale_d + found_d)
    gradient_dc.mul_(scale_d.unsqueeze(1))
    if norms is not None:
        torch.linalg.vector_norm(gradient_dc.reshape(-1, part), dim=1, out=norms)


@jit
def _unscale(
    gradient_ptr, weight_ptr, scale_ptr, dscale_ptr, norms_ptr, gradient_stride, weight_stride, columns,
    FIRST: tl.constexpr, PART: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    scale = tl.load(scale_ptr + row).to(tl.float32)
    products = tl.zeros([BLOCK], dtype=tl.float32)
    for begin in range(0, columns, BLOCK):
        column = begin + tl.arange(0, BLOCK)
        inside = column < columns
        place = gradient_ptr + row * gradient_stride + column
        gradient = tl.load(place, mask=inside, other=0.0)
        weight = tl.load(weight_ptr + row * weight_stride + column, mask=inside, other=0.0)
        products += gradient * weight.to(tl.float32)
        tl.store(place, gradient * scale, mask=inside)
        if PART:
            part = tl.reshape(gradient * scale, (BLOCK // PART, PART))
            column = begin + PART * tl.arange(0, BLOCK // PART)
            place = norms_ptr + (row * columns + column) // PART
            tl.store(place, tl.sqrt(tl.sum(part * part, axis=1)), mask=column < columns)
    dscale = tl.sum(products, axis=0)
    if not FIRST:
        dscale += tl.load(dscale_ptr + row)
    tl.store(dscale_ptr + row, dscale)
