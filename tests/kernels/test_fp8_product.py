"""8-bit products: kernels leave what the reference gives, to the bit, and torch's product is that of the reference."""

from collections.abc import Callable
from unittest.mock import patch

import pytest
import torch

from boost_core.config import Activation
from boost_core.kernels import fp8_product as naive
from boost_core.kernels.fp8_product import (
    PrecomputedRows,
    QuantisedRows,
    fp8_product,
    quantise_columns,
    quantise_rows,
    unavailable,
)
from boost_core.kernels.gated_product import gated_product
from boost_core.kernels.latent_epilogue import latent_epilogue
from boost_core.kernels.launch import always
from boost_core.kernels.lax_crossing import lax_crossing
from boost_core.kernels.residual_add import residual_add
from tests.kernels.interpreter import rounding_to_fp8_as_torch
from tests.kernels.test_kernels import poisoned, strided
from tests.ranks import Ranks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SIZES = [(1, 1, 1), (4, 16, 32), (3, 31, 261), (130, 3, 5)]  # rows, latents, columns
TYPES = [torch.float32, torch.bfloat16]


def normal(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of any size, and one of zeros."""
    generator = torch.Generator(DEVICE).manual_seed(sum(shape))
    values = torch.randn(shape, generator=generator, device=DEVICE)
    sizes = torch.logspace(-30, 20, shape[-2], base=2.0, device=DEVICE).unsqueeze(-1)
    sizes[shape[-2] // 2 :][:1] = 0 if shape[-2] > 1 else 1
    return (values * sizes).to(dtype)


def left_by_kernels() -> list[str]:
    """Where what a kernel leaves beside its output is not what the reference makes of that output."""
    found = []
    for rows, rank, columns in SIZES:
        for dtype in TYPES:
            x_Tc, y_Tc = normal(rows, columns, dtype=dtype), normal(rows, columns, dtype=dtype)
            h_Tc, both_gTf = normal(rows, 3 * rank, dtype=dtype), normal(2, rows, columns, dtype=dtype)
            squares_T = torch.rand(rows, device=DEVICE)
            left = [PrecomputedRows() for _ in range(6)]
            made = {
                "residual_add": residual_add(strided(x_Tc), y_Tc, left[0]).inputs,
                "residual_start": residual_add(strided(x_Tc), None, left[1]).inputs,
                "gated_product": gated_product([strided(both_gTf)], Activation.SILU, left[2]),
                "latent_epilogue": latent_epilogue(
                    strided(h_Tc), squares_T, 3, 4 * rank, 1e-5, Activation.SILU, left[3]
                ),
            }
            norm = torch.rand(2, 3, rank, device=DEVICE).to(dtype)
            made["lax_crossing"] = lax_crossing(
                strided(h_Tc),
                squares_T,
                4 * rank,
                1e-5,
                normal(3, rows, rank, dtype=dtype),
                *norm,
                1e-5,
                Activation.SILU,
                left[4],
            )
            parts = [both_gTf.clone().requires_grad_()]
            gated_Tf = gated_product(parts, Activation.SILU, PrecomputedRows(), left[5:])
            with patch("boost_core.kernels.gated_product.LARGEST_BLOCK_FP8", 64):  # rows have more than one block
                gate = torch.autograd.grad(gated_Tf, parts, y_Tc)
            made["gated_product, gradient"] = gate[0]
            found += [
                f"{name}, {rows} × {columns}, {dtype}"
                for (name, x), precomputed in zip(made.items(), left, strict=True)
                if (rows_of_x := precomputed.take()) is None or not same(rows_of_x, reference(x))
            ]
    return found


def reference(x: torch.Tensor) -> QuantisedRows:
    return naive.quantise_rows_reference(x)


def same(mine: QuantisedRows, other: QuantisedRows) -> bool:
    return torch.equal(mine.values.view(torch.uint8), other.values.view(torch.uint8)) and torch.equal(
        mine.scales, other.scales
    )


def passes() -> list[str]:
    """Where a pass of its own is not the reference's."""
    found = []
    for rows, rank, columns in SIZES:
        for dtype in TYPES:
            for x in (normal(rows, columns, dtype=dtype), normal(3, rows, rank, dtype=dtype)):
                for factor in (None, torch.linspace(-2, 2, rows, device=DEVICE).to(dtype)):
                    for mine in (quantise_rows, quantise_columns):
                        with always("naive"):
                            expected = mine(x, factor)
                        if not same(mine(strided(x), factor), expected):
                            found.append(f"{mine.__name__}, {tuple(x.shape)}, {dtype}, factor {factor is not None}")
    return found


def by_kernels(function: Callable[[], list[str]]) -> list[str]:
    with always("triton"), patch.object(torch, "empty", poisoned(torch.empty)), rounding_to_fp8_as_torch():
        return function()


@pytest.mark.full
@pytest.mark.parametrize("function", [passes, pytest.param(left_by_kernels, marks=pytest.mark.nightly)])
def test_kernels_make_the_references_bits(interpreting_ranks: Ranks, function: Callable[[], list[str]]) -> None:
    assert interpreting_ranks.run(1, by_kernels, function) == [[]]


def test_rows_are_left_once() -> None:
    precomputed = PrecomputedRows(rows := quantise_rows(torch.randn(2, 16)))
    assert precomputed.take() is rows
    assert precomputed.take() is None


@pytest.mark.skipif(
    DEVICE.type == "cpu" and torch.__version__ < "2.12", reason="torch 2.11 has this product on GPUs alone"
)
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_torchs_product_is_the_references(shape: tuple[int, ...], fast: bool) -> None:
    left, right = normal(*shape, 48, 64, dtype=torch.bfloat16), normal(*shape, 64, 32, dtype=torch.bfloat16)
    rows, columns = quantise_rows(left), quantise_columns(right)
    if DEVICE.type == "cuda" and unavailable(DEVICE):
        pytest.skip(str(unavailable(DEVICE)))
    with always("triton"):
        mine = fp8_product(
            rows, columns, torch.full((*shape, 48, 32), torch.nan, dtype=torch.bfloat16, device=DEVICE), fast
        )
    exact = naive.dequantised(rows) @ naive.dequantised(columns).mT
    # One rounding to bf16; and on a GPU, if need be, sums of 64 in some 14 bits (arXiv 2412.19437, §3.3.2).
    limit = torch.finfo(torch.bfloat16).eps * (2 if fast else 1)
    assert (mine.float() - exact).norm() <= limit * exact.norm()


def test_a_products_error_is_that_of_three_bits() -> None:
    """A number rounded to three bits of mantissa is off by up to 2⁻⁴ of it: by 2⁻⁴/√3 in the root mean square if all
    mantissas were 1, by 1/√2 of that over mantissas as they are spread. Of a product of two it is √2 times that. What
    is far below its row's largest loses more, which is seldom in a normal distribution.
    """
    left, right = torch.randn(256, 512), torch.randn(512, 128)
    exact = left @ right
    mine = naive.dequantised(quantise_rows(left)) @ naive.dequantised(quantise_columns(right)).mT
    error, expected = ((mine - exact).norm() / exact.norm()).item(), 2**-4 / 3**0.5
    assert 0.8 * expected < error < 1.2 * expected


def test_scales_are_the_least_powers_of_two_that_fit() -> None:
    largest = torch.tensor([448.0, 448.1, 1.75, 1.76, 2.0**-126, 2.0**-140, 0.0, 3e38])
    values, scales = naive.quantise_rows_reference(largest.unsqueeze(-1))
    assert torch.equal(torch.frexp(scales)[0], torch.full_like(scales, 0.5))
    assert scales[:4].tolist() == [1, 2, 2**-8, 2**-7]
    assert bool((values.float().abs() <= 448).all())
    off = naive.dequantised(naive.QuantisedRows(values, scales)).squeeze(-1)[:5] - largest[:5]
    assert bool((off.abs() <= largest[:5] / 16).all())


@pytest.mark.parametrize("bad", [float("inf"), float("nan")])
def test_what_is_not_finite_stays_so(bad: float) -> None:
    left, right = torch.ones(2, 16), torch.ones(16, 16)
    left[0, 3] = bad
    product = naive.dequantised(quantise_rows(left)) @ naive.dequantised(quantise_columns(right)).mT
    assert not product[0].isfinite().any()
    assert product[1].tolist() == [16] * 16


def test_a_device_without_them_says_why() -> None:
    assert unavailable(torch.device("cpu")) == "a CPU has no 8-bit products"
    device = torch.device("cuda", 0)
    with (
        patch.object(torch.cuda, "get_device_capability", lambda _: (8, 0)),
        patch.object(torch.cuda, "get_device_name", lambda _: "NVIDIA A100"),
    ):
        assert unavailable(device) == "NVIDIA A100 has compute capability 8.0, but 8-bit products need 8.9"
    with patch.object(torch.cuda, "get_device_capability", lambda _: (9, 0)):
        assert unavailable(device) is None
