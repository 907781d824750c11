"""The Triton kernel: blocks of the flat tensors."""

import torch
import triton
import triton.language as tl

from boost_core.kernels.adamw.update import AdamWUpdate

BLOCK, WARPS = 1024, 4  # eight elements per thread


@triton.jit
def _update(
    master_ptr, gradient_ptr, first_ptr, second_ptr, weight_ptr, clip_ptr, elements, keep, rate,
    first_decay, first_share, second_decay, second_share, second_correction, epsilon,
    WEIGHT: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = index < elements
    gradient = tl.load(gradient_ptr + index, mask=inside, other=0.0) * tl.load(clip_ptr)
    first = tl.load(first_ptr + index, mask=inside, other=0.0)
    second = tl.load(second_ptr + index, mask=inside, other=0.0)
    first = first_decay * first + first_share * gradient
    second = second_decay * second + second_share * gradient * gradient
    master = tl.load(master_ptr + index, mask=inside, other=0.0) * keep
    master -= rate * first / (tl.sqrt(second / second_correction) + epsilon)
    tl.store(first_ptr + index, first, mask=inside)
    tl.store(second_ptr + index, second, mask=inside)
    tl.store(master_ptr + index, master, mask=inside)
    if WEIGHT:
        tl.store(weight_ptr + index, master.to(weight_ptr.dtype.element_ty), mask=inside)


def adamw_(
    master: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    weight: torch.Tensor | None,
    clip: torch.Tensor,
    update: AdamWUpdate,
) -> None:
    """The same function as :func:`naive.adamw_`; see the package for the arguments."""
    (first_decay, second_decay), (first_correction, second_correction) = update.betas, update.corrections
    _update[(triton.cdiv(master.numel(), BLOCK),)](
        master, gradient, first, second, master if weight is None else weight, clip, master.numel(),
        1 - update.learning_rate * update.weight_decay, update.learning_rate / first_correction,
        # 1 − β passed apart from β: in fp32 the difference would lose half its digits.
        first_decay, 1 - first_decay, second_decay, 1 - second_decay, second_correction, update.epsilon,
        WEIGHT=weight is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip
