"""The reference: torch's own fused AdamW between two passes, one that clips and one that rounds."""

import torch
from torch.optim.adamw import adamw

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
    """Update in place; see the package for the arguments."""
    steps_before = torch.tensor(float(update.step - 1), device=master.device)
    adamw(
        [master], [gradient.mul_(clip)], [first], [second], [], [steps_before], fused=True, amsgrad=False,
        maximize=False, lr=update.learning_rate, beta1=update.betas[0], beta2=update.betas[1], eps=update.epsilon,
        weight_decay=update.weight_decay,
    )  # fmt: skip
    if weight is not None:
        weight.copy_(master)
