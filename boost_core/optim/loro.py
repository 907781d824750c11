"""LORO (ICLR 2025): the two factors of each low-rank product move together, periodically along the manifold.

M is a product's output factor and N its input factor, W = M Nᵀ. With Adam's direction g = m / (√v + ε), which adds ε
before the bias correction, η = lr √(1 − β₂ᵗ) / (1 − β₁ᵗ), t the steps since the last exact one, and λ the decay::

    lazy    M ← (1 − η λ) (M − η (r/d) g_M),  N ← (1 − η λ) (N − η (r/d) g_N)
    exact   one Riemannian step with η, without weight decay; then the moments of all weights start from zero, and
            their learning rate warms up again, for a few steps

All other weights are updated by AdamW with the same ε, lr and t. The authors' code: ``LOROAdamW`` in
``loro_torch/loro_optim.py`` of github.com/mzf666/LORO-main at 4da57b6, run with ``--loro_refresh all``. Theirs warms up
from a rate of zero instead of ``1 / rewarm_steps``, and decays the other weights after their step instead of before it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import nn

from boost_core.config.training import LoroConfig, OptimizerConfig
from boost_core.nn.bottleneck import Bottleneck
from boost_core.optim.adamw import MasterWeightAdamW
from boost_core.optim.group import ParamGroup
from boost_core.optim.riemannian import riemannian_step
from boost_core.parallel.communicator import Communicator


@dataclass(frozen=True)
class FactorPair:
    """The locations of a projection's two factors: ``down[:, projection]`` and ``up[member]``."""

    down: str
    projection: int
    up: str
    member: int


def factor_pairs(model: nn.Module) -> list[FactorPair]:
    """Return the factor pairs of all of a model's bottlenecks."""
    pairs = []
    for path, module in model.named_modules():
        if isinstance(module, Bottleneck):
            pairs += [
                FactorPair(f"{path}.down", projection, f"{path}.up_{index}", member)
                for index, run in enumerate(module.group.runs)
                for member, projection in enumerate(run)
            ]
    return pairs


class Loro(MasterWeightAdamW):
    """``MasterWeightAdamW`` whose factor pairs are updated by LORO.

    Args:
        groups: All weights of the model; those of the group with a custom update are the factors.
        config: Betas, epsilon and weight decay.
        loro: How often to make an exact step.
        pairs: The factor pairs.
        rank_share: r/d.
        tensor_parallel: The group over which the factors' long axes are sharded.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        config: OptimizerConfig,
        loro: LoroConfig,
        pairs: list[FactorPair],
        rank_share: float,
        tensor_parallel: Communicator,
    ) -> None:
        super().__init__(groups, config)
        self._loro, self._pairs = loro, pairs
        self._rank_share, self._tensor_parallel = rank_share, tensor_parallel
        (self._factors,) = (group for group in groups if group.kind.custom_update)

    def step(self, clip: torch.Tensor, learning_rate: float, step: int) -> None:
        """Apply AdamW to all but the factors, and LORO to those; see ``MasterWeightAdamW.step``."""
        since = (step - 1) % self._loro.exact_every_steps + 1
        if step > self._loro.exact_every_steps:
            learning_rate *= min(1.0, since / self._loro.rewarm_steps)
        first_decay, second_decay = self._config.betas
        root = sqrt(1 - second_decay**since)
        self._adamw(clip, learning_rate, since, self._config.adam_epsilon / root)  # so that ε comes before it
        step_size = learning_rate * root / (1 - first_decay**since)
        gradients = self._factors.summed_gradients()
        directions = {name: self._direction(name, gradient * clip) for name, gradient in gradients.items()}
        if since == self._loro.exact_every_steps:
            self._exact(directions, step_size)
            for group in self.groups:
                group.clear_moments()
        else:
            self._lazy(directions, step_size)
        self._factors.round_masters()

    def _direction(self, name: str, gradient: torch.Tensor) -> torch.Tensor:
        first_decay, second_decay = self._config.betas
        with self._factors.on_device(name, "first_moment", "second_moment") as (first, second):
            first.lerp_(gradient, 1 - first_decay)
            second.mul_(second_decay).addcmul_(gradient, gradient, value=1 - second_decay)
            return first / (second.sqrt() + self._config.adam_epsilon)

    def _lazy(self, directions: Mapping[str, torch.Tensor], step_size: float) -> None:
        for name, direction in directions.items():
            with self._factors.on_device(name, "master") as (master,):
                master.sub_(direction, alpha=step_size * self._rank_share)
                master.mul_(1 - step_size * self._config.weight_decay)

    def _exact(self, directions: Mapping[str, torch.Tensor], step_size: float) -> None:
        for pair in self._pairs:
            with (
                self._factors.on_device(pair.down, "master") as (all_down,),
                self._factors.on_device(pair.up, "master") as (all_up,),
            ):
                down, up = all_down[:, pair.projection], all_up[pair.member].T
                moved_up, moved_down = riemannian_step(
                    up,
                    down,
                    directions[pair.up][pair.member].T,
                    directions[pair.down][:, pair.projection],
                    step_size,
                    self._tensor_parallel,
                )
                down.copy_(moved_down)
                up.copy_(moved_up)
