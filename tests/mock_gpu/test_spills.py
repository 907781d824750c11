"""Kernels as they are launched at presets' sizes, compiled for two generations of GPU by both versions of Triton."""

import pytest

from tests.kernels.test_compilation import KERNELS
from tests.mock_gpu import MockGpu, json_lines

REGISTERS, THREADS, WARP = 65536, 2048, 32  # of a multiprocessor
NOT_LAUNCHED = {"symmetric_sum_meet"}  # it waits for peers


@pytest.mark.nightly
@pytest.mark.parametrize("arch", [80, 90])
def test_no_kernel_spills(each_mock: MockGpu, arch: int) -> None:
    output = each_mock.run("-m", "tests.mock_gpu.spills", "1b", "7b", "30b", variables=each_mock.variables(arch=arch))
    kernels = json_lines(output)
    assert not [kernel for kernel in kernels if kernel[-1]]
    names = {name for name, *_ in kernels}
    assert names == {name for name in KERNELS if arch >= 89 or not name.startswith("fp8")} - NOT_LAUNCHED
    if arch == 90:  # the crossing's backward pass, token after token, needs other programs beside it
        for _, warps, registers, _ in (kernel for kernel in kernels if kernel[0] == "lax_crossing_backward"):
            programs = REGISTERS // (-(-registers // 8) * 8 * WARP * warps)
            assert programs * warps * WARP / THREADS >= 0.5
