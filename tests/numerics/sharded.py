"""Runs the product's model as one tensor parallel rank and gathers what it computed."""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from boost_core.config import ModelConfig
from boost_core.models.cola import ColaModel
from boost_core.nn.attention import Rotation
from boost_core.nn.weights import WeightedModule
from boost_core.parallel.btp import SHARDED_AXIS, BottleneckTensorParallel
from boost_core.parallel.collectives import Collectives
from boost_core.parallel.ledger import CommunicationLedger, Entry, Totals
from boost_core.parallel.shard import initial_value, make_weights

SEED = 7


@dataclass(frozen=True)
class Outcome:
    """Loss of each token, the whole gradient of each weight, and the ledger forward and backward."""

    loss: torch.Tensor
    gradients: dict[str, torch.Tensor]
    forward: dict[Entry, Totals]
    backward: dict[Entry, Totals]


def batch(model: ModelConfig, sequences: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(0, model.vocab_size, (sequences, length + 1), generator=generator)
    return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()


def token_weights(count: int) -> torch.Tensor:
    """Unequal weights of the tokens' losses, so that no gradient cancels by symmetry."""
    return torch.linspace(0.5, 1.5, count, dtype=torch.float64) / count


def full_weights(model: ModelConfig, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """The initial weights, norm scales moved off one so that they matter."""
    declared = ColaModel(model, BottleneckTensorParallel(Collectives(None, "tp", CommunicationLedger())))
    return {
        f"{path}.{name}": _perturbed(f"{path}.{name}", initial_value(f"{path}.{name}", spec, SEED)).to(dtype)
        for path, module in declared.named_modules()
        if isinstance(module, WeightedModule)
        for name, spec in module.weight_specs.items()
    }


def _perturbed(name: str, value: torch.Tensor) -> torch.Tensor:
    return value + torch.linspace(-0.3, 0.3, len(value)) if name.endswith("scale") else value


def run_sharded(model: ModelConfig, sequences: int, length: int, dtype: torch.dtype) -> Outcome:
    """Forward and backward on this rank; call it on every rank of a group."""
    world = dist.group.WORLD if dist.is_initialized() else None
    ledger = CommunicationLedger()
    collectives = Collectives(world, "tp", ledger)
    network = ColaModel(model, BottleneckTensorParallel(collectives))
    make_weights(network, SHARDED_AXIS, collectives.rank, collectives.size, SEED, torch.device("cpu"), dtype)
    axes = _load_full(network, full_weights(model, dtype), collectives)
    tokens, targets = batch(model, sequences, length)
    rotation = Rotation(length, model.head_size, model.rope_theta, torch.device("cpu"))
    loss_T = network(tokens.flatten(), targets.flatten(), rotation)
    forward = ledger.totals()
    ledger.clear()
    (loss_T.double() * token_weights(loss_T.numel())).sum().backward()
    backward = ledger.totals()
    gradients = {name: _gathered(weight.grad, axes[name], collectives) for name, weight in network.named_parameters()}
    return Outcome(loss_T.detach(), gradients, forward, backward)


def _load_full(network: torch.nn.Module, full: dict[str, torch.Tensor], collectives: Collectives) -> dict[str, int]:
    axes = {}
    for path, module in network.named_modules():
        if isinstance(module, WeightedModule):
            for name, spec in module.weight_specs.items():
                axes[f"{path}.{name}"] = axis = SHARDED_AXIS[spec.role]
                shard = full[f"{path}.{name}"].chunk(collectives.size, dim=axis)[collectives.rank]
                module.get_parameter(name).data.copy_(shard)
    return axes


def _gathered(shard: torch.Tensor, axis: int, collectives: Collectives) -> torch.Tensor:
    if collectives.size == 1:
        return shard
    shards = [torch.empty_like(shard.contiguous()) for _ in range(collectives.size)]
    dist.all_gather(shards, shard.contiguous())
    return torch.cat(shards, dim=axis)
