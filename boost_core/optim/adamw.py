"""AdamW on fp32 master weights (decoupled weight decay, arXiv 1711.05101)."""

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn

from boost_core.config.training import OptimizerConfig


class MasterWeightAdamW:
    """Updates fp32 masters and copies them into the weights that the model computes with.

    With an fp32 model the masters are the weights themselves.

    Args:
        weights: The model's weights by name, fp32; they become ``compute_type`` here.
        config: Betas, epsilon and weight decay.
        compute_type: What the model computes in.
        undecayed: Names of weights without weight decay.
        apart: Names of weights that a subclass updates itself; their masters and moments are kept here all the same.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        compute_type: torch.dtype,
        undecayed: Collection[str] = (),
        apart: Collection[str] = (),
    ) -> None:
        self._weights = weights
        self.masters: dict[str, torch.Tensor] = {}
        for name, weight in weights.items():
            self.masters[name] = weight.detach()
            weight.data = weight.detach().to(compute_type)  # the same storage where the types agree
        own = [name for name in self.masters if name not in apart]
        groups: list[dict[str, Any]] = [
            {"params": [self.masters[name] for name in own if name not in undecayed]},
            {"params": [self.masters[name] for name in own if name in undecayed], "weight_decay": 0.0},
        ]
        self._adamw = torch.optim.AdamW(
            groups, lr=0.0, betas=config.betas, eps=config.adam_epsilon, weight_decay=config.weight_decay
        )
        self._fill_state()

    def _fill_state(self) -> None:
        """Make the moments now, so that a checkpoint can be loaded into them before the first step."""
        for master in self.masters.values():
            self._adamw.state[master] = {
                "step": torch.tensor(0.0),
                "exp_avg": torch.zeros_like(master),
                "exp_avg_sq": torch.zeros_like(master),
            }

    def step(self, gradients: Mapping[str, torch.Tensor], learning_rate: float, step: int) -> None:
        """One update with the clipped gradients of optimizer step number ``step`` (from 1)."""
        self._update(gradients, learning_rate, step)
        self.copy_masters_to_weights()

    def _update(self, gradients: Mapping[str, torch.Tensor], learning_rate: float, step: int) -> None:
        for name, master in self.masters.items():
            master.grad = gradients[name].to(master.dtype)
            self._adamw.state[master]["step"].fill_(step - 1)
        for group in self._adamw.param_groups:
            group["lr"] = learning_rate
        self._adamw.step()
        for master in self.masters.values():
            master.grad = None

    def moments(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Running means of a weight's gradient and of its square."""
        state = self._adamw.state[self.masters[name]]
        return state["exp_avg"], state["exp_avg_sq"]

    def copy_masters_to_weights(self) -> None:
        """Round the masters into the model's weights; nothing to do where they share storage."""
        for name, master in self.masters.items():
            if self._weights[name].dtype != master.dtype:
                self._weights[name].data.copy_(master)

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """What a checkpoint keeps of each weight: the master and its two moments."""
        return {
            name: dict(zip(("master", "first_moment", "second_moment"), (master, *self.moments(name)), strict=True))
            for name, master in self.masters.items()
        }
