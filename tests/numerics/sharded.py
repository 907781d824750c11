"""Runs the product's model as one tensor parallel rank and gathers what it computed."""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from boost_core.architecture import WeightSpec, chosen_sharding
from boost_core.config import ModelConfig, ParallelismConfig
from boost_core.model.attention import Rotation
from boost_core.model.decoder import build
from boost_core.model.low_rank import weight_specs
from boost_core.parallel.communicator import CommunicationLedger, Communicator, Entry, Pending, Totals
from boost_core.parallel.shard import initialize_, replace_weights

SEED = 7
HOST = torch.device("cpu")


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


@functools.cache
def full_weights(model: ModelConfig, dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    """The initial weights, those that start at a constant moved off it so that they matter."""
    declared, _ = build(model, ParallelismConfig(), Communicator(None, "tp", CommunicationLedger()))
    return {name: _perturbed(_initial(name, spec), spec).to(dtype) for name, spec in weight_specs(declared).items()}


def shard_of(full: torch.Tensor, axis: int | None, rank: int, size: int) -> torch.Tensor:
    """The part of a full weight that one rank holds."""
    return full if axis is None else full.chunk(size, dim=axis)[rank]


def _initial(name: str, spec: WeightSpec) -> torch.Tensor:
    value = torch.empty(spec.shape)
    initialize_(value, (0,) * value.ndim, name, spec, SEED)
    return value


def _perturbed(value: torch.Tensor, spec: WeightSpec) -> torch.Tensor:
    if not isinstance(spec.start, float):
        return value
    return value + torch.linspace(-0.3, 0.3, value.numel()).view(value.shape)


class ThroughTheHost(Communicator):
    """Collectives by way of the CPU, so that several ranks can share a GPU, which NCCL refuses."""

    def start_all_reduce_(self, tensor: torch.Tensor, purpose: str, *how: Any, **named: Any) -> Pending:
        copy = tensor.to(HOST, copy=True)
        super().start_all_reduce_(copy, purpose, *how, **named).wait()
        tensor.copy_(copy)
        return _Done()

    def _start(
        self, kind: str, collective: Callable[..., Any], out: torch.Tensor, payload: torch.Tensor, purpose: str
    ) -> Pending:
        received = torch.empty_like(out, device=HOST)
        super()._start(kind, collective, received, payload.to(HOST, copy=True), purpose).wait()
        out.copy_(received)
        return _Done()


class _Done:
    def wait(self) -> None:
        pass


def run_sharded(
    model: ModelConfig,
    parallelism: ParallelismConfig,
    sequences: int,
    length: int,
    dtype: torch.dtype,
    device: torch.device = HOST,
    communicator: type[Communicator] = Communicator,
    fp8: bool = False,
) -> Outcome:
    """Forward and backward on this rank; call it on every rank of a group. The outcome is on the host."""
    ledger = CommunicationLedger()
    collectives = communicator(dist.group.WORLD, "tp", ledger)
    network, axes = build(model, parallelism, collectives, fp8=fp8)
    full = full_weights(model, dtype)
    axis_of = {name: axes[spec.role] for name, spec in weight_specs(network).items()}

    def shard(name: str, _: WeightSpec) -> torch.Tensor:
        own = shard_of(full[name], axis_of[name], collectives.rank, collectives.size)
        return own.to(device, memory_format=torch.contiguous_format, copy=True)

    replace_weights(network, shard)
    tokens, targets = (ids.flatten().to(device) for ids in batch(model, sequences, length))
    rotation = Rotation.of(model, length, device)
    loss_T = network(tokens, targets, rotation)
    forward = ledger.totals()
    ledger.clear()
    (loss_T.double() * token_weights(loss_T.numel()).to(device)).sum().backward()
    backward = ledger.totals()
    own = {name: weight.grad for name, weight in network.named_parameters()}
    for name, spec in weight_specs(network).items():
        if spec.role in chosen_sharding(model, parallelism).partial_gradients:
            collectives.all_reduce_(own[name], "partial gradients")
    gradients = {name: _gathered(gradient.cpu(), axis_of[name], collectives) for name, gradient in own.items()}
    return Outcome(loss_T.detach().cpu(), gradients, forward, backward)


def relative_error(value: torch.Tensor, truth: torch.Tensor) -> float:
    return ((value.double() - truth).norm() / truth.norm()).item()


def errors_of_cells(
    model: ModelConfig,
    cells: list[ParallelismConfig],
    sequences: int,
    length: int,
    loss: torch.Tensor,
    gradients: dict[str, torch.Tensor],
) -> list[dict[str, float]]:
    """``run_sharded`` in float64 for one choice after the other; the error of the loss and of each gradient."""
    errors = []
    for cell in cells:
        outcome = run_sharded(model, cell, sequences, length, torch.float64)
        of_gradients = {name: relative_error(outcome.gradients[name], truth) for name, truth in gradients.items()}
        errors.append({"loss": relative_error(outcome.loss, loss)} | of_gradients)
    return errors


def _gathered(shard: torch.Tensor, axis: int | None, collectives: Communicator) -> torch.Tensor:
    """The whole gradient; of a weight that every rank has whole, this rank's own, which must be complete."""
    if axis is None:
        return shard
    shards = [torch.empty_like(shard.contiguous()) for _ in range(collectives.size)]
    dist.all_gather(shards, shard.contiguous())
    return torch.cat(shards, dim=axis)
