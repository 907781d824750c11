"""The training loop: resume, step, evaluate, save, report."""

import logging
import math
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from boost_core import messages
from boost_core.architecture import FlopRates, parameter_count
from boost_core.checkpoint.folder import CheckpointFolder, Origin
from boost_core.checkpoint.shards import SaveFailed, in_words, of_all_ranks, on_first_rank
from boost_core.config import JobSpec, Layout
from boost_core.config.base import StoreUnusable
from boost_core.config.data_files import check_data
from boost_core.config.job import FaultToleranceConfig
from boost_core.config.model import SparseAttentionConfig
from boost_core.data.corpus import Corpus, EvaluationSet, Sampler, load_corpus, unigram_entropy
from boost_core.messages import Cause, ComparisonReport, Fault, FaultReport, Report, Reporter, Steer, ValidationLoss
from boost_core.parallel.shard import allocate_weights
from boost_core.plan.machine import NOMINAL, Basis
from boost_core.plan.memory import pipeline_rank_memory
from boost_core.plan.report import at, predicted_communication, step_parts, step_seconds
from boost_core.terminal import print_lines
from boost_core.train.checkpoint_manager import CheckpointManager, load_newest
from boost_core.train.profiling import PeakMemory, collected_between_steps
from boost_core.train.state import Membership, Outcome, StepTimes, TrainState, attention_backend
from boost_core.train.step import Prompts, Requests, StepResult, losses, training_step

# A run's actual cost compared with the plan: bytes of each rank, seconds of a step and of its exposed collectives.

WATCHED_STEPS = 2  # at the start of a run; later ones are timed
_FIRST_TIMED = 8  # steps before their median is first reported; then after twice as many, and so on
_MOST_TIMED = 100  # newest steps used for the median


class Comparison:
    """Compares a run with its plan. All ranks have one.

    Args:
        state: The training state.
        peak: The memory that this rank has used since it began to make the state.
        basis: What predicts its step times.

    Attributes:
        peak: As given.
        steps: Steps since the run began.
    """

    def __init__(self, state: TrainState, peak: PeakMemory, basis: Basis = NOMINAL) -> None:
        self._state, self.peak, self._basis = state, peak, basis
        self.steps = self._timed = 0
        self._next_report = _FIRST_TIMED  # timed steps
        self._times: deque[tuple[float, float]] = deque(maxlen=_MOST_TIMED)  # of steps, and of their communication
        self._planned_bytes, self._peak_bytes = list[int](), list[int]()

    def after_step(self, seconds: float, communication: float, refuse: Callable[[], None]) -> ComparisonReport | None:
        """Take note of a step; all ranks call it after the same one.

        Args:
            seconds: The step's duration.
            communication: Seconds of it that this rank waited for collectives.
            refuse: Called before values exchanged between ranks are used; raises if they must not be.

        Returns:
            The report, if one is due.
        """
        state, training = self._state, self._state.spec.training
        self.steps += 1
        if self.steps == WATCHED_STEPS:
            layout, groups = Layout.of(state.spec.parallelism), state.process_groups
            # No step has been captured yet, so the plan leaves out a graph's memory as well.
            spec = state.spec.model_copy(update={"training": training.model_copy(update={"cuda_graphs": "off"})})
            needed = pipeline_rank_memory(spec, layout, groups.pipeline.rank)
            # Without a GPU there is only one memory.
            planned = needed.total + (needed.host if state.mesh.device.type == "cpu" else 0)
            table = torch.zeros(2, groups.gang.size, dtype=torch.float64, device=state.mesh.device)
            table[:, groups.gang.rank] = torch.tensor([planned, self.peak.bytes()], dtype=torch.float64)
            rows = groups.gang.all_reduce_(table, "memory").tolist()
            refuse()
            self._planned_bytes, self._peak_bytes = (list(map(int, row)) for row in rows)
            return self._report()
        if self.steps < WATCHED_STEPS or training.batch_size(state.step) < training.global_batch_size:
            return None
        self._times.append((seconds, communication))
        self._timed += 1
        return self._report() if self._timed == self._next_report else None

    def _report(self) -> ComparisonReport:
        self._next_report = max(_FIRST_TIMED, 2 * self._timed)
        spec, layout = self._state.spec, Layout.of(self._state.spec.parallelism)
        machine = self._basis.machine(spec)
        job = at(spec, layout, machine)
        if (loro := job.optimizer.loro) is not None and loro.exact_every_steps > 2:  # the median is of a lazy step
            job = job.model_copy(update={"optimizer": job.optimizer.model_copy(update={"loro": None})})
        predicted, communication = step_parts(job, layout, machine), predicted_communication(job, layout, machine)
        factor = machine.correction(job).factors.communication
        medians = [statistics.median(each) for each in zip(*self._times, strict=True)] or [None, None]
        return ComparisonReport(
            **layout.sizes,
            step=self._state.step,
            planned_bytes=self._planned_bytes,
            peak_bytes=self._peak_bytes,
            predicted_step_seconds=predicted.total,
            predicted_step_seconds_range=machine.range_of(job, predicted.total, predicted.communication),
            provenance=machine.provenance,
            correction=predicted.total / step_seconds(job, layout, replace(machine, fitted=None)),
            predicted_exposed_communication_seconds=factor * communication.seconds,
            communication_correction=factor,
            communication_share=communication.share,
            step_seconds=medians[0],
            exposed_communication_seconds=medians[1],
        )


# Detects that training diverges, and limits how often it may.

RECENT_STEPS = 32
WINDOW_STEPS = 100


class DivergenceDetector:
    """Tracks recent losses. Ranks given the same losses decide the same.

    Args:
        config: The jump that counts as divergence, and how many divergences are too many.
    """

    def __init__(self, config: FaultToleranceConfig) -> None:
        self._config = config
        self._recent: deque[float] = deque(maxlen=RECENT_STEPS)
        self._divergences: deque[int] = deque(maxlen=config.max_divergences)

    @property
    def limit(self) -> float:
        """The loss above which the next step has diverged; unlimited until the window is full."""
        if self._config.loss_jump is None or len(self._recent) < RECENT_STEPS:
            return sys.float_info.max
        return statistics.median(self._recent) + self._config.loss_jump

    def update(self, loss: float) -> None:
        """Record the loss of a step that did not diverge."""
        self._recent.append(loss)

    def too_many(self, step: int) -> bool:
        """Record a divergence, and return whether there have been too many recently."""
        self._divergences.append(step)
        return len(self._divergences) == self._config.max_divergences and step - self._divergences[0] < WINDOW_STEPS


# Validation loss.


@torch.no_grad()
def evaluate(state: TrainState, on: EvaluationSet, refuse_aborted: Callable[[], None] = lambda: None) -> ValidationLoss:
    """Compute the loss on a set. All ranks call it and get the same result.

    The sum over tokens is divided by their number, so that a smaller last batch, which is padded, has its own weight.

    Args:
        state: The model.
        on: The set.
        refuse_aborted: Called before each batch, and once the sums are there, before they are used.
    """
    replicas = state.process_groups.replicas
    sums = torch.zeros(2, dtype=torch.float64, device=state.mesh.device)
    # No replica's part has more: batches of one size, without padding a small set to a whole micro-batch.
    size = min(state.spec.training.micro_batch_size, max(1, -(-len(on.windows) // replicas.size)))
    for sequences in on.batches(size, replicas.rank, replicas.size):
        refuse_aborted()
        # A smaller batch would have kernels and plans of its own made (cuDNN's, Triton's) and be waited for.
        missing = size - len(sequences)
        losses_T, counts_T = losses(state, np.concatenate([sequences, np.repeat(sequences[:1], missing, axis=0)]))
        if losses_T is not None:
            own = slice(len(sequences) * on.sequence_length)
            losses_T, counts_T = losses_T[own], counts_T[own]
            sums += torch.stack([(losses_T * counts_T).double().sum(), counts_T.double().sum()])
    for along in (state.process_groups.pipeline, replicas):
        along.all_reduce_(sums, "evaluation")
    loss_sum, tokens = sums.tolist()
    refuse_aborted()
    loss, each = loss_sum / tokens, on.bytes_per_token
    bits = None if each is None else loss / math.log(2) / each
    return ValidationLoss(loss=loss, tokens=int(tokens), bits_per_byte=bits)


# Detects that sparse attention loses more than a job allows.


@dataclass(eq=False)
class RecallWatch:
    """Tracks the recall of recent steps, and warns once when their mean falls below the target.

    Attributes:
        config: The target; ``None`` where attention is dense.
    """

    config: SparseAttentionConfig | None
    _recent: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT_STEPS))
    _is_low: bool = False

    def update(self, recall: float | None) -> str | None:
        """Record a step's recall, and return a warning if one is due."""
        if self.config is None or recall is None:
            return None
        self._recent.append(recall)
        if len(self._recent) < RECENT_STEPS:
            return None
        mean, target = statistics.fmean(self._recent), self.config.recall
        was_low, self._is_low = self._is_low, mean < target
        if was_low or not self._is_low:
            return None
        return (
            f"sparse attention kept {mean:.1%} of dense attention in the last {RECENT_STEPS} steps, below "
            f"training.attention.recall={target:g}; raise budget, or train densely until attention is sharper"
        )


logger = logging.getLogger(__name__)


def train(spec: JobSpec, reporter: Reporter, membership: Membership | None = None, basis: Basis = NOMINAL) -> Outcome:
    """Run a job to its last step, on this rank. All ranks call it, with a process group initialised.

    It continues from the state in memory that it is given. Otherwise it resumes from the newest committed checkpoint of
    ``spec.checkpoint.url``. A job without one starts from its origin (``boost_core.checkpoint.folder.Origin``), or from
    scratch. It has finished when the store has the job's last checkpoint and has returned it. Only rank 0 reports.

    Args:
        spec: The job; ``checkpoint.url`` is set.
        reporter: Receives the reports.
        membership: This rank's place in an elastic gang; ``None`` without one.
        basis: What predicts the steps' times.

    Raises:
        ValueError: The job does not fit the gang, its data or its checkpoint.
        FloatingPointError: The training diverges, and the job does not allow it to continue.
        StateLost: The state in memory is not available, for example because one of its owners has gone.
        LastSaveFailed: The store has not accepted the last checkpoint within the time the job allows.
    """
    if spec.checkpoint.url is None:
        raise ValueError("checkpoint.url is not set; give a folder for the checkpoints")
    membership = membership or Membership()
    device, reporter_of_rank = torch.device("cpu"), reporter if dist.get_rank() == 0 else None
    if spec.resources.gpus_per_worker:
        if not torch.cuda.is_available():
            raise ValueError("resources.gpus_per_worker is 1, but this worker sees no GPU; set it to 0 to train on CPU")
        device = torch.device("cuda", torch.cuda.current_device())
    memory = membership.recovery
    if memory is not None and memory.step >= spec.training.steps:
        complete = _StateKeeper(TrainState.initial(spec, device, allocate_weights), membership, reporter_of_rank)
        try:
            complete.resume()
            return Outcome.FINISHED if complete.checkpoints.finish() else complete.halt(store=False)
        finally:
            complete.checkpoints.saver.make_way()
    length = spec.training.sequence_length
    check = partial(check_data, spec.data, spec.model.vocab_size, length, new=False)
    indices = on_first_rank(check, failure=OSError, as_they_are=(ValueError, StoreUnusable))
    prompts = Prompts(spec)  # refused before the text is tokenized, which may take long
    corpus = load_corpus(spec.data, length, indices)
    tokens = of_all_ranks([[(len(stream.training), len(stream.validation)) for stream in corpus.streams]])
    if (other := next((rank for rank, each in enumerate(tokens) if each != tokens[0]), None)) is not None:
        raise ValueError(
            f"data: rank {other} has {tokens[other]} tokens to train on and to validate on, and rank 0 {tokens[0]}; "
            "give all nodes the same files, and do not change them while a job trains"
        )
    peak = PeakMemory(device)
    with peak.watched:
        state = TrainState.initial(spec, device, allocate_weights, corpus.end_of_document)
    run = _Run(state, corpus, membership, reporter_of_rank, Comparison(state, peak, basis), prompts)
    try:
        run.resume()
        if state.step == 0 and spec.training.evaluate_at_start:
            run.evaluate()
        with collected_between_steps() as collect_garbage:
            while state.step < state.spec.training.steps:
                before = state.step
                requests = run.step()
                collect_garbage(state.step)
                ahead, last = state.step > before, state.step == state.spec.training.steps
                every = state.spec.at_step(state.step).training.evaluate_every_steps
                if ahead and (last or state.step % every == 0):
                    run.evaluate()
                if ahead:
                    run.sample()
                if requests.halt and not last:
                    return run.halt(requests.store)
                if ahead:  # else it has rolled back to a state of which there is a copy
                    run.checkpoints.after_step(requests.put_off)
                    if requests.steer:
                        run.steer()
        return Outcome.FINISHED if run.checkpoints.finish() else run.halt(store=False)
    finally:
        state.graph.release("training has ended")  # before the communicators that it captured are destroyed
        run.checkpoints.saver.make_way()


class _StateKeeper:
    """One rank's part of a job's state, until the store has it. Needs no data."""

    def __init__(self, state: TrainState, membership: Membership, reporter: Reporter | None) -> None:
        self._state, self._membership, self._reporter = state, membership, reporter
        self._report: Callable[[Report], object] = reporter.report if reporter else lambda _: None
        url = state.spec.checkpoint.url
        assert url is not None
        self._folder = CheckpointFolder(url)
        self.checkpoints = CheckpointManager(state, self._folder, membership, reporter)

    def resume(self) -> None:
        """Load the state to continue from, if any, and report where training starts.

        Raises:
            ValueError: It is past the job's last step.
        """
        state, memory, started = self._state, self._membership.recovery, time.perf_counter()
        known = len(state.spec.steered)
        source: str | None = None
        stored_step: int | None = 0  # the job's newest checkpoint, 0 for none; ``None`` if unknown
        if memory is not None:
            state.load_from_memory(memory, self._membership.fetch)
            source, stored_step = "memory", None
        else:
            folder = self._folder
            step = load_newest(partial(state.load, folder), folder)
            if step is not None and state.step > (steps := state.spec.training.steps):
                raise ValueError(
                    f"the checkpoint at {folder.step_url(step)} is past training.steps={steps}; set training.steps to "
                    f"{step} or more, or use another checkpoint folder"
                )
            origin = Origin.of(state.spec.checkpoint) if step is None else None
            if origin is not None:
                folder = origin.folder
                step = load_newest(partial(state.load, folder, origin=origin), folder, origin.step)
                if step is None:
                    raise origin.absent()
            if step is None:
                state.draw()
            else:
                # Another job's checkpoint counts until this job's first is due.
                source, stored_step = folder.step_url(step), state.step
                logger.info("training starts from %s", source)
        start = messages.StartReport(
            step=state.step,
            world_size=state.spec.parallelism.world_size,
            parameters=parameter_count(state.spec.model),
            load_seconds=time.perf_counter() - started,
            resumed_from=source,
            attention=attention_backend(state.spec, state.mesh.device),
        )
        self._report(start)
        spec = state.spec
        self.checkpoints.steer(spec)
        for number, stage in enumerate(spec.steered[known:], known + 1):
            after = spec.steered[number] if number < len(spec.steered) else spec.steering
            steered = messages.SteeredReport(
                number=number,
                step=stage.until_step,
                by=stage.changed_by,
                requested_at=stage.requested_at,
                changes=stage.changes_to(after),
                steering=spec.with_steering(after).steering,
            )
            self._report(steered)
        self.checkpoints.after_resuming(stored_step)

    def halt(self, store: bool) -> Outcome:
        """Leave the state for the next gang."""
        try:
            self.checkpoints.keep(store)
        except SaveFailed as failure:
            logger.warning("the gang stops without a checkpoint: %s", failure)
            return Outcome.HALTED
        return Outcome.STORED if store else Outcome.HALTED


class _Run(_StateKeeper):
    """One rank's run of a job: the state and what happens to it between steps."""

    def __init__(
        self, state: TrainState, corpus: Corpus, membership: Membership, reporter: Reporter | None,
        comparison: Comparison, prompts: Prompts,
    ) -> None:  # fmt: skip
        super().__init__(state, membership, reporter)
        self._comparison, self._prompts = comparison, prompts
        training = state.spec.training
        self._corpus, self._sampler = corpus, Sampler(corpus, training.sequence_length, training.seed)
        length, most = training.sequence_length, training.evaluate_sequences
        self._validation = EvaluationSet.of([(each.validation, each.weight) for each in corpus.streams], length, most)
        self._named = {name: EvaluationSet.of([(each, 1.0)], length, most) for name, each in corpus.validation.items()}
        self._unigram_entropy: float | None = None  # of the corpus, once there is an evaluation to report
        self._divergence = DivergenceDetector(state.spec.fault_tolerance)
        self._recall = RecallWatch(training.attention)
        self._ended: float | None = None  # when the previous step ended
        device = state.mesh.device
        device_name = torch.cuda.get_device_name(device) if device.type == "cuda" else device.type
        self._flops = FlopRates.of(state.spec, device_name)

    def resume(self) -> None:
        """Load the state to continue from, and make the changes that all ranks have been given; all ranks call it.

        A checkpoint that knows of a change of the prompts brings its own.
        """
        before = self._state.spec.training.sample
        super().resume()
        if self._state.spec.training.sample != before:
            self._prompts = Prompts(self._state.spec)
        group, device = self._state.process_groups.gang, self._state.mesh.device
        while True:
            has_next = torch.tensor(float(self._next_steer(self._state.step) is not None), device=device)
            agreed = group.all_reduce_(has_next, "steering").item() == group.size
            self._membership.refuse_aborted()
            if not agreed:
                return
            self.steer()

    def step(self) -> Requests:
        """Run one optimizer step and report it.

        Returns:
            What any rank has asked of all ranks.

        Raises:
            FloatingPointError: The training diverges, and the job does not allow it to continue.
        """
        put_off = self.checkpoints.before_step()
        state = self._state
        before, started = state.step, time.perf_counter()
        state.ledger.clear()
        halt, store = self._membership.halt.is_set(), self._membership.store.is_set()
        requests = Requests(halt, store, put_off, self._next_steer(before + 1) is not None)
        refuse, before_update = self._membership.refuse_aborted, self.checkpoints.copies.before_update
        comparison = self._comparison
        with comparison.peak.watched if comparison.steps < WATCHED_STEPS else nullcontext():
            result = training_step(state, self._sampler, self._divergence.limit, requests, refuse, before_update)
        parts = state.clock.end()
        communication = state.ledger.by_group()  # before the comparison, whose own communication is no part of the step
        if result.diverged:
            self._diverged(result)
        else:
            self._divergence.update(result.loss)
        if state.step > before:
            held_seconds, self.checkpoints.held_seconds = self.checkpoints.held_seconds, 0.0
            if self._reporter is not None:
                training = state.spec.training
                recall = state.partitioner.tally.recall
                sent, seconds = state.ledger.sum(), parts.seconds
                size = training.batch_size(state.step)
                left = training.samples(training.steps) - training.samples(state.step)
                tokens_per_second = size * training.sequence_length / seconds
                report = messages.StepReport(
                    step=state.step,
                    steps=training.steps,
                    loss=result.loss,
                    learning_rate=result.learning_rate,
                    gradient_norm=result.gradient_norm,
                    tokens=state.samples * training.sequence_length,
                    tokens_per_second=tokens_per_second,
                    step_seconds=seconds,
                    communication_seconds=sent.seconds,
                    exposed_communication_seconds=parts.exposed_communication,
                    communication_bytes=sent.bytes,
                    model_flops_per_second=tokens_per_second * self._flops.model,
                    model_flops_utilization=self._flops.utilization(tokens_per_second, self._flops.model),
                    hardware_flops_utilization=self._flops.utilization(tokens_per_second, self._flops.hardware),
                    eta_seconds=left / size * seconds,
                    data_seconds=parts.data,
                    forward_seconds=parts.forward,
                    backward_seconds=parts.backward,
                    optimizer_seconds=parts.optimizer,
                    context_imbalance=state.partitioner.load.imbalance,
                    attention_recall=recall,
                    attention_density=state.partitioner.tally.density,
                    held_seconds=held_seconds,
                )
                self._report(report)
                if (lost := self._recall.update(recall)) is not None:
                    self._report(FaultReport(what=Fault.RECALL, step=state.step, message=lost))
        if (failure := state.graph.failure()) is not None:
            self._report(FaultReport(what=Fault.CUDA_GRAPHS, step=state.step, message=failure))
        if state.step > before:
            # No plan knows how long data takes.
            compared = comparison.after_step(parts.seconds - parts.data, parts.exposed_communication, refuse)
            if compared is not None:
                self._report(compared)
        # From step to step, so that whatever holds a rank up between them counts, too.
        ended, since = time.perf_counter(), self._ended or started
        busy = ended - since - parts.exposed_communication
        self._membership.after_step(StepTimes(state.step, ended - since, busy, parts, communication))
        self._ended = ended
        return result.requests

    def _diverged(self, result: StepResult) -> None:
        """Handle a diverged step as the job specifies; its update has already been skipped."""
        state, policy = self._state, self._state.spec.fault_tolerance
        what = f"the loss of step {state.step} is {result.loss:g}, and the gradient norm {result.gradient_norm:g}"
        remedy = "lower optimizer.learning_rate, lengthen optimizer.warmup_steps, or train in fp32"
        if policy.on_divergence == "stop":
            raise FloatingPointError(f"{what}; {remedy}")
        if self._divergence.too_many(state.step):
            raise FloatingPointError(f"{what}, the last of {policy.max_divergences} divergences; {remedy}")
        if policy.on_divergence == "skip":
            self._report(FaultReport(what=Fault.DIVERGENCE, step=state.step, message=f"{what}; its update was skipped"))
            return

        started, step = time.perf_counter(), state.step
        self._report(messages.InterruptionReport(cause=Cause.DIVERGENCE, message=what, step=step))
        source = self.checkpoints.roll_back()
        if source is None:
            raise FloatingPointError(f"{what}, and there is no copy of the state to go back to")
        seconds = time.perf_counter() - started
        message = f"{what}; rolled back to step {state.step}, skipping the batches since"
        self._report(FaultReport(what=Fault.DIVERGENCE, step=step, message=message))
        report = messages.RestartReport(
            cause=Cause.DIVERGENCE, message=message, step=step, resumed_step=state.step,
            recovered_from="memory" if source == "memory" else "storage",
            seconds=seconds, waiting_seconds=0.0, parts={"load": seconds},
        )  # fmt: skip
        self._report(report)

    def evaluate(self) -> None:
        """Evaluate on validation text and report the result."""
        started = time.perf_counter()
        result = evaluate(self._state, self._validation, self._go_on)
        of_sets = {name: evaluate(self._state, on, self._go_on) for name, on in self._named.items()}
        sets = tuple(messages.NamedLoss(name=name, **loss.model_dump()) for name, loss in of_sets.items())
        self._membership.refuse_aborted()
        if self._reporter:
            if self._unigram_entropy is None:
                self._unigram_entropy = unigram_entropy(self._corpus)
            step, entropy, seconds = self._state.step, self._unigram_entropy, time.perf_counter() - started
            report = messages.EvaluationReport(
                **result.model_dump(), step=step, unigram_entropy=entropy, sets=sets, seconds=seconds
            )
            self._report(report)

    def _next_steer(self, step: int) -> Steer | None:
        """The change to make after a step, if this rank has it.

        None before the step after which the last one was, and none after the job's last step unless it is given more.
        """
        steered, steers, steps = self._state.spec.steered, self._membership.steers, self._state.spec.training.steps
        if steered and step < steered[-1].until_step:
            return None
        made = len(steered)
        most = max((each.steering.training.steps for number, each in list(steers.items()) if number > made), default=0)
        return None if step >= steps >= most else steers.get(made + 1)

    def steer(self) -> None:
        """Make the next change, which all ranks have: its values hold from the next step on."""
        state = self._state
        steer, before = self._membership.steers[len(state.spec.steered) + 1], state.spec
        sample, prompts = steer.steering.training.sample, None
        if sample != before.training.sample:
            # Only ranks can count a prompt's tokens. One that does not fit, or a tokenizer that one of them cannot
            # read, must not end the job.
            wanted, _ = steer.made(before, state.step)
            prompts, problem = _prompts_or_problem(wanted)
            if problems := of_all_ranks([problem] if problem else []):
                prompts = None
                logger.warning("the prompts to sample stay as they are: %s", problems[0])
                training = steer.steering.training.model_copy(update={"sample": before.training.sample})
                steer = steer.model_copy(update={"steering": steer.steering.model_copy(update={"training": training})})
        if state.step == before.training.steps:
            state.fits_captured_step = None  # nobody has looked at what follows the last step
        state.spec, report = steer.made(before, state.step)
        if state.spec.training.sample != before.training.sample:
            self._prompts = prompts or Prompts(state.spec)
        self.checkpoints.steer(state.spec)
        self._report(report)

    def sample(self) -> None:
        """Generate text from the job's prompts, if due, and report it."""
        step, started = self._state.step, time.perf_counter()
        if samples := self._prompts.take(self._state, self._go_on):
            self._report(messages.SampleReport(step=step, samples=samples, seconds=time.perf_counter() - started))

    def _go_on(self) -> None:
        """Refuse aborted collectives, and say that what takes long, an evaluation or samples, goes on."""
        self._membership.refuse_aborted()
        if self._reporter:
            self._membership.goes_on("")


def _prompts_or_problem(spec: JobSpec) -> tuple[Prompts | None, str | None]:
    """A job's prompts, or why this rank cannot continue them."""
    try:
        return Prompts(spec), None
    except Exception as error:  # stores raise types of their own, and the other ranks wait for this one's answer
        return None, str(error) if isinstance(error, ValueError) else in_words(error)


@dataclass(frozen=True)
class ConsoleReporter:
    """Prints one line per report: the reporter of a trainer that runs without the service.

    Attributes:
        path: A file to append every report to as well, one JSON object per line.
    """

    path: Path | None

    def report(self, report: Report) -> None:
        """Print a report."""
        print_lines(messages.line_of(report))
        if self.path:
            with self.path.open("a", encoding="utf-8") as stream:
                stream.write(report.model_dump_json() + "\n")
