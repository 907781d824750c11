"""The reference: plain torch."""

import torch

from boost_core.kernels.adamw.update import AdamWUpdate


def adamw_(
    master: torch.Tensor,
    gradient: torch.Tensor,
    first: torch.Tensor,
    second: torch.Tensor,
    weight: torch.Tensor | None,
    clip: torch.Tensor,
    update: AdamWUpdate,
) -> None:
    """The update, in place; see the package for the arguments."""
    (first_decay, second_decay), (first_correction, second_correction) = update.betas, update.corrections
    clipped = gradient * clip
    first.lerp_(clipped, 1 - first_decay)
    second.mul_(second_decay).addcmul_(clipped, clipped, value=1 - second_decay)
    denominator = (second / second_correction).sqrt_().add_(update.epsilon)
    master.mul_(1 - update.learning_rate * update.weight_decay)
    master.addcdiv_(first, denominator, value=-update.learning_rate / first_correction)
    if weight is not None:
        weight.copy_(master)
