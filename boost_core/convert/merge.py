"""Conversion of a linear low-rank model to a dense one by multiplying out its products.

Shape suffixes: d input width, r rank, f output width.
"""

import torch

from boost_core.architecture.families import is_low_rank
from boost_core.config import ModelConfig
from boost_core.convert.names import Tensors

_ROWS = 1024  # rows of a product computed at a time


def merged_model(model: ModelConfig) -> ModelConfig:
    """The dense model that computes the same function as a linear low-rank one.

    Raises:
        ValueError: The model is already dense, or more than a product joins its factors.
    """
    if model.rank is None:
        raise ValueError("the model is dense already; export it without --merge")
    if not is_low_rank(model):
        raise ValueError(
            f"family={model.family} has projections that are more than a product of two factors, so they cannot be "
            "multiplied out; export it without --merge"
        )
    if model.latent_activation:
        raise ValueError(
            f"family={model.family} has a SiLU between the two factors of a projection, so there is no product to "
            "multiply out; export it without --merge"
        )
    dense = {"family": "dense", "rank": None, "gate_activation": model.gated_by_silu, "preset": None}
    return ModelConfig.model_validate(model.model_dump() | dense)


def multiply_out(name: str, weight_fd: torch.Tensor, published: Tensors) -> tuple[str, ...]:
    """Fill a published tensor of the dense model.

    Products are summed in fp64, so that they are rounded only once, to the tensor's type.

    Args:
        name: Name of the tensor.
        weight_fd: The tensor.
        published: The low-rank model's tensors.

    Returns:
        The names of the low-rank model's tensors that were used.
    """
    if name in published:
        weight_fd.copy_(published[name])
        return (name,)
    projection = name.removesuffix(".weight")
    down, up = f"{projection}.cola_a", f"{projection}.cola_b"
    down_rd = published[down].double().T
    for rows_fd, columns_rf in zip(
        torch.split(weight_fd, _ROWS), torch.split(published[up], _ROWS, dim=1), strict=True
    ):
        rows_fd.copy_(columns_rf.double().T @ down_rd)
    return down, up
