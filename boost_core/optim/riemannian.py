"""One Riemannian step of a low-rank product W = M Nᵀ (LORO, ICLR 2025), on factors whose long axes are sharded.

M is the output factor and N the input factor. The two are not alike: where directions are no gradient's, as Adam's are
not, K₀ comes from the input factor's alone. With directions g_M and g_N of the two factors and orthonormal U and V,

    M = U R_M,  N = V R_N,  P = g_M R_N⁻¹,  Q = R_M⁻ᵀ g_Nᵀ,  K₀ = Q V,
    (Q − K₀Vᵀ)ᵀ = Q₁K₁,  P − U UᵀP = Q₂K₂,

the step along the manifold of rank-r matrices and back onto it is the truncated SVD

    [[R_M R_Nᵀ − ηK₀, −ηK₁ᵀ], [−ηK₂, 0]] ≈ U_s σ V_sᵀ,   M⁺ = [U Q₂] U_s √σ,   N⁺ = [V Q₁] V_s √σ.

Ranks exchange nothing wider than r × r: an orthonormal basis comes from the Gram matrix, of which each rank has a
part. Everything is computed in float64, because a Gram matrix squares the condition number.

Shape suffixes: n a factor's long axis (this rank's shard), r rank.
"""

import torch

from boost_core.parallel.communicator import Communicator

_NEGLIGIBLE = 1e-14  # relative to the largest eigenvalue of a Gram matrix; anything below is rounding error


def riemannian_step(
    m_nr: torch.Tensor,
    n_nr: torch.Tensor,
    direction_m_nr: torch.Tensor,
    direction_n_nr: torch.Tensor,
    step_size: float,
    communicator: Communicator,
) -> tuple[torch.Tensor, torch.Tensor]:
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
    k_0 = _gram(q_nr, v_nr, communicator)
    q_1_nr, k_1 = _orthonormal(q_nr - v_nr @ k_0.T, communicator)
    q_2_nr, k_2 = _orthonormal(p_nr - u_nr @ _gram(u_nr, p_nr, communicator), communicator)
    core = torch.cat(
        (
            torch.cat((r_m @ r_n.T - step_size * k_0, -step_size * k_1.T), dim=1),
            torch.cat((-step_size * k_2, torch.zeros_like(k_0)), dim=1),
        )
    )
    left, singular_values, right = torch.linalg.svd(core)
    root = singular_values[:rank].sqrt()
    return (
        torch.cat((u_nr, q_2_nr), dim=1) @ (left[:, :rank] * root),
        torch.cat((v_nr, q_1_nr), dim=1) @ (right[:rank].T * root),
    )


def _orthonormal(y_nr: torch.Tensor, communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    """Factor ``Y = Q K`` with orthonormal columns of Q, twice to remove rounding; zero columns where Y lacks rank."""
    q_nr, k = _orthonormal_once(y_nr, communicator)
    q_nr, again = _orthonormal_once(q_nr, communicator)
    return q_nr, again @ k


def _orthonormal_once(y_nr: torch.Tensor, communicator: Communicator) -> tuple[torch.Tensor, torch.Tensor]:
    eigenvalues, vectors = torch.linalg.eigh(_gram(y_nr, y_nr, communicator))
    kept = eigenvalues > _NEGLIGIBLE * eigenvalues[-1]
    root = eigenvalues.clamp(min=0).sqrt() * kept
    inverse_root = torch.where(kept, 1 / root, 0.0)
    return y_nr @ (vectors * inverse_root), root.unsqueeze(-1) * vectors.T


def _gram(a_nr: torch.Tensor, b_nr: torch.Tensor, communicator: Communicator) -> torch.Tensor:
    """``Aᵀ B`` over all ranks' rows."""
    return communicator.all_reduce_(a_nr.T @ b_nr, "riemannian step")
