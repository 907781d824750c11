"""Launches every kernel at the sizes of some presets, and prints what each compiled one needs: a line of JSON."""

import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path

import torch
import triton.backends.nvidia
from triton.compiler import CompiledKernel
from triton.runtime import JITFunction

import boost_core.kernels
from boost_core.config import Activation, ModelConfig
from boost_core.kernels.fp8_product import PrecomputedRows, unavailable
from boost_core.kernels.gated_product import gated_product
from boost_core.kernels.latent_epilogue import latent_epilogue
from boost_core.kernels.lax_crossing import lax_crossing
from boost_core.kernels.residual_add import residual_add
from tests.benchmarks.kernels import Draw, Sizes, cases

DEVICE = torch.device("cuda", 0)
ACTIVATIONS = (Activation.LINEAR, Activation.SILU)


def launch(model: ModelConfig) -> None:
    """Launch all kernels forward and backward, and where the GPU has products in 8 bits, those that quantise, too."""
    draw = Draw(torch.bfloat16, DEVICE)
    sizes = Sizes.of_model(model, 1, 1, 4096)
    for case in cases(sizes, draw):
        if case.name.startswith("quantise") and unavailable(DEVICE):
            continue
        inputs = [x.requires_grad_(index in case.differentiated) for index, x in enumerate(case.inputs)]
        differentiate(case.run(*inputs))
    if unavailable(DEVICE):
        return
    rows = PrecomputedRows
    x_Td, h_Tc = draw.normal(sizes.tokens, sizes.hidden), draw.normal(sizes.tokens, 3 * sizes.rank)
    crossed_gTr, norm_gr = draw.normal(3, sizes.tokens, sizes.rank), draw.normal(3, sizes.rank)
    squares_T, parts_gTf = draw.normal(sizes.tokens, precise=True), draw.normal(2, sizes.tokens, sizes.mlp)
    for y_Td in (x_Td, None):
        residual_add(x_Td, y_Td, rows())
    for activation in ACTIVATIONS:
        latent_epilogue(h_Tc, squares_T, 3, sizes.hidden, 1e-5, activation, rows())
        lax_crossing(h_Tc, squares_T, sizes.hidden, 1e-5, crossed_gTr, norm_gr, norm_gr, 1e-5, activation, rows())
        differentiate((gated_product([parts_gTf.requires_grad_()], activation, rows(), [rows()]),))


def differentiate(outputs: Sequence[torch.Tensor]) -> None:
    differentiated = [output for output in outputs if output.requires_grad]
    if differentiated:
        torch.autograd.backward(differentiated, [torch.ones_like(output) for output in differentiated])


def main(names: list[str]) -> None:
    for name in names:
        launch(ModelConfig.model_validate({"preset": name, "family": "cola", "vocab_size": 32_000}))
    for path in Path(boost_core.kernels.__file__).parent.glob("*.py"):
        for name, function in vars(import_module(f"boost_core.kernels.{path.stem}")).items():
            if isinstance(function, JITFunction) and function.module.endswith(path.stem):
                for cache in function.device_caches.values():
                    for kernel in cache[0].values():
                        print(json.dumps([f"{path.stem}{name}", *assembled(kernel)]))


def assembled(kernel: CompiledKernel) -> tuple[int, int, int]:
    """A kernel's warps, the registers of a thread, and the bytes of its stack, where it spills."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        program = Path(triton.backends.nvidia.__file__).parent / "bin/cuobjdump"
        command = [program, "--dump-resource-usage", file.name]
        said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    ((registers, stack),) = re.findall(r"REG:(\d+) STACK:(\d+)", said)
    return kernel.metadata.num_warps, int(registers), int(stack)


if __name__ == "__main__":
    main(sys.argv[1:])
