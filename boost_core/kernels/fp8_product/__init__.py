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

from typing import NamedTuple

import torch

from boost_core.kernels.dispatch import runs_on_triton
from boost_core.kernels.fp8_product import naive


class QuantisedRows(NamedTuple):
    """A matrix in 8 bits.

    Attributes:
        values: ``[…, T, k]``, ``torch.float8_e4m3fn``, rows dense.
        scales: Factors for each row's values, ``[…, T]``, fp32: powers of two.
    """

    values: torch.Tensor
    scales: torch.Tensor


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
    if runs_on_triton(x):
        # Imported here because Triton is not installed where there is no GPU.
        from boost_core.kernels.fp8_product import triton

        return QuantisedRows(*triton.quantise_rows(x, factor_T))
    return QuantisedRows(*naive.quantise_rows(x, factor_T))


def quantise_columns(x: torch.Tensor, factor_k: torch.Tensor | None = None) -> QuantisedRows:
    """Quantise the columns of a matrix, or of several, as the rows of a right factor.

    Args:
        x: ``[…, k, c]``, at most three axes.
        factor_k: Multiplies each row beforehand, ``[k]``.

    Returns:
        ``[…, c, k]``.
    """
    if runs_on_triton(x):
        from boost_core.kernels.fp8_product import triton

        return QuantisedRows(*triton.quantise_columns(x, factor_k))
    return QuantisedRows(*naive.quantise_columns(x, factor_k))


def leave_quantised(x: torch.Tensor, rows: QuantisedRows) -> None:
    """Leave the quantised rows of ``x``, made by the kernel that wrote it, for ``quantised`` to find.

    Only for a tensor that nothing changes afterwards: a gradient must have a single reader, because autograd adds
    others into its memory and keeps what was left with it.
    """
    x.quantised_rows = rows  # type: ignore[attr-defined]


def quantised(x: torch.Tensor) -> QuantisedRows:
    """Return the rows left by the kernel that wrote ``x``, once, so that use frees them; otherwise compute them."""
    left: QuantisedRows | None = vars(x).pop("quantised_rows", None)
    return quantise_rows(x) if left is None else left


def drop_quantised(x: torch.Tensor) -> None:
    """Discard the rows left by the kernel that wrote ``x``, if no product reads them."""
    vars(x).pop("quantised_rows", None)


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
    if not runs_on_triton(left.values):
        return out.copy_(naive.fp8_product(left, right))
    if out.ndim == 2:
        return _by_torch(left, right, out, fast_accumulation)
    for index, each in enumerate(out):
        one, other = (QuantisedRows(factor.values[index], factor.scales[index]) for factor in (left, right))
        _by_torch(one, other, each, fast_accumulation)
    return out


def _by_torch(left: QuantisedRows, right: QuantisedRows, out: torch.Tensor, fast: bool) -> torch.Tensor:
    # The public torch.nn.functional.scaled_mm takes no output tensor.
    torch._scaled_mm(
        left.values, right.values.mT, left.scales.unsqueeze(-1), right.scales.unsqueeze(0),
        out_dtype=out.dtype, use_fast_accum=fast, out=out,
    )  # fmt: skip
    return out
