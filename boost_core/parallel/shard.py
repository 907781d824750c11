"""Turns a model's declarations into this rank's weights, the same full weights at any layout."""

import hashlib

import torch
from torch import nn

from boost_core.nn.weights import Role, WeightedModule, WeightSpec


def make_weights(
    model: nn.Module, sharded_axis: dict[Role, int], rank: int, size: int, seed: int, device: torch.device,
    dtype: torch.dtype = torch.float32,
) -> None:  # fmt: skip
    """Replace every declared weight by this rank's shard of its initial value.

    Each full weight is drawn from a generator of its own, seeded by the weight's name, so the values depend
    on the seed alone and not on how many ranks there are or which one asks.

    Args:
        model: A model whose weights are declared.
        sharded_axis: The axis that each role is split along.
        rank: This rank's place in the tensor parallel group.
        size: Ranks in the tensor parallel group.
        seed: The job's seed.
        device: Where the shards live.
        dtype: Their type.
    """
    for module_name, module in model.named_modules():
        if isinstance(module, WeightedModule):
            for name, spec in module.weight_specs.items():
                full = initial_value(f"{module_name}.{name}", spec, seed)
                shard = full.chunk(size, dim=sharded_axis[spec.role])[rank]
                module.register_parameter(name, nn.Parameter(shard.to(device, dtype, copy=True).contiguous()))


def initial_value(name: str, spec: WeightSpec, seed: int) -> torch.Tensor:
    """The full initial value of one weight, fp32 on CPU."""
    if not spec.column_stds:
        return torch.ones(spec.shape)
    generator = torch.Generator().manual_seed(_seed_of(name, seed))
    values = torch.randn(spec.shape, generator=generator)
    for columns, std in zip(values.chunk(len(spec.column_stds), dim=-1), spec.column_stds, strict=True):
        columns.mul_(std)
    return values


def _seed_of(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{name}".encode()).digest()[:7], "big")
