"""A job's optimizer: its weights in groups, updated by AdamW or LORO."""

from collections.abc import Mapping

import torch
from torch import nn

from boost_core.config import JobSpec
from boost_core.nn.weights import norm_weights
from boost_core.optim.adamw import MasterWeightAdamW
from boost_core.optim.group import ParamGroup, ParamKind
from boost_core.optim.loro import Loro, factor_pairs
from boost_core.parallel.communicator import Communicator
from boost_core.parallel.shard import latent_weights

COMPUTE_TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def make_optimizer(
    spec: JobSpec,
    model: nn.Module,
    axes: Mapping[str, int | None],
    tensor_parallel: Communicator,
    replicas: Communicator,
) -> MasterWeightAdamW:
    """The optimizer of this rank's weights, which become views of its groups' memory.

    Args:
        spec: The job.
        model: This rank's part of the model.
        axes: The axis that each weight is split along over the tensor parallel ranks, if it is.
        tensor_parallel: The tensor parallel group.
        replicas: The data parallel group.
    """
    loro, config = spec.optimizer.loro, spec.optimizer
    pairs = [] if loro is None else factor_pairs(model)
    factors = {name for pair in pairs for name in (pair.down, pair.up)}
    undecayed, latent = set(norm_weights(model)), set(latent_weights(model))
    tied = "embedding.weight" if spec.model.tie_embeddings and spec.parallelism.pipeline_parallel_size > 1 else None
    members: dict[ParamKind, dict[str, nn.Parameter]] = {}
    for name, weight in model.named_parameters():
        decay = 0.0 if name in undecayed else config.weight_decay
        kind = ParamKind(
            decay, split=axes[name] is not None, latent=name in latent, tied=name == tied, custom_update=name in factors
        )
        members.setdefault(kind, {})[name] = weight
    # The largest first, so that most of the gradients need not wait for what little there is of the others.
    kinds = sorted(members, key=lambda kind: (-kind.decay, kind.latent, kind.tied, kind.custom_update))
    compute_type, zero_stage = COMPUTE_TYPES[spec.training.precision], spec.parallelism.zero_stage
    groups = [ParamGroup(kind, members[kind], compute_type, replicas, zero_stage) for kind in kinds]
    if loro is None:
        return MasterWeightAdamW(groups, config)
    rank_share = spec.model.bottleneck_rank / spec.model.hidden_size
    return Loro(groups, config, loro, pairs, rank_share, tensor_parallel)
