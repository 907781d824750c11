"""AdamW on flat fp32 masters, with clipping before it and rounding after it, in one pass (arXiv 1711.05101).

With gradient ``g``, moments ``m``, ``v``, master ``p``, step t from 1 and clip factor ``k``::

    m = β₁ m + (1 − β₁) k g
    v = β₂ v + (1 − β₂) (k g)²
    p = p (1 − lr · decay) − lr / (1 − β₁ᵗ) · m / (√v / √(1 − β₂ᵗ) + ε)
    w = p                                 rounded to the compute type

torch's own fused AdamW neither clips nor writes w: that would be two more passes over all weights. The clip factor
stays on the device, so that nobody waits for the gradients' norm.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.optim.adamw import adamw

from boost_core.kernels.launch import jit, runs_on_triton, tl, triton

BLOCK, WARPS = 1024, 4  # eight elements per thread


@dataclass(frozen=True)
class AdamWUpdate:
    """Rates and step.

    Attributes:
        learning_rate: lr.
        betas: β₁ and β₂.
        epsilon: ε.
        weight_decay: decay.
        step: t, from 1.
    """

    learning_rate: float
    betas: tuple[float, float]
    epsilon: float
    weight_decay: float
    step: int


def adamw_(
    master: torch.Tensor, gradient: torch.Tensor, first: torch.Tensor, second: torch.Tensor,
    weight: torch.Tensor | None, clip: torch.Tensor, update: AdamWUpdate,
) -> None:  # fmt: skip
    """Update ``master`` and its moments in place, and ``weight`` with it.

    Args:
        master: fp32, flat and dense, as are all others.
        gradient: Its gradient, fp32; it may be overwritten.
        first: Running mean of the gradient.
        second: Running mean of its square.
        weight: What the model computes with; ``None`` if that is the master itself.
        clip: Factor for the gradient: one fp32 element on the same device.
        update: Rates and step.
    """
    first_decay, second_decay = update.betas
    if not runs_on_triton(master):
        # The reference: torch's own fused AdamW between two passes, one that clips and one that rounds.
        steps_before = torch.full((), float(update.step - 1), device=master.device)
        adamw(
            [master], [gradient.mul_(clip)], [first], [second], [], [steps_before], fused=True, amsgrad=False,
            maximize=False, lr=update.learning_rate, beta1=first_decay, beta2=second_decay, eps=update.epsilon,
            weight_decay=update.weight_decay,
        )  # fmt: skip
        if weight is not None:
            weight.copy_(master)
        return
    _update[(triton.cdiv(master.numel(), BLOCK),)](
        master, gradient, first, second, master if weight is None else weight, clip, master.numel(),
        1 - update.learning_rate * update.weight_decay, update.learning_rate / (1 - first_decay**update.step),
        # 1 − β passed apart from β: in fp32 the difference would lose half its digits.
        first_decay, 1 - first_decay, second_decay, 1 - second_decay, 1 - second_decay**update.step, update.epsilon,
        WEIGHT=weight is not None, BLOCK=BLOCK, num_warps=WARPS,
    )  # fmt: skip


@jit
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
