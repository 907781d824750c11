"""Every kernel against its reference: on a GPU where there is one, else by Triton's interpreter."""

from collections.abc import Callable
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch

from boost_core.kernels import residual_add
from boost_core.kernels.launch import always, runs_on_triton
from boost_core.kernels.symmetric_sum import Peers, meet
from tests.benchmarks.kernels import AWKWARD, Case, Draw, Sizes, cases, disagreements
from tests.kernels.interpreter import rounding_to_fp8_as_torch
from tests.ranks import Ranks

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
TYPES = [torch.float32, torch.bfloat16, torch.float16]
EXAMPLES = list(cases(AWKWARD[1], Draw(torch.float32, torch.device("cpu"))))
RICHEST = {case.name.partition(",")[0]: case.name for case in EXAMPLES}.values()  # of each kernel's variants the last


def the(name: str, sizes: Sizes, dtype: torch.dtype, device: torch.device = DEVICE) -> Case:
    return next(case for case in cases(sizes, Draw(dtype, device)) if case.name == name)


def check(name: str) -> list[str]:
    """What is wrong with one operation, at all sizes, in all types, on dense and on strided rows."""
    with (
        patch.object(torch, "empty", poisoned(torch.empty)),
        patch.object(torch, "empty_like", poisoned(torch.empty_like)),
        patch.object(torch.Tensor, "new_empty_strided", poisoned(torch.Tensor.new_empty_strided)),
        rounding_to_fp8_as_torch(),
    ):
        return [
            f"{sizes}, {dtype}, {arrange.__name__}: {problem}"
            for sizes in AWKWARD
            for dtype in TYPES
            for arrange in (torch.Tensor.contiguous, strided)
            for problem in disagreements(the(name, sizes, dtype), arrange=arrange)
        ]


def poisoned(allocate):
    """What is not written is not a number."""
    return lambda *arguments, **keywords: allocate(*arguments, **keywords).fill_(float("nan"))


def strided(x: torch.Tensor) -> torch.Tensor:
    """Rows further apart than they are long; projections side by side, not one after the other."""
    if x.ndim < 2 or not x.is_floating_point():
        return x
    across = x.transpose(0, 1) if x.ndim == 3 else x
    wider = across.new_zeros(*across.shape[:-1], x.shape[-1] + 3)
    wider[..., : x.shape[-1]] = across
    rows = wider[..., : x.shape[-1]]
    return rows.transpose(0, 1) if x.ndim == 3 else rows


@pytest.mark.parametrize(
    "name",
    [pytest.param(case.name, marks=() if case.name in RICHEST else pytest.mark.full) for case in EXAMPLES],
)
def test_the_kernel_gives_what_the_reference_gives(interpreting_ranks: Ranks, name: str) -> None:
    assert interpreting_ranks.run(1, check, name) == [[]]


def test_the_gate_sees_an_error_of_two_roundings() -> None:
    case = the("residual_add", AWKWARD[1], torch.float32, torch.device("cpu"))

    def run(factor: float) -> Callable[..., tuple[torch.Tensor, ...]]:
        def wrong_on_triton(x_Td: torch.Tensor, y_Td: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x_Td = x_Td * (factor if runs_on_triton(x_Td) else 1.0)
            with always("naive"):
                return residual_add.residual_add(x_Td, y_Td)[:3]

        return wrong_on_triton

    assert disagreements(replace(case, run=run(1.0))) == []
    found = disagreements(replace(case, run=run(1 + 2e-6)))
    assert len(found) >= 3
    assert all("residual_add" in problem for problem in found)
    assert disagreements(replace(case, run=run(float("nan"))))


@pytest.mark.full
@pytest.mark.parametrize("name", [case.name for case in EXAMPLES if case.differentiated])
def test_naive_gradients(name: str) -> None:
    case = the(name, AWKWARD[1], torch.float64, torch.device("cpu"))
    inputs = [each.requires_grad_(index in case.differentiated) for index, each in enumerate(case.inputs)]
    assert torch.autograd.gradcheck(case.run, inputs)


def two_meetings() -> tuple[int, int]:
    counts, met = (torch.zeros(1, dtype=torch.int32, device=DEVICE) for _ in range(2))
    aborted = torch.zeros(1, dtype=torch.int32, pin_memory=DEVICE.type == "cuda")
    with always("triton"):
        for _ in range(2):
            meet(Peers.of([counts]), 0, met, aborted, 0.0)
    return int(counts), int(met)


def test_a_rank_alone_meets_itself(interpreting_ranks: Ranks) -> None:
    assert interpreting_ranks.run(1, two_meetings) == [(2, 2)]
