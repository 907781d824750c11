"""One optimizer step: micro-batches forward and backward, gradients over replicas, clipping, update."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.profiler import record_function

from boost_core.config.training import OptimizerConfig
from boost_core.data.corpus import Sampler, Sequences, replica_share
from boost_core.optim.gradients import clip_factor, global_norm
from boost_core.parallel.communicator import Part
from boost_core.train.batch import Batch, LocalTokens, document_places, most_documents
from boost_core.train.state import Results, TrainState

# The learning rate: a linear warm-up to the peak, and then the job's schedule.
#
# ========  ==========================================================================================================
# cosine    half a cosine from the peak down to a share of it (SGDR, arXiv 1608.03983)
# linear    a straight line down to it
# constant  the peak, to the end
# wsd       warm-up, stable, decay: the peak, and a straight line down to the share in the last steps (MiniCPM, arXiv
#           2404.06395); what comes before the decay does not depend on the number of steps
# ========  ==========================================================================================================


def learning_rate(step: int, steps: int, optimizer: OptimizerConfig) -> float:
    """Return the learning rate of the optimizer step number ``step``, counted from 1 to ``steps``."""
    if step <= optimizer.warmup_steps:
        return optimizer.learning_rate * step / optimizer.warmup_steps
    # How much is left of the way from the peak, 1, to the share at which the schedule ends, 0.
    progress = (step - optimizer.warmup_steps) / (steps - optimizer.warmup_steps)
    if optimizer.schedule == "constant":
        height = 1.0
    elif optimizer.schedule == "wsd":
        height = min(1.0, (steps - step) / optimizer.steps_of_decay(steps))
    elif optimizer.schedule == "linear":
        height = 1 - progress
    else:
        height = 0.5 * (1 + math.cos(math.pi * progress))
    floor = optimizer.final_learning_rate_ratio
    return optimizer.learning_rate * (floor + (1 - floor) * height)


@dataclass(frozen=True)
class Requests:
    """What is asked of the loop after a step, the same on all ranks once they have exchanged it.

    Attributes:
        halt: To stop.
        store: To write a checkpoint before that.
        put_off: To take no copy of the state now, because the previous one is still waiting for a failing store.
    """

    halt: bool = False
    store: bool = False
    put_off: bool = False


@dataclass(frozen=True)
class StepResult:
    """Results of one step, the same on all ranks.

    Attributes:
        loss: Mean cross entropy of the global batch, in nats per token.
        gradient_norm: Global norm before clipping.
        learning_rate: As used by the update.
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
    refuse: Callable[[], None] = lambda: None, before_update: Callable[[], None] = lambda: None,
) -> StepResult:  # fmt: skip
    """Consume one global batch and update the weights; tells ``state.clock`` of the step's parts, but not of its end.

    Args:
        state: The state to update.
        sampler: Provides the batch.
        loss_limit: A loss above it counts as divergence.
        requests: What this rank asks of all.
        refuse: Called before the step's values are used; raises if they must not be.
        before_update: Called before any of the state is changed.
    """
    training, replicas = state.spec.training, state.process_groups.replicas
    size = training.batch_size(state.step + 1)
    state.clock.begin()
    with record_function("data"):  # such names are for profiles
        sequences = sampler.sequences(*replica_share(state.samples, size, replicas.rank, replicas.size))
        # This replica's part of the next batch, if it has to be known in advance; and whether it has too many documents
        # for a captured step.
        following: Sequences | None = None
        captured = state.end_of_document is not None and state.graph.obstacle is None
        if state.step + 2 <= training.steps and (captured or state.process_groups.context.size > 1):
            begin, count = state.samples + size, training.batch_size(state.step + 2)
            following = sampler.sequences(*replica_share(begin, count, replicas.rank, replicas.size))
        too_many = False
        if captured and following is not None:
            too_many = most_documents(following, state.end_of_document) > document_places(training.sequence_length)
    state.clock.has_batch()
    state.inputs.write(sequences, loss_limit, (requests.halt, requests.store, requests.put_off, too_many))

    # A graph is for batches of one size: the final one, which most steps have.
    documents, captures = most_documents(sequences, state.end_of_document), False
    if state.graph.obstacle is None and size == training.global_batch_size:
        captures = state.end_of_document is None or state.fits_captured_step == state.samples
        if not captures:
            # NCCL requires all ranks to replay or none; and next to a graph's memory is no room for as much again.
            state.graph.forget()
    if captures:
        places = document_places(training.sequence_length)
        values, clip = state.graph.run(partial(_reduced, state, size, places))
    else:
        values, clip = _reduced(state, size, documents)

    if following is not None:
        # A pipeline partitions all micro-batches before the first one enters.
        micro = training.micro_batch_size
        ahead = len(following) if state.pipeline is not None else micro
        state.partitioner.plan_ahead([following[begin : begin + micro] for begin in range(0, ahead, micro)])

    with record_function("optimizer"):  # the update, unless the step has diverged
        loss, norm, jumped, halt, store, put_off, too_many_next = state.clock.values(values)
        refuse()
        diverged = jumped > 0 or not math.isfinite(norm)
        state.step += 1
        state.samples += training.batch_size(state.step)
        state.fits_captured_step = None if too_many_next > 0 else state.samples
        rate = learning_rate(state.step, training.steps, state.spec.optimizer)
        if not diverged:
            before_update()
            state.optimizer.step(clip, rate, state.step)
        return StepResult(loss, norm, rate, diverged, Requests(halt > 0, store > 0, put_off > 0))


def _reduced(state: TrainState, size: int, documents: int) -> Results:
    """Do a step's work on ``state.inputs`` and the weights, all of which the host only enqueues, so it can be captured.

    Args:
        state: What is read, and where gradients are left.
        size: Sequences in the global batch.
        documents: Places for the documents of a sequence.

    Returns:
        Loss and norm, then the number of ranks that report divergence and each of the notices, one float64 each;
        and the factor that keeps the gradients' norm within its limit, one fp32 element.
    """
    sequences = size // state.process_groups.replicas.size
    batch = Batch.of_tokens(state.inputs.token_bt[:sequences], state.end_of_document, documents)
    # The mean over the global batch is the sum of the replicas' parts of it, and so are the gradients.
    tokens: float | torch.Tensor = size * state.spec.training.sequence_length
    if batch.starts is not None:  # those whose losses count
        tokens = state.process_groups.replicas.all_reduce_(batch.counts.double().sum(), "tokens")
    weight_N = batch.counts / tokens
    micro_batches = sequences // state.spec.training.micro_batch_size
    state.gradients.begin(micro_batches)
    state.partitioner.begin_step()
    parts = zip(batch.micro_batches(micro_batches), weight_N.chunk(micro_batches), strict=True)
    if state.pipeline is None:
        loss = torch.zeros((), dtype=torch.float64, device=state.mesh.device)  # this replica's part of the mean
        for number, (micro_batch, weight_T) in enumerate(parts):
            state.clock.enter(Part.FORWARD)
            with record_function("forward"):
                local = _local_tokens(state, micro_batch, number)
                part: torch.Tensor = (_losses(state, micro_batch, local) * local.of(weight_T)).sum()
            state.clock.enter(Part.BACKWARD)
            with record_function("backward"):
                part.backward()  # type: ignore[no-untyped-call]
            loss += part.detach().double()
            del part, local  # frees what the layers keep outside of autograd, before the next micro-batch needs room
    else:  # which has several micro-batches in flight
        mine = [(_local_tokens(state, each, number), each, weight_T) for number, (each, weight_T) in enumerate(parts)]
        token_N = torch.cat([local.of(each.tokens) for local, each, _ in mine])
        target_N = torch.cat([local.of(each.targets) for local, each, _ in mine])
        local_weight_N = torch.cat([local.of(weight_T) for local, _, weight_T in mine])
        loss = state.pipeline.train(token_N, target_N, local_weight_N, [local.rotation for local, _, _ in mine])
    state.clock.enter(Part.OPTIMIZER)
    with record_function("optimizer"):  # the ranks' parts of the step are combined
        optimizer, groups = state.optimizer, state.process_groups
        state.gradients.finish()
        for along in (groups.pipeline, groups.data):
            along.all_reduce_(loss, "loss")
        for group in optimizer.groups:
            if group.kind.latent:
                # Each rank has a part of them, as of the latents' gradients. Once a step, for any number of tokens.
                groups.tensor.all_reduce_(group.own_gradient, "latent weights")
            if group.kind.tied:
                groups.embedding.all_reduce_(group.own_gradient, "tied embedding")
        jumps = ~(loss <= state.inputs.loss_limit)  # true for NaN, too
        norm, notices = global_norm(optimizer.groups, groups, (jumps, *state.inputs.notices))
        return torch.stack([loss, norm, *notices]), clip_factor(norm, state.spec.optimizer.clip_norm)


def _local_tokens(state: TrainState, micro_batch: Batch, number: int) -> LocalTokens:
    """Return this rank's tokens of one of the step's micro-batches."""
    size = state.spec.training.micro_batch_size
    local = state.partitioner.partition(micro_batch, state.inputs.sequences[number * size : (number + 1) * size])
    state.partitioner.load += local.load
    return local


def losses(state: TrainState, sequences: Sequences) -> tuple[torch.Tensor | None, torch.Tensor]:
    """Return the loss of each token of ``[b, s + 1]`` sequences, ``[b·s]``, and whether it counts.

    The losses are ``None`` on pipeline ranks without the last stage.
    """
    batch = Batch.of(sequences, state.end_of_document, state.mesh.device)
    return forward(state, batch, sequences), batch.counts


def forward(state: TrainState, batch: Batch, sequences: Sequences) -> torch.Tensor | None:
    """Return the head's output for each token, ``[T]``, without a backward pass; ``None`` without the last stage.

    Args:
        state: The model.
        batch: The tokens.
        sequences: The same on the host, ``[b, s + 1]``.
    """
    local = state.partitioner.partition(batch, sequences)
    if state.pipeline is None:
        output_T: torch.Tensor | None = _losses(state, batch, local)
    else:
        output_T = state.pipeline.losses(local.of(batch.tokens), local.of(batch.targets), local.rotation)
    return None if output_T is None else local.among_all(output_T, len(batch.tokens), state.process_groups.context)


def _losses(state: TrainState, batch: Batch, local: LocalTokens) -> torch.Tensor:
    """Return the losses of this rank's tokens."""
    losses_T: torch.Tensor = state.model(local.of(batch.tokens), local.of(batch.targets), local.rotation)
    return losses_T
