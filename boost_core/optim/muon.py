"""Muon: the step of each low-rank factor is its momentum with all singular values brought close to one.

With the gradient G and the momentum μ, as ``torch.optim.Muon`` with Nesterov's momentum::

    M ← μ M + (1 − μ) G,   X = (1 − μ) G + μ M,   W ← (1 − lr·decay) W − lr · 0.2 √max(rows, columns) · O(X)

(https://kellerjordan.github.io/posts/muon; the scale, which makes a step as large as AdamW's so that one learning rate
serves both, is that of arXiv 2502.16982.) O is five Newton-Schulz steps from X₀ = X / ‖X‖::

    X₊ = (a I + b S + c S²) X,   S = X Xᵀ

A factor is r × n with its long axis n sharded. S is r × r, a sum over ranks, and that of the next step is a polynomial
in this one. So ranks exchange S once, compute all five steps in it, and multiply X once; in float64, as S squares the
condition number. All other weights are updated by AdamW.

Shape suffixes: g projections, n a factor's long axis (this rank's shard), r rank.
"""

from collections.abc import Mapping, Sequence
from math import sqrt

import torch

from boost_core.architecture import Role
from boost_core.config.training import MuonConfig, OptimizerConfig
from boost_core.optim.adamw import MasterWeightAdamW
from boost_core.optim.group import ParamGroup
from boost_core.parallel.communicator import Communicator

_COEFFICIENTS = (3.4445, -4.775, 2.0315)
_STEPS = 5
_SMALLEST_NORM = 1e-7
_SIZE_OF_ADAMWS = 0.2  # root mean square of a step over the learning rate


class Muon(MasterWeightAdamW):
    """``MasterWeightAdamW`` whose low-rank factors are updated by Muon, which keeps one moment for them.

    Args:
        groups: All weights of the model; those of the group with a custom update are the factors.
        config: Weight decay, and AdamW's betas and epsilon.
        muon: The momentum.
        roles: The role of each factor, by name: it says which axis is the long one.
        tensor_parallel: The group over which the factors' long axes are sharded.
    """

    def __init__(
        self, groups: Sequence[ParamGroup], config: OptimizerConfig, muon: MuonConfig, roles: Mapping[str, Role],
        tensor_parallel: Communicator,
    ) -> None:  # fmt: skip
        super().__init__(groups, config)
        self._momentum, self._roles, self._tensor_parallel = muon.momentum, roles, tensor_parallel
        (self._factors,) = (group for group in groups if group.kind.custom_update)

    def step(self, clip: torch.Tensor, learning_rate: float, step: int) -> None:
        """Apply AdamW to all but the factors, and Muon to those; see ``MasterWeightAdamW.step``."""
        super().step(clip, learning_rate, step)
        for name, gradient in self._factors.summed_gradients().items():
            with self._factors.on_device(name, "master", "first_moment") as (master, moment):
                down = self._roles[name] is Role.DOWN_PROJECTION  # the long axis first, and here last
                master_grn, moment_grn, gradient_grn = (
                    each.permute(1, 2, 0) if down else each for each in (master, moment, gradient * clip)
                )
                moment_grn.lerp_(gradient_grn, 1 - self._momentum)
                direction_grn = orthogonalized(gradient_grn.lerp_(moment_grn, self._momentum), self._tensor_parallel)
                rank, shard = direction_grn.shape[1:]
                scale = _SIZE_OF_ADAMWS * sqrt(max(rank, shard * self._tensor_parallel.size))
                master_grn.mul_(1 - learning_rate * self._factors.kind.decay)
                master_grn.sub_(direction_grn, alpha=learning_rate * scale)
        self._factors.round_masters()


def orthogonalized(x_grn: torch.Tensor, communicator: Communicator) -> torch.Tensor:
    """Apply five Newton-Schulz steps to each of g matrices, in the type of ``x``.

    Args:
        x_grn: This rank's columns of them.
        communicator: The group over which the columns are sharded.
    """
    precise_grn = x_grn.double()
    gram_grr = communicator.all_reduce_(precise_grn @ precise_grn.mT, "muon")
    norm_g11 = gram_grr.diagonal(dim1=-2, dim2=-1).sum(-1).sqrt().clamp(min=_SMALLEST_NORM)[:, None, None]
    gram_grr = gram_grr / norm_g11.square()
    identity = torch.eye(gram_grr.shape[-1], dtype=gram_grr.dtype, device=gram_grr.device)
    a, b, c = _COEFFICIENTS
    all_steps_grr = identity / norm_g11
    for _ in range(_STEPS):  # polynomials in one matrix commute
        step_grr = a * identity + b * gram_grr + c * gram_grr @ gram_grr
        all_steps_grr, gram_grr = step_grr @ all_steps_grr, step_grr @ gram_grr @ step_grr
    return (all_steps_grr @ precise_grn).to(x_grn.dtype)
