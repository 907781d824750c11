"""The arithmetic of a step reads a log, and plays what is computed beside what is sent."""

import json

import pytest

from boost_core.hardware import device_named
from tests.benchmarks.step_arithmetic import COLLECTIVE_SHARE, GAP_SECONDS, Arithmetic, Entry, accesses, entries

H100 = device_named("H100 SXM")
PASS = Entry("passes", "copy", 1, 335 * 10**7)  # a millisecond at the peak, 10/7 at seven tenths of it
MILLISECONDS = 1 / 0.7


def test_launches_count_for_the_innermost_operation() -> None:
    def end(name: str) -> str:
        return "mark end " + json.dumps({"part": "passes", "name": name, "moved": 8})

    log = ["mark begin", "copy 8 from here", "mark begin", "kernel a grid 1", "gemm b", end("inner"), end("outer"),
           "mark begin", end("view"), "record timed external stream 1", "record stream 1"]  # fmt: skip
    assert [(each.name, each.launches) for each in entries(log)] == [("inner", 2), ("outer", 1), ("record", 1)]


def test_a_kernel_goes_through_what_it_loads_and_stores() -> None:
    ttir = """
    %x = tt.splat %x_ptr : !tt.ptr<bf16> -> tensor<4x!tt.ptr<bf16>>
    %1 = tt.addptr %x, %0 : tensor<4x!tt.ptr<bf16>>, tensor<4xi32>
    %2 = tt.load %1, %mask : tensor<4x!tt.ptr<bf16>>
    %3 = tt.load %1 : tensor<4x!tt.ptr<bf16>>
    tt.store %1, %2 : tensor<4x!tt.ptr<bf16>>
    %4 = tt.addptr %s_ptr, %0 : !tt.ptr<f32>, i32
    %5 = tt.load %4 : !tt.ptr<f32>
    """
    assert accesses(ttir) == {"x_ptr": {"load", "store"}, "s_ptr": {"load"}}


@pytest.mark.parametrize(("seconds", "waited"), [(0.001, 0.0), (0.01, 0.01)])
def test_an_exchange_costs_what_nothing_hides(seconds: float, waited: float) -> None:
    assert H100 is not None
    start = Entry("exchange", "all_reduce", seconds=seconds, collective=1)
    played = Arithmetic.of([start, PASS, Entry("exchange", "wait", collective=-1), PASS], H100, "flash")
    hidden = min(seconds, (MILLISECONDS / (1 - COLLECTIVE_SHARE)) / 1000)
    slowed = hidden * COLLECTIVE_SHARE
    exposed = max(0.0, waited - MILLISECONDS / 1000 - slowed - GAP_SECONDS)
    assert played.parts["passes"].ours == pytest.approx(2 * MILLISECONDS / 1000)
    assert played.parts["passes"].limit == pytest.approx(0.002)
    assert played.parts["launch gaps"].ours == pytest.approx(2 * GAP_SECONDS)
    assert played.parts["exchange"].ours == pytest.approx(slowed + exposed)
