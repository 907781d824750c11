"""A dense model's projections cut to low rank by truncated singular value decomposition."""

import torch

from boost_core.convert.names import Tensors


def factored(published: Tensors, rank: int) -> Tensors:
    """Every projection's W as its best A·B of a rank, with the singular values shared evenly between the two.

    Args:
        published: A dense model under its published names.
        rank: Width of every bottleneck.

    Returns:
        The same model under the published names of a low-rank one.
    """
    cut: Tensors = {}
    for name, tensor in published.items():
        if name.endswith("_proj.weight"):
            projection = name.removesuffix(".weight")
            cut[f"{projection}.cola_a"], cut[f"{projection}.cola_b"] = _truncated(tensor.T, rank)
        else:
            cut[name] = tensor
    return cut


def _truncated(w_df: torch.Tensor, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    """W ≈ A B: d × r and r × f. Where W is narrower than the rank, the rest of both is zero."""
    left, values, right = torch.linalg.svd(w_df.double(), full_matrices=False)
    kept = min(rank, len(values))
    root = values[:kept].sqrt()
    a_dr, b_rf = w_df.new_zeros(w_df.shape[0], rank), w_df.new_zeros(rank, w_df.shape[1])
    a_dr[:, :kept], b_rf[:kept] = left[:, :kept] * root, root.unsqueeze(-1) * right[:kept]
    return a_dr, b_rf
