"""AdamW on fp32 master weights (decoupled weight decay, arXiv 1711.05101), flat in memory."""

from collections.abc import Collection, Mapping

import torch
from torch import nn

from boost_core.config.training import OptimizerConfig
from boost_core.kernels.adamw import adamw_
from boost_core.kernels.adamw.update import AdamWUpdate
from boost_core.optim.flat import Flat


class MasterWeightAdamW:
    """Updates fp32 masters, and with them the weights that the model computes with.

    With an fp32 model the masters are the weights themselves.

    Args:
        weights: The model's weights by name, fp32; they become ``compute_type`` here, and views of one tensor.
        config: Betas, epsilon and weight decay.
        compute_type: What the model computes in.
        undecayed: Names of weights without weight decay.
        apart: Names of weights that a subclass updates itself; their masters and moments are kept here all the same.

    Attributes:
        masters: The weights by name in at least fp32.
        gradients: Where the gradients of a step are to be, in the same type, by name.
        flat_gradients: All of them in one tensor.
    """

    def __init__(
        self,
        weights: Mapping[str, nn.Parameter],
        config: OptimizerConfig,
        compute_type: torch.dtype,
        undecayed: Collection[str] = (),
        apart: Collection[str] = (),
    ) -> None:
        self._config = config
        decayed = [name for name in weights if name not in undecayed and name not in apart]
        plain = [name for name in weights if name in undecayed and name not in apart]
        shapes = {name: weights[name].shape for name in (*decayed, *plain, *apart)}
        device = next(iter(weights.values())).device
        precise = torch.promote_types(compute_type, torch.float32)
        self._master, self._gradient, self._first, self._second = (Flat(shapes, precise, device) for _ in range(4))
        self._weight = self._master if compute_type == precise else Flat(shapes, compute_type, device)
        self.masters, self.gradients = self._master.views, self._gradient.views
        self.flat_gradients = self._gradient.flat
        for name, weight in weights.items():
            self.masters[name].copy_(weight.detach())
            weight.data = self._weight.views[name]
        self.copy_masters_to_weights()
        own = len(decayed) + len(plain)
        self._ranges = (
            (slice(0, self._master.up_to(len(decayed))), config.weight_decay),
            (slice(self._master.up_to(len(decayed)), self._master.up_to(own)), 0.0),
        )

    def step(self, clip: torch.Tensor, learning_rate: float, step: int) -> None:
        """One update with ``gradients``, which hold nothing of use afterwards.

        Args:
            clip: What they are multiplied by: one fp32 element.
            learning_rate: Of this step.
            step: Number of the optimizer step, from 1.
        """
        for here, decay in self._ranges:
            if here.start < here.stop:
                update = AdamWUpdate(learning_rate, self._config.betas, self._config.adam_epsilon, decay, step)
                weight = None if self._weight is self._master else self._weight.flat[here]
                adamw_(
                    self._master.flat[here], self._gradient.flat[here], self._first.flat[here],
                    self._second.flat[here], weight, clip, update,
                )  # fmt: skip

    def gradient_blocks(self, names: Collection[str]) -> torch.Tensor:
        """Which of the equal blocks of ``flat_gradients`` belong to these weights, ``[b]``."""
        return self._gradient.blocks_of(names)

    def moments(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Running means of a weight's gradient and of its square."""
        return self._first.views[name], self._second.views[name]

    def copy_masters_to_weights(self) -> None:
        """Round the masters into the model's weights; nothing to do where they share storage."""
        if self._weight is not self._master:
            self._weight.flat.copy_(self._master.flat)

    def tensors(self) -> dict[str, dict[str, torch.Tensor]]:
        """What a checkpoint keeps of each weight: the master and its two moments."""
        return {
            name: dict(zip(("master", "first_moment", "second_moment"), (master, *self.moments(name)), strict=True))
            for name, master in self.masters.items()
        }
