"""Optimizers of low-rank factors, LORO and Muon; all other weights are updated by AdamW.

**LORO (ICLR 2025)**: the two factors of each low-rank product move together, periodically along the manifold.

M is a product's output factor and N its input factor, W = M Nᵀ. With Adam's direction g = m / (√v + ε), which adds ε
before the bias correction, η = lr √(1 − β₂ᵗ) / (1 − β₁ᵗ), t the steps since the last exact one, and λ the decay::

    lazy    M ← (1 − η λ) (M − η (r/d) g_M),  N ← (1 − η λ) (N − η (r/d) g_N)
    exact   one Riemannian step with η, without weight decay; then the moments of all weights start from zero, and
            their learning rate warms up again, for a few steps

All other weights have the same ε, lr and t. The authors' code: ``LOROAdamW`` in
``loro_torch/loro_optim.py`` of github.com/mzf666/LORO-main at 4da57b6, run with ``--loro_refresh all``. Theirs warms up
from a rate of zero instead of ``1 / rewarm_steps``, and decays the other weights after their step instead of before it.

**Muon**: the step of each low-rank factor is its momentum with all singular values brought close to one.

With the gradient G and the momentum μ, as ``torch.optim.Muon`` with Nesterov's momentum::

    M ← μ M + (1 − μ) G,   X = (1 − μ) G + μ M,   W ← (1 − lr·decay) W − lr · 0.2 √max(rows, columns) · O(X)

(https://kellerjordan.github.io/posts/muon; the scale, which makes a step as large as AdamW's so that one learning rate
serves both, is that of arXiv 2502.16982.) O is five Newton-Schulz steps from X₀ = X / ‖X‖::

    X₊ = (a I + b S + c S²) X,   S = X Xᵀ

A factor is r × n with its long axis n sharded. S is r × r, a sum over ranks, and that of the next step is a polynomial
in this one. So ranks exchange S once, compute all five steps in it, and multiply X once; in float64, as S squares the
condition number.

Shape suffixes: g projections, n a factor's long axis (this rank's shard), r rank.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import sqrt

import torch
from torch import nn

from boost_core.architecture import Role
from boost_core.config.training import LoroConfig, MuonConfig, OptimizerConfig
from boost_core.model.low_rank import Bottleneck
from boost_core.optim.adamw import MasterWeightAdamW
from boost_core.optim.zero import ParamGroup
from boost_core.parallel.communicator import Communicator

# One Riemannian step of a low-rank product W = M Nᵀ (LORO, ICLR 2025), on factors whose long axes are sharded.
#
# M is the output factor and N the input factor. The two are not alike: where directions are no gradient's, as Adam's
# are not, K₀ comes from the input factor's alone. With directions g_M and g_N of the two factors and orthonormal U
# and V,
#
#     M = U R_M,  N = V R_N,  P = g_M R_N⁻¹,  Q = R_M⁻ᵀ g_Nᵀ,  K₀ = Q V,
#     (Q − K₀Vᵀ)ᵀ = Q₁K₁,  P − U UᵀP = Q₂K₂,
#
# the step along the manifold of rank-r matrices and back onto it is the truncated SVD
#
#     [[R_M R_Nᵀ − ηK₀, −ηK₁ᵀ], [−ηK₂, 0]] ≈ U_s σ V_sᵀ,   M⁺ = [U Q₂] U_s √σ,   N⁺ = [V Q₁] V_s √σ.
#
# Ranks exchange nothing wider than r × r: an orthonormal basis comes from the Gram matrix, of which each rank has a
# part. Everything is computed in float64, because a Gram matrix squares the condition number.
#
# Shape suffixes: n a factor's long axis (this rank's shard), r rank.

_NEGLIGIBLE = 1e-14  # relative to the largest eigenvalue of a Gram matrix; anything below is rounding error


def riemannian_step(
    m_nr: torch.Tensor, n_nr: torch.Tensor, direction_m_nr: torch.Tensor, direction_n_nr: torch.Tensor,
    step_size: float, communicator: Communicator,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the factors after one step; only their product matters, and both have the same singular values.

    Args:
        m_nr: This rank's rows of M.
        n_nr: This rank's rows of N.
        direction_m_nr: The direction of M, for example Adam's.
        direction_n_nr: The direction of N.
        step_size: η.
        communicator: The group over which the rows are sharded.
    """
    rank = m_nr.shape[1]
    m_nr, n_nr = m_nr.double(), n_nr.double()
    u_nr, r_m = _orthonormal(m_nr, communicator)
    v_nr, r_n = _orthonormal(n_nr, communicator)
    p_nr = direction_m_nr.double() @ torch.linalg.pinv(r_n)
    q_nr = direction_n_nr.double() @ torch.linalg.pinv(r_m)  # Qᵀ
    k_0 = communicator.all_reduce_(q_nr.T @ v_nr, "riemannian step")
    q_1_nr, k_1 = _orthonormal(q_nr - v_nr @ k_0.T, communicator)
    along_u = communicator.all_reduce_(u_nr.T @ p_nr, "riemannian step")
    q_2_nr, k_2 = _orthonormal(p_nr - u_nr @ along_u, communicator)
    upper = torch.cat((r_m @ r_n.T - step_size * k_0, -step_size * k_1.T), dim=1)
    lower = torch.cat((-step_size * k_2, torch.zeros_like(k_0)), dim=1)
    left, singular_values, right = torch.linalg.svd(torch.cat((upper, lower)))
    root = singular_values[:rank].sqrt()
    new_m_nr = torch.cat((u_nr, q_2_nr), dim=1) @ (left[:, :rank] * root)
    return new_m_nr, torch.cat((v_nr, q_1_nr), dim=1) @ (right[:rank].T * root)


def _orthonormal(y_nr: torch.Tensor, communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    """Factor ``Y = Q K`` with orthonormal columns of Q, twice to remove rounding; zero columns where Y lacks rank."""
    q_nr, factors = y_nr, []
    for _ in range(2):
        gram = communicator.all_reduce_(q_nr.T @ q_nr, "riemannian step")
        eigenvalues, vectors = torch.linalg.eigh(gram)
        significant = eigenvalues > _NEGLIGIBLE * eigenvalues[-1]
        root = eigenvalues.clamp(min=0).sqrt() * significant
        factors.append(root.unsqueeze(-1) * vectors.T)
        q_nr = q_nr @ (vectors * torch.where(significant, 1 / root, 0.0))
    return q_nr, factors[1] @ factors[0]


@dataclass(frozen=True)
class FactorPair:
    """The locations of a projection's two factors: ``down[:, projection]`` and ``up[member]``."""

    down: str
    projection: int
    up: str
    member: int


def factor_pairs(model: nn.Module) -> list[FactorPair]:
    """Return the factor pairs of all of a model's bottlenecks."""
    return [
        FactorPair(f"{path}.down", projection, f"{path}.up_{index}", member)
        for path, module in model.named_modules()
        if isinstance(module, Bottleneck)
        for index, run in enumerate(module.group.runs)
        for member, projection in enumerate(run)
    ]


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
        self, groups: Sequence[ParamGroup], config: OptimizerConfig, loro: LoroConfig, pairs: list[FactorPair],
        rank_share: float, tensor_parallel: Communicator,
    ) -> None:  # fmt: skip
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
        factors, directions = self._factors, {}
        for name, gradient in factors.summed_gradients().items():
            clipped = gradient * clip
            with factors.on_device(name, "first_moment", "second_moment") as (first, second):
                first.lerp_(clipped, 1 - first_decay)
                second.mul_(second_decay).addcmul_(clipped, clipped, value=1 - second_decay)
                directions[name] = first / (second.sqrt() + self._config.adam_epsilon)
        if since == self._loro.exact_every_steps:
            for pair in self._pairs:
                with factors.on_device(pair.down, "master") as (downs,), factors.on_device(pair.up, "master") as (ups,):
                    down, up = downs[:, pair.projection], ups[pair.member].T
                    of_up, of_down = directions[pair.up][pair.member].T, directions[pair.down][:, pair.projection]
                    moved = riemannian_step(up, down, of_up, of_down, step_size, self._tensor_parallel)
                    up.copy_(moved[0])
                    down.copy_(moved[1])
            for group in self.groups:
                group.clear_moments()
        else:
            for name, direction in directions.items():
                with factors.on_device(name, "master") as (master,):
                    master.sub_(direction, alpha=step_size * self._rank_share)
                    master.mul_(1 - step_size * self._config.weight_decay)
        factors.round_masters()

    def skip(self, step: int) -> None:
        """Leave out an update; the next one counts from here if it was to be exact, so the moments must, too."""
        if step % self._loro.exact_every_steps == 0:
            for group in self.groups:
                group.clear_moments()


# Muon.

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
                each_grn = (x.permute(1, 2, 0) if down else x for x in (master, moment, gradient * clip))
                master_grn, moment_grn, gradient_grn = each_grn
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
