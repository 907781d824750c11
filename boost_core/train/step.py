"""One optimizer step: micro-batches forward and backward, gradients over replicas, clipping, update."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.profiler import record_function

from boost_core.data.sampler import Sampler, Sequences, replica_share
from boost_core.optim.norm import clip_factor, global_norm
from boost_core.optim.schedule import learning_rate
from boost_core.parallel.ledger import Part
from boost_core.train.batch import Batch
from boost_core.train.state import TrainState


@dataclass(frozen=True)
class Requests:
    """What is asked of the loop after a step, the same on all ranks once they have made it.

    Attributes:
        halt: To stop.
        store: To write a checkpoint before that.
        put_off: To take no copy of the state now, because a store that fails is at work on the one before.
    """

    halt: bool = False
    store: bool = False
    put_off: bool = False


@dataclass(frozen=True)
class StepResult:
    """Figures of one step, the same on all ranks.

    Attributes:
        loss: Mean cross entropy of the global batch, nats a token.
        gradient_norm: Global norm before clipping.
        learning_rate: What the update used.
        diverged: Whether the loss or the norm is not finite, or the loss is above its limit. There was no update then.
        requests: What any rank asks for after this step.
    """

    loss: float
    gradient_norm: float
    learning_rate: float
    diverged: bool
    requests: Requests


def training_step(
    state: TrainState, sampler: Sampler, loss_limit: float = sys.float_info.max, requests: Requests = Requests(),
    refuse: Callable[[], None] = lambda: None,
) -> StepResult:  # fmt: skip
    """Consume one global batch and update the weights; tells ``state.clock`` of the step's parts, but not of its end.

    Args:
        state: What is updated.
        sampler: Gives the batch.
        loss_limit: A loss above it counts as divergence.
        requests: What this rank asks of all.
        refuse: Called before the step's values count; raises if they must not.
    """
    replicas, size = state.process_groups.data, state.spec.training.batch_size(state.step + 1)
    state.clock.begin()
    with record_function("data"):  # these are names for profiles
        sequences = sampler.sequences(*replica_share(state.samples, size, replicas.rank, replicas.size))
    state.clock.has_batch()
    state.inputs.write(sequences, loss_limit, (requests.halt, requests.store, requests.put_off))
    work = partial(_reduced, state, size)
    # A graph is of batches of one size: the last, that most steps have.
    values = state.graph.run(work) if size == state.spec.training.global_batch_size else work()
    with record_function("optimizer"):
        return _update(state, values, refuse)


def _reduced(state: TrainState, size: int) -> torch.Tensor:
    """All of a step's work that the host only queues, so that it can be captured; of ``state.inputs`` and the weights.

    Args:
        state: What is read, and where gradients are left.
        size: Sequences of the global batch.

    Returns:
        Loss and norm, then for divergence and for each notice the number of ranks that tell of it; one float64 each.
    """
    sequences = size // state.process_groups.data.size
    batch = Batch.of_tokens(state.inputs.token_bt[:sequences], state.end_of_document)
    # The mean over the global batch is the sum of the replicas' parts of it, and so are the gradients.
    weight_N = batch.counts / _tokens_of_all(state, batch, size)
    state.gradients.begin(sequences // state.spec.training.micro_batch_size)
    if state.pipeline is None:
        loss = _through_micro_batches(state, batch, weight_N)
    else:
        loss = state.pipeline.train(batch.tokens, batch.targets, weight_N, batch.documents)
    state.clock.enter(Part.OPTIMIZER)
    with record_function("optimizer"):
        return _reduce(state, loss)


def _tokens_of_all(state: TrainState, batch: Batch, size: int) -> float | torch.Tensor:
    """Tokens of the global batch of so many sequences whose losses count."""
    if batch.documents is None:
        return size * state.spec.training.sequence_length
    return state.process_groups.data.all_reduce_(batch.counts.double().sum(), "tokens")


def _through_micro_batches(state: TrainState, batch: Batch, weight_N: torch.Tensor) -> torch.Tensor:
    """Forward and backward of this replica's micro-batches, one by one; its part of the mean loss."""
    tokens = state.spec.training.micro_batch_size * state.spec.training.sequence_length
    loss = torch.zeros((), dtype=torch.float64, device=state.mesh.device)
    for micro_batch, weight_T in zip(batch.micro_batches(tokens), torch.split(weight_N, tokens), strict=True):
        state.clock.enter(Part.FORWARD)
        with record_function("forward"):
            part: torch.Tensor = (_losses(state, micro_batch) * weight_T).sum()
        state.clock.enter(Part.BACKWARD)
        with record_function("backward"):
            part.backward()  # type: ignore[no-untyped-call]
        loss += part.detach().double()
    return loss


def _reduce(state: TrainState, loss: torch.Tensor) -> torch.Tensor:
    """What the ranks have of the step, brought together; see ``_reduced``."""
    optimizer, groups = state.optimizer, state.process_groups
    state.gradients.finish()
    for along in (groups.pipeline, groups.data):
        along.all_reduce_(loss, "loss")
    for group in optimizer.groups:
        if group.kind.latent:
            # Each rank has a part of them, as of the latents' own. Once a step, whatever the number of tokens.
            groups.tensor.all_reduce_(group.own_gradient, "latent weights")
        if group.kind.tied:
            groups.embedding.all_reduce_(group.own_gradient, "tied embedding")
    jumps = ~(loss <= state.inputs.loss_limit)  # so does NaN
    norm, heard = global_norm(optimizer.groups, groups, (jumps, *state.inputs.notices))
    return torch.stack([loss, norm, *heard])


def _update(state: TrainState, values: torch.Tensor, refuse: Callable[[], None]) -> StepResult:
    """Update the weights with the gradients of the step, unless it has diverged."""
    spec = state.spec
    loss_value, norm_value, jumped, halt, store, put_off = state.clock.values(values)
    refuse()
    diverged = jumped > 0 or not math.isfinite(norm_value)
    state.step += 1
    state.samples += spec.training.batch_size(state.step)
    rate = learning_rate(state.step, spec.training.steps, spec.optimizer)
    if not diverged:
        state.optimizer.step(clip_factor(values[1], spec.optimizer.clip_norm), rate, state.step)
    return StepResult(loss_value, norm_value, rate, diverged, Requests(halt > 0, store > 0, put_off > 0))


def losses(state: TrainState, sequences: Sequences) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Loss of each token of ``[b, s + 1]`` sequences, ``[b·s]``, and whether it counts.

    The losses are ``None`` on pipeline ranks without the last stage.
    """
    batch = Batch.of(sequences, state.end_of_document, state.mesh.device)
    if state.pipeline is None:
        return _losses(state, batch), batch.counts
    return state.pipeline.losses(batch.tokens, batch.targets, batch.documents), batch.counts


def _losses(state: TrainState, batch: Batch) -> torch.Tensor:
    losses_T: torch.Tensor = state.model(
        batch.tokens, batch.targets, state.rotation.with_document_mask(batch.documents)
    )
    return losses_T
