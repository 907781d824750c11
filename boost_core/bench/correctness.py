"""The gate before every timing: an operation matches the float64 reference within a derived bound."""

from collections.abc import Callable
from itertools import chain

import torch

from boost_core.bench.cases import Case, Tensors
from boost_core.kernels.dispatch import Implementation, always

ROUNDINGS = 4  # of each element on its way through an operation
Arrange = Callable[[torch.Tensor], torch.Tensor]  # the same values in another memory layout


def disagreements(
    case: Case, implementation: Implementation = "triton", arrange: Arrange = torch.Tensor.contiguous
) -> list[str]:
    """Return outputs and gradients that are further from the float64 reference than rounding explains.

    The bound: the relative error of the reference in the same type; the effect of moving the inputs by a few
    roundings of the fp32 arithmetic inside, which is large where terms cancel; and one more rounding of the result.

    Args:
        case: The operation with its inputs, which are left unchanged.
        implementation: The implementation to check.
        arrange: Gives the inputs of the checked implementation a memory layout.
    """
    # Each call gets copies, because operations may overwrite their inputs.
    mine = _results(case, implementation, tuple(arrange(each.clone()) for each in case.inputs))
    same_type = _results(case, "naive", tuple(each.clone() for each in case.inputs))
    truth = _results(case, "naive", tuple(_widened(each) for each in case.inputs))
    moved = _results(case, "naive", tuple(_moved(_widened(each)) for each in case.inputs))
    found = []
    for index, (value, reference, exact, nearby) in enumerate(zip(mine, same_type, truth, moved, strict=True)):
        error = _relative_error(value, exact)
        limit = _relative_error(reference, exact) + _relative_error(nearby, exact) + torch.finfo(value.dtype).eps
        if not error <= limit:  # NaN is a disagreement, too
            found.append(f"{case.name}, result {index} of {len(mine)}: relative error {error:.2e} over {limit:.2e}")
    return found


def _results(case: Case, implementation: Implementation, inputs: Tensors) -> list[torch.Tensor]:
    """Return the outputs, then the gradients for one fixed gradient of each output."""
    leaves = [inputs[index].requires_grad_() for index in case.differentiated]
    with always(implementation):
        outputs = case.run(*inputs)
        results = [output.detach().clone() for output in outputs]
        if leaves:
            torch.autograd.backward(list(outputs), [_upstream(output) for output in outputs])
    gradients = (leaf.grad for leaf in leaves)
    return list(chain(results, (gradient for gradient in gradients if gradient is not None)))


def _upstream(output: torch.Tensor) -> torch.Tensor:
    """A gradient of the output's type, the same in all types except for rounding, laid out across its rows."""
    count = torch.arange(output.numel(), dtype=torch.float64, device=output.device)
    values = (count * 0.7 + 1).sin().to(torch.bfloat16).to(output.dtype).view(output.shape)
    return values.mT.contiguous().mT if values.ndim > 1 else values


def _widened(values: torch.Tensor) -> torch.Tensor:
    return values.double() if values.is_floating_point() else values


def _moved(values: torch.Tensor) -> torch.Tensor:
    """Move every number up or down by a few fp32 roundings."""
    if not values.is_floating_point():
        return values
    directions = torch.linspace(0, values.numel(), values.numel(), dtype=values.dtype, device=values.device).cos()
    return values * (1 + ROUNDINGS * torch.finfo(torch.float32).eps * directions.sign().view(values.shape))


def _relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    exact = truth.double()  # for 8-bit numbers, which have no arithmetic
    return float((value.double() - exact).norm() / exact.norm())
