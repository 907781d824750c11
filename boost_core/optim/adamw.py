"""AdamW on fp32 master weights (decoupled weight decay, arXiv 1711.05101), flat in memory."""

from collections.abc import Iterator, Sequence

import torch

from boost_core.config.training import OptimizerConfig
from boost_core.kernels.adamw import AdamWUpdate, adamw_
from boost_core.optim.zero import ParamGroup, StateSlice


class MasterWeightAdamW:
    """Updates fp32 masters, and with them the model's weights.

    Args:
        groups: All weights of the model. Those with a custom update are left to a subclass.
        config: Betas and epsilon.
    """

    def __init__(self, groups: Sequence[ParamGroup], config: OptimizerConfig) -> None:
        self.groups, self._config = groups, config

    def step(self, clip: torch.Tensor, learning_rate: float, step: int) -> None:
        """Apply one update from the groups' reduced gradients, which are undefined afterwards.

        Args:
            clip: Factor for the gradients: one fp32 element.
            learning_rate: For this step.
            step: Number of the optimizer step, from 1.
        """
        self._adamw(clip, learning_rate, step, self._config.adam_epsilon)

    def skip(self, step: int) -> None:
        """Leave out an update whose gradients are not finite; see ``step``."""

    def _adamw(self, clip: torch.Tensor, learning_rate: float, step: int, epsilon: float) -> None:
        """Update the groups that have no custom update."""
        for group in self.groups:
            if group.kind.custom_update:
                continue
            update = AdamWUpdate(learning_rate, self._config.betas, epsilon, group.kind.decay, step)
            for part in group.parts():
                adamw_(*part, clip, update)
            group.publish()

    def round_masters(self) -> None:
        """Round the masters into the model's weights."""
        for group in self.groups:
            group.round_masters()

    def pieces(self) -> Iterator[StateSlice]:
        """Yield what this rank keeps of each weight's state."""
        for group in self.groups:
            yield from group.pieces()
