"""One optimizer step: micro-batches forward and backward, gradients over replicas, clipping, update."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn
from torch.profiler import record_function

from boost_core.data.sampler import Sampler, Sequences, micro_batches
from boost_core.optim.clipping import clip_factor, global_norm
from boost_core.optim.schedule import learning_rate
from boost_core.parallel.shard import sum_latent_gradients_
from boost_core.train.state import TrainState


@dataclass(frozen=True)
class StepResult:
    """Figures of one step, the same on all ranks.

    Attributes:
        loss: Mean cross entropy of the global batch, nats a token.
        gradient_norm: Global norm before clipping.
        learning_rate: What the update used.
    """

    loss: float
    gradient_norm: float
    learning_rate: float


def training_step(state: TrainState, sampler: Sampler) -> StepResult:
    """Consume one global batch and update the weights."""
    training, optimizer, replicas = state.spec.training, state.optimizer, state.data_parallel
    tokens = training.global_batch_size // replicas.size * training.sequence_length
    loss = torch.zeros((), dtype=torch.float64, device=state.mesh.device)
    optimizer.flat_gradients.zero_()
    for first in micro_batches(
        state.samples, training.global_batch_size, training.micro_batch_size, replicas.rank, replicas.size
    ):
        sequences = sampler.sequences(first, training.micro_batch_size)
        token_losses = losses(state, sequences)
        # The mean over this replica's share; the replicas' means are averaged with their gradients.
        part = token_losses.sum() / tokens
        part.backward()  # type: ignore[no-untyped-call]
        loss += part.detach().double()
        _take_gradients(state.model, optimizer.gradients)
    with record_function("optimizer"):  # a name for it in profiles
        return _update(state, loss)


def _update(state: TrainState, loss: torch.Tensor) -> StepResult:
    """Update the weights with the gradients that this replica has summed up."""
    training, optimizer, replicas = state.spec.training, state.optimizer, state.data_parallel
    if replicas.size > 1:
        for each, purpose in ((loss, "loss"), (optimizer.flat_gradients, "gradients")):
            replicas.all_reduce_(each, purpose).div_(replicas.size)
    sum_latent_gradients_(optimizer.gradients, state.latent_weights, state.tensor_parallel)
    norm = global_norm(optimizer.flat_gradients, state.counted_blocks, state.tensor_parallel)
    state.step += 1
    state.samples += training.global_batch_size
    rate = learning_rate(state.step, training.steps, state.spec.optimizer)
    optimizer.step(clip_factor(norm, state.spec.optimizer.clip_norm), rate, state.step)
    return StepResult(loss.item(), norm.item(), rate)


def losses(state: TrainState, sequences: Sequences) -> torch.Tensor:
    """Loss of each token of ``[b, s + 1]`` sequences, ``[b·s]``."""
    tokens = torch.from_numpy(sequences).to(state.mesh.device)
    out: torch.Tensor = state.model(tokens[:, :-1].reshape(-1), tokens[:, 1:].reshape(-1), state.rotation)
    return out


def _take_gradients(model: nn.Module, sums: Mapping[str, torch.Tensor]) -> None:
    """Take the gradients off the weights and add them up in fp32, in which many small ones count, too."""
    for name, weight in model.named_parameters():
        if weight.grad is None:
            raise AssertionError(f"no gradient reached {name}")
        sums[name].add_(weight.grad)
        weight.grad = None
