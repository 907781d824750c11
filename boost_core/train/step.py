"""One optimizer step: micro-batches forward and backward, gradients over replicas, clipping, update."""

from dataclasses import dataclass

import torch
from torch.profiler import record_function

from boost_core.data.sampler import Sampler, Sequences, micro_batches
from boost_core.optim.norm import clip_factor, global_norm
from boost_core.optim.schedule import learning_rate
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
    state.gradients.begin()
    loss = _through_micro_batches(state, sampler) if state.pipeline is None else _through_pipeline(state, sampler)
    with record_function("optimizer"):  # a name for it in profiles
        return _update(state, loss)


def _through_micro_batches(state: TrainState, sampler: Sampler) -> torch.Tensor:
    """Forward and backward of this replica's micro-batches, one by one; its part of the mean loss."""
    training, replicas = state.spec.training, state.ranks.data
    # The mean over the global batch is the sum of the replicas' parts of it, and so are the gradients.
    all_tokens = training.global_batch_size * training.sequence_length
    loss = torch.zeros((), dtype=torch.float64, device=state.mesh.device)
    for first in micro_batches(
        state.samples, training.global_batch_size, training.micro_batch_size, replicas.rank, replicas.size
    ):
        token_T, target_T = _on_device(sampler.sequences(first, training.micro_batch_size), state)
        part: torch.Tensor = state.model(token_T, target_T, state.rotation).sum() / all_tokens
        part.backward()  # type: ignore[no-untyped-call]
        loss += part.detach().double()
    return loss


def _through_pipeline(state: TrainState, sampler: Sampler) -> torch.Tensor:
    """The same through the pipeline's stages; 0 on ranks without the last of them."""
    training, replicas = state.spec.training, state.ranks.data
    if state.pipeline is None:
        raise AssertionError("there is no pipeline")
    share = training.global_batch_size // replicas.size
    sequences = sampler.sequences(state.samples + replicas.rank * share, share)
    return state.pipeline.train(*_on_device(sequences, state))


def _update(state: TrainState, loss: torch.Tensor) -> StepResult:
    """Update the weights with the gradients of the step."""
    spec, optimizer, ranks = state.spec, state.optimizer, state.ranks
    state.gradients.finish()
    for along in (ranks.pipeline, ranks.data):
        along.all_reduce_(loss, "loss")
    for group in optimizer.groups:
        if group.kind.latent:
            # Each rank has a part of them, as of the latents' own. Once a step, whatever the number of tokens.
            ranks.tensor.all_reduce_(group.own_gradient, "latent weights")
    norm = global_norm(optimizer.groups, ranks.tensor, ranks.data, ranks.gang)
    state.step += 1
    state.samples += spec.training.global_batch_size
    rate = learning_rate(state.step, spec.training.steps, spec.optimizer)
    optimizer.step(clip_factor(norm, spec.optimizer.clip_norm), rate, state.step)
    return StepResult(loss.item(), norm.item(), rate)


def losses(state: TrainState, sequences: Sequences) -> torch.Tensor | None:
    """Loss of each token of ``[b, s + 1]`` sequences, ``[b·s]``; ``None`` on pipeline ranks without the last stage."""
    token_T, target_T = _on_device(sequences, state)
    if state.pipeline is not None:
        return state.pipeline.losses(token_T, target_T)
    out: torch.Tensor = state.model(token_T, target_T, state.rotation)
    return out


def _on_device(sequences: Sequences, state: TrainState) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of ``[b, s + 1]`` sequences, ``[b·s]`` each."""
    tokens = torch.from_numpy(sequences).to(state.mesh.device)
    return tokens[:, :-1].reshape(-1), tokens[:, 1:].reshape(-1)
