"""The Triton kernel against the naive reference, by Triton's interpreter where there is no GPU."""

import os
import subprocess
import sys

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from boost_core.kernels.latent_epilogue import naive
from boost_core.kernels.latent_epilogue import triton as kernels

SHAPES = [(1, 1), (3, 7), (5, 31), (2, 64), (4, 97)]


@pytest.mark.parametrize("norm", [True, False])
@pytest.mark.parametrize("activation", [True, False])
def test_naive_gradient(norm: bool, activation: bool) -> None:
    h = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    s = (torch.rand(3, dtype=torch.float64) + 0.5).requires_grad_() if norm else None
    assert torch.autograd.gradcheck(lambda h, s: naive.latent_epilogue(h, s, 11, 1e-3, activation), (h, s))


CHECK = """
import itertools, torch
from boost_core.kernels.latent_epilogue import naive, triton
device = "cuda" if torch.cuda.is_available() else "cpu"
poison, torch.empty = torch.empty, lambda *a, **k: poison(*a, **k).fill_(float("nan"))
like, torch.empty_like = torch.empty_like, lambda *a, **k: like(*a, **k).fill_(float("nan"))
generator = torch.Generator().manual_seed(0)
for (tokens, columns), dtype, norm, activation in itertools.product(
    {shapes}, (torch.float32, torch.bfloat16), (True, False), (True, False)
):
    # The latents are columns of a wider payload, as after the all-reduce, so their rows are strided.
    payload = torch.randn(tokens, columns + 1, generator=generator).to(device, dtype)
    payload[:, -1] = payload[:, -1].abs() * 13
    dz = torch.randn(tokens, columns, generator=generator).to(device, dtype)
    results = []
    for function, kind in ((triton, dtype), (naive, dtype), (naive, torch.float64)):
        leaf = payload.detach().to(kind).requires_grad_()
        z = function.latent_epilogue(leaf[:, :-1], leaf[:, -1] if norm else None, 13, 1e-5, activation)
        z.backward(dz.to(kind))
        results.append((z.detach().double(), leaf.grad.double()))
    for kernel, reference, truth in zip(*results):
        error, baseline = ((value - truth).norm() / truth.norm() for value in (kernel, reference))
        # One more rounding than the reference in the same type is the most the kernel may add.
        assert error <= baseline + torch.finfo(dtype).eps, (tokens, columns, dtype, norm, activation, error, baseline)
print("all equal")
"""


def test_triton_equals_naive() -> None:
    """In a process of its own: the interpreter is chosen when Triton is imported."""
    environment = os.environ | ({} if torch.cuda.is_available() else {"TRITON_INTERPRET": "1"})
    done = subprocess.run(
        [sys.executable, "-c", CHECK.format(shapes=SHAPES)], env=environment, capture_output=True, text=True
    )
    assert done.stdout.strip() == "all equal", done.stderr


@pytest.mark.parametrize("function", [kernels._forward, kernels._backward], ids=["forward", "backward"])
@pytest.mark.parametrize("pointer", ["*bf16", "*fp32"])
def test_compiles_for_hopper(function, pointer: str) -> None:
    """Needs no GPU: Triton brings its own assembler. The interpreter would accept what the compiler refuses."""
    constants = {"NORM": True, "ACTIVATION": True, "BLOCK": 4096}
    signature = {
        name: "constexpr" if name in constants else pointer if name.endswith("_ptr") else
        "fp32" if name == "epsilon" else "i32"
        for name in function.arg_names
    }  # fmt: skip
    source = ASTSource(fn=function, signature=signature, constexprs=constants)
    assert triton.compile(source, target=GPUTarget("cuda", 90, 32)).asm["cubin"]
