"""One optimizer step: micro-batches forward and backward, gradients over replicas, clipping, update."""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import astuple, dataclass
from functools import partial

import tokenizers
import torch
from torch.profiler import record_function

from boost_core.config import JobSpec
from boost_core.config.job import too_long_a_prompt
from boost_core.data.corpus import Sampler, Sequences, replica_share
from boost_core.data.tokenizers import job_tokenizer
from boost_core.messages import Sample
from boost_core.optim.clipping import clip_factor, global_norm
from boost_core.optim.schedule import learning_rate
from boost_core.parallel.communicator import Part
from boost_core.train.batch import Batch, LocalTokens, most_documents
from boost_core.train.state import TrainState
from boost_core.train.step_graph import Results

# A captured step has room for documents of this mean length in tokens. Each place costs attention's kernels a launch of
# empty blocks, whether it is taken or not.
_MEAN_DOCUMENT, _FEWEST_PLACES = 128, 16


@dataclass(frozen=True)
class Requests:
    """What is asked of the loop after a step, the same on all ranks once they have exchanged it.

    Attributes:
        halt: To stop.
        store: To write a checkpoint before that.
        put_off: To take no copy of the state now, because the previous one is still waiting for a failing store.
        steer: To make the next change of values, which all ranks have.
    """

    halt: bool = False
    store: bool = False
    put_off: bool = False
    steer: bool = False


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
    places = max(training.sequence_length // _MEAN_DOCUMENT, _FEWEST_PLACES)  # for a sequence's documents, if captured
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
        too_many = captured and following is not None and most_documents(following, state.end_of_document) > places
    state.clock.has_batch()
    state.inputs.write(sequences, loss_limit, (*astuple(requests), too_many))

    # A graph is for batches of one size: the final one, which most steps have.
    for_graph = state.graph.obstacle is None and size == training.global_batch_size
    if for_graph and (state.end_of_document is None or state.fits_captured_step == state.samples):
        values, clip = state.graph.run(partial(_reduced, state, size, places))
    else:
        if for_graph:
            # NCCL requires all ranks to replay or none; and there is no room for a step's memory twice.
            state.graph.forget()
        values, clip = _reduced(state, size, most_documents(sequences, state.end_of_document))

    if following is not None:
        # A pipeline partitions all micro-batches before the first one enters.
        micro = training.micro_batch_size
        ahead = len(following) if state.pipeline is not None else micro
        state.partitioner.plan_ahead([following[begin : begin + micro] for begin in range(0, ahead, micro)])

    with record_function("optimizer"):  # the update, unless the step has diverged
        loss, norm, jumped, halt, store, put_off, steer, too_many_next = state.clock.values(values)
        refuse()
        diverged = jumped > 0 or not math.isfinite(norm)
        state.step += 1
        state.samples += training.batch_size(state.step)
        state.fits_captured_step = None if too_many_next > 0 else state.samples
        present = state.spec.at_step(state.step)
        rate = learning_rate(state.step, present.training.steps, present.optimizer)
        before_update()
        if diverged:
            state.optimizer.skip(state.step)
        else:
            state.optimizer.step(clip, rate, state.step)
        agreed = Requests(halt > 0, store > 0, put_off > 0, steer == state.process_groups.gang.size)
        return StepResult(loss, norm, rate, diverged, agreed)


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
                part: torch.Tensor = (
                    state.model(local.of(micro_batch.tokens), local.of(micro_batch.targets), local.rotation)
                    * local.of(weight_T)
                ).sum()
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
        del mine, token_N, target_N, local_weight_N  # which the collectives below have no use for
    state.clock.enter(Part.OPTIMIZER)
    with record_function("optimizer"):  # the ranks' parts of the step are combined
        optimizer, groups = state.optimizer, state.process_groups
        state.gradients.finish()
        for along in (groups.pipeline, groups.data):
            along.all_reduce_(loss, "loss")
        for group in optimizer.groups:
            if group.kind.partial:
                # Each rank has a part of them, as of the latents' gradients. Once a step, for any number of tokens.
                groups.tensor.all_reduce_(group.own_gradient, "partial gradients")
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

    There is no backward pass. If the model ``predicts``, the likeliest tokens take the place of losses, which are
    ``None`` on pipeline ranks without the last stage.
    """
    batch = Batch.of(sequences, state.end_of_document, state.mesh.device)
    local = state.partitioner.partition(batch, sequences)
    inputs = local.of(batch.tokens), local.of(batch.targets), local.rotation
    output_T: torch.Tensor | None = (state.pipeline.losses if state.pipeline else state.model)(*inputs)
    if output_T is not None and local.places is not None:
        every_T = output_T.new_zeros(len(batch.tokens))
        every_T[local.places] = output_T
        output_T = state.process_groups.context.all_reduce_(every_T, "tokens of all")
    return output_T, batch.counts


# Text that a model generates while it trains: greedy continuations of some prompts.
#
# Each token takes a forward pass over whole sequences, as in evaluation, so that it works in every layout: there is no
# cache of keys and values. Nothing is drawn at random, and no state changes.
#
# Shape suffixes: b prompts, t = s + 1 tokens of each.

_LONGEST = 2000  # characters kept of a text


class Prompts:
    """A job's prompts as tokens, and its tokenizer.

    Args:
        spec: The job.

    Raises:
        ValueError: A prompt is too long, or the job's tokenizer cannot be read.
    """

    def __init__(self, spec: JobSpec) -> None:
        config = spec.training.sample
        if config is None:
            return
        try:
            tokenizer = job_tokenizer(spec.data, spec.model)
        except OSError as error:
            raise ValueError(f"training.sample needs the job's tokenizer: {error}; or leave sample out") from error
        self._end, self._tokenizer = tokenizer.end_of_document, tokenizers.Tokenizer.from_str(tokenizer.content)
        encode = self._tokenizer.encode
        self._tokens = [encode(prompt, add_special_tokens=False).ids or [self._end] for prompt in config.prompts]
        room = spec.training.sequence_length - config.max_new_tokens
        for number, tokens in enumerate(self._tokens):
            if len(tokens) > room:
                raise ValueError(f"training.sample: {too_long_a_prompt(number, len(tokens), room)}")

    def take(self, state: TrainState, refuse_aborted: Callable[[], None]) -> tuple[Sample, ...]:
        """Continue each prompt if that is due after the step just done. All ranks call it and get the same.

        Arguments are as for ``continued``.
        """
        training, config = state.spec.training, state.spec.training.sample
        if config is None or (state.step % config.every_steps and state.step != training.steps):
            return ()
        size = training.micro_batch_size  # as in evaluation, so it fits into memory
        generated: list[list[int]] = []
        for begin in range(0, len(self._tokens), size):
            batch = self._tokens[begin : begin + size]
            generated += continued(state, batch, config.max_new_tokens, self._end, refuse_aborted)
        samples = []
        for prompt, tokens in zip(config.prompts, generated, strict=True):
            known = [token for token in tokens if self._tokenizer.id_to_token(token) is not None]
            text: str = self._tokenizer.decode(known, skip_special_tokens=False)
            # Databases do not accept NUL.
            samples.append(Sample(prompt=prompt, text=text[:_LONGEST].replace("\0", "\ufffd")))
        return tuple(samples)


@torch.no_grad()
def continued(
    state: TrainState, prompts: Sequence[Sequence[int]], new_tokens: int, end: int,
    refuse_aborted: Callable[[], None] = lambda: None,
) -> Iterator[list[int]]:  # fmt: skip
    """Yield the most likely tokens after each prompt, up to but excluding the end of the document.

    Args:
        state: The model; all ranks of a replica take part.
        prompts: Tokens of each; none empty, and each short enough for the new ones to fit into a sequence.
        new_tokens: Maximum number of new tokens.
        end: The token that ends a document.
        refuse_aborted: Called once a token is there, before the next is made from it.
    """
    length, pipeline = state.spec.training.sequence_length, state.process_groups.pipeline
    token_bt = torch.full((len(prompts), length + 1), int(end == 0))  # padding that is not the end of a document
    for row, prompt in enumerate(prompts):
        token_bt[row, : len(prompt)] = torch.tensor(prompt)
    token_bt = token_bt.to(state.mesh.device)
    rows = torch.arange(len(prompts), device=state.mesh.device)
    last_b = torch.tensor([len(prompt) - 1 for prompt in prompts], device=state.mesh.device)
    ended_b = torch.zeros_like(last_b, dtype=torch.bool)
    for _ in range(new_tokens):
        state.model.predicts = True
        try:
            likeliest_T, _ = losses(state, token_bt.numpy(force=True))
        finally:
            state.model.predicts = False
        # Ranks without the head get the tokens from the one that has it.
        next_b = torch.zeros_like(last_b) if likeliest_T is None else likeliest_T.view(-1, length)[rows, last_b]
        pipeline.all_reduce_(next_b, "samples")
        last_b += 1
        token_bt[rows, last_b] = next_b
        ended_b |= next_b == end
        ended = bool(ended_b.all())
        refuse_aborted()
        if ended:
            break
    for row, prompt in enumerate(prompts):
        new = token_bt[row, len(prompt) : int(last_b[row]) + 1].tolist()
        yield new[: new.index(end)] if end in new else new
