"""Every kernel compiles for Hopper and spills nothing. Needs no GPU: Triton brings its own compiler and assembler.

The interpreter would accept what the compiler refuses.
"""

import re
import subprocess
from importlib import import_module
from pathlib import Path

import pytest
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import get_ptxas
from triton.compiler import ASTSource
from triton.runtime import JITFunction

import boost_core.kernels

HOPPER = GPUTarget("cuda", 90, 32)
MODULES = sorted(path.stem for path in Path(boost_core.kernels.__file__).parent.glob("*.py"))
KERNELS = {
    f"{name}{function}": kernel
    for name in MODULES
    for function, kernel in vars(import_module(f"boost_core.kernels.{name}")).items()
    if isinstance(kernel, JITFunction) and any(argument.endswith("_ptr") for argument in kernel.arg_names)
}
# At a latent of 1024 and a vocabulary shard of 8000, as in the 7B preset at tp 4.
SIZES = {"BLOCK": 1024, "COUNT": 3, "HALF": 64, "COLUMNS": 16, "DEPTH": 128, "WORLD": 4, "LANES": 4,
         "PART": 64, "ACTIVATION": "silu"}  # fmt: skip
BLOCKS = {"cross_entropy_row_statistics": 8192, "scaled_weight_unscale": 4096, "symmetric_sum_sum": 2048,
          "symmetric_sum_spread": 2048}  # fmt: skip
WITHOUT_ROWS = {"rotary_rotate", "symmetric_sum_meet"}
PRECISE = {"s_ptr", "row_scale_ptr", "ds_ptr", "log_sum_ptr", "target_logit_ptr", "dloss_ptr", "dlog_sum_ptr",
           "mean_ptr", "inverse_std_ptr", "norms_ptr",
           "cosine_ptr", "sine_ptr",
           "clip_ptr", "dscale_ptr", "dshift_ptr", "master_ptr", "gradient_ptr", "first_ptr", "second_ptr"}  # fmt: skip
REAL = {"epsilon", "norm_epsilon", "sign", "keep", "rate", "first_decay", "first_share", "second_decay", "second_share",
        "second_correction"}  # fmt: skip


def test_no_kernel_is_forgotten() -> None:
    assert len({kernel.module for kernel in KERNELS.values()}) == 10
    assert len(KERNELS) == 19


def compiled(name: str, element: str) -> triton.compiler.CompiledKernel:
    kernel = KERNELS[name]
    constants = {
        parameter.name: BLOCKS.get(name, SIZES["BLOCK"]) if parameter.name == "BLOCK" else
        SIZES.get(parameter.name, True)
        for parameter in kernel.params if parameter.is_constexpr
    }  # fmt: skip
    signature = {argument: type_of(argument, element, constants) for argument in kernel.arg_names}
    # Rows begin at multiples of 16 elements, as at all sizes of the presets.
    aligned = {(index,): [["tt.divisibility", 16]] for index, argument in enumerate(kernel.arg_names)
               if signature[argument].startswith("*") or signature[argument] == "i32"}  # fmt: skip
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    return triton.compile(source, target=HOPPER)


def type_of(argument: str, element: str, constants: dict[str, object]) -> str:
    if argument in constants:
        return "constexpr"
    if argument in ("target_ptr", "address_ptr", "signal_address_ptr"):
        return "*i64"
    if argument in ("met_ptr", "aborted_ptr"):
        return "*i32"
    if argument == "value_ptr":
        return "*fp8e4nv"
    if argument.endswith("_ptr"):
        return "*fp32" if argument in PRECISE else f"*{element}"
    return "fp32" if argument in REAL else "i32"


@pytest.mark.full
@pytest.mark.parametrize(
    "element", ["bf16", *(pytest.param(each, marks=pytest.mark.nightly) for each in ("fp16", "fp32"))]
)
@pytest.mark.parametrize("name", KERNELS)
def test_compiles_for_hopper_and_spills_nothing(tmp_path: Path, name: str, element: str) -> None:
    kernel = compiled(name, element)
    assert kernel.asm["cubin"]
    # Sizes and strides are 32 bits wide; a stride times an index is not: 2³¹ elements are 1M tokens of 2048 latents.
    integers = set(re.findall(r"(%\w+): i32", kernel.asm["ttir"]))
    products = re.findall(r"= arith\.muli (%\w+), (%\w+).* : (?:i32|tensor<\w*xi32>)", kernel.asm["ttir"])
    assert not [factors for factors in products if integers & set(factors)]
    source = tmp_path / "kernel.ptx"
    source.write_text(kernel.asm["ptx"])
    assembler = [
        get_ptxas(HOPPER.arch).path,
        "-v",
        "--gpu-name",
        "sm_90a",
        str(source),
        "-o",
        str(tmp_path / "kernel.cubin"),
    ]
    done = subprocess.run(assembler, capture_output=True, text=True, check=True)
    assert "0 bytes spill stores, 0 bytes spill loads" in done.stderr
    if name not in WITHOUT_ROWS and element != "fp32":
        assert ".v4" in kernel.asm["ptx"], "no access of 16 bytes"
