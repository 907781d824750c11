"""Each kernel against its reference in plain torch, the reference compiled, and the roofline."""

from collections.abc import Callable, Iterator

import torch

from boost_core.bench.cases import Case, Tensors
from boost_core.bench.results import Row
from boost_core.bench.timing import Spread, kernel_seconds
from boost_core.kernels.dispatch import Implementation, always

Run = Callable[..., Tensors]


def kernel_rows(case: Case, device: torch.device, bandwidth: float, repeats: int) -> Iterator[Row]:
    """Time one operation, forward and backward, under each implementation, with the share of the roofline.

    A figure comes as soon as it is known, so that an implementation that fails takes none of those before it along.

    Args:
        case: The operation with its inputs, which it may overwrite.
        device: Where they live. Without a GPU only the reference can be timed.
        bandwidth: The device's measured memory bandwidth in bytes per second.
        repeats: Timed calls.
    """
    for name, implementation, wrap in _implementations(device):
        with always(implementation):
            for direction, least, call in _directions(case, wrap(case.run)):
                spread = Spread.of(kernel_seconds(call, device, repeats))
                yield Row.spread("kernels", case.name, f"{direction}, {name}", "s", spread)
                share = least / bandwidth / spread.p50
                yield Row.single("kernels", case.name, f"{direction}, {name}, of roofline", "share", share)


def _implementations(device: torch.device) -> list[tuple[str, Implementation, Callable[[Run], Run]]]:
    eager: tuple[str, Implementation, Callable[[Run], Run]] = ("eager", "naive", _as_it_is)
    if device.type != "cuda":
        return [eager]
    return [("triton", "triton", _as_it_is), eager, ("compiled", "naive", _compiled)]


def _directions(case: Case, run: Run) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Yield each direction that the operation has, the bytes that it cannot avoid moving, and its call."""
    yield "forward", case.forward_bytes, lambda: run(*case.inputs)
    if case.differentiated:
        yield "backward", case.backward_bytes, _backward(run, case)


def _as_it_is(run: Run) -> Run:
    return run


def _compiled(run: Run) -> Run:
    torch.compiler.reset()
    compiled: Run = torch.compile(run, dynamic=False)
    return compiled


def _backward(run: Run, case: Case) -> Callable[[], object]:
    leaves = [case.inputs[index].detach().requires_grad_() for index in case.differentiated]
    inputs = list(case.inputs)
    for index, leaf in zip(case.differentiated, leaves, strict=True):
        inputs[index] = leaf
    outputs = [output for output in run(*inputs) if output.requires_grad]
    upstream = [torch.ones_like(output) for output in outputs]
    return lambda: torch.autograd.grad(outputs, leaves, upstream, retain_graph=True, allow_unused=True)
