"""A job's optimizer: its weights in groups, updated by AdamW, LORO or Muon."""

import torch
from torch import nn

from boost_core.architecture import ParamKind, chosen_sharding
from boost_core.config import JobSpec
from boost_core.model.low_rank import weight_specs
from boost_core.optim.adamw import MasterWeightAdamW
from boost_core.optim.loro_muon import Loro, Muon, factor_pairs
from boost_core.optim.zero import ParamGroup, Staging
from boost_core.parallel.communicator import Communicator

COMPUTE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.bfloat16}


def make_optimizer(spec: JobSpec, model: nn.Module, tensor: Communicator, replicas: Communicator) -> MasterWeightAdamW:
    """Build the optimizer of this rank's weights, which become views of its groups' memory.

    Args:
        spec: The job.
        model: This rank's part of the model.
        tensor: The tensor parallel group.
        replicas: The ranks with the same weights: data parallel ones, and context parallel ones.
    """
    config, specs = spec.optimizer, weight_specs(model)
    tied = "embedding.weight" if spec.model.tie_embeddings and spec.parallelism.pipeline_parallel_size > 1 else None
    members: dict[ParamKind, dict[str, nn.Parameter]] = {}
    sharding = chosen_sharding(spec.model, spec.parallelism)
    for name, weight in model.named_parameters():
        members.setdefault(ParamKind.of(specs[name], sharding, config, name == tied), {})[name] = weight
    kinds = sorted(members, key=lambda kind: kind.order)
    compute_type, zero_stage = COMPUTE_TYPES[spec.training.precision], spec.parallelism.zero_stage
    staging = Staging(next(model.parameters()).device)
    offload = spec.parallelism.optimizer_offload
    groups = [ParamGroup(kind, members[kind], compute_type, replicas, zero_stage, offload, staging) for kind in kinds]
    if config.loro is not None:
        rank_share = spec.model.bottleneck_rank / spec.model.hidden_size
        return Loro(groups, config, config.loro, factor_pairs(model), rank_share, tensor)
    if config.muon is not None:
        return Muon(groups, config, config.muon, {name: weight.role for name, weight in specs.items()}, tensor)
    return MasterWeightAdamW(groups, config)
