"""The training loop: resume, step, evaluate, save, report."""

import logging
import math
import time
from functools import cached_property

import torch
import torch.distributed as dist

from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.checkpoint.saver import Saver
from boost_core.checkpoint.shards import SaveFailed
from boost_core.config import JobSpec
from boost_core.config.reports import CheckpointReport, EvaluationReport, Reporter, StartReport, StepReport
from boost_core.config.sources import check_data
from boost_core.data.corpus import Corpus, load_corpus, unigram_entropy
from boost_core.data.sampler import Sampler
from boost_core.plan.flops import model_flops_per_token
from boost_core.plan.parameters import parameter_count
from boost_core.train.evaluate import evaluate
from boost_core.train.state import TrainState
from boost_core.train.step import training_step

logger = logging.getLogger(__name__)


def train(spec: JobSpec, reporter: Reporter) -> None:
    """Run a job to its last step, on this rank. All ranks call it, with a process group initialised.

    It continues from the newest committed checkpoint of ``spec.checkpoint.url``; if there is none, from that
    of ``spec.checkpoint.resume_from``; else from scratch. Reports come from rank 0 alone.

    Args:
        spec: The job; ``checkpoint.url`` is set.
        reporter: Takes the reports.

    Raises:
        ValueError: The job does not fit the gang, its data or its checkpoint.
        FloatingPointError: The loss is not finite.
    """
    if spec.checkpoint.url is None:
        raise ValueError("checkpoint.url is not set; give a folder for the checkpoints")
    device = _device(spec)
    check_data(spec.data, spec.model.vocab_size, spec.training.sequence_length)
    corpus = load_corpus(spec.data, spec.training.sequence_length)
    state = TrainState.initial(spec, device, end_of_document=corpus.end_of_document)
    run = _Run(state, corpus, CheckpointFolder(spec.checkpoint.url), reporter if dist.get_rank() == 0 else None)
    run.resume()
    while state.step < spec.training.steps:
        run.step()
        last = state.step == spec.training.steps
        if last or state.step % spec.training.evaluate_every_steps == 0:
            run.evaluate()
        if last or state.step % spec.checkpoint.every_steps == 0:
            run.save()
    run.collect(wait=True)


def _device(spec: JobSpec) -> torch.device:
    if spec.resources.gpus_per_worker == 0:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError("resources.gpus_per_worker is 1, but this worker sees no GPU; set it to 0 to train on CPU")
    return torch.device("cuda", torch.cuda.current_device())


class _Run:
    """One rank's run of a job: the state and what is done with it between steps."""

    def __init__(self, state: TrainState, corpus: Corpus, folder: CheckpointFolder, reporter: Reporter | None) -> None:
        self._state, self._corpus, self._folder, self._reporter = state, corpus, folder, reporter
        training = state.spec.training
        self._sampler = Sampler(corpus, training.sequence_length, training.seed)
        self._saver, self._held_seconds = Saver(folder, state.spec.checkpoint), 0.0
        self._flops_per_token = model_flops_per_token(state.spec.model, training.sequence_length)

    def resume(self) -> None:
        """Load the newest checkpoint there is to continue from, and say where training starts."""
        source = self._newest_checkpoint()
        if source is not None:
            folder, step = source
            self._state.load(folder, step)
            logger.info("resumed from %s", folder.step_url(step))
        if self._reporter:
            self._reporter.report(
                StartReport(
                    step=self._state.step,
                    world_size=self._state.spec.parallelism.world_size,
                    parameters=parameter_count(self._state.spec.model),
                    resumed_from=source[0].step_url(source[1]) if source else None,
                )
            )

    def _newest_checkpoint(self) -> tuple[CheckpointFolder, int] | None:
        """The newest intact checkpoint of this job, or else of the one it resumes from; ``None`` if there is none."""
        candidates = self._candidates()
        for url, step in candidates:
            folder = CheckpointFolder(url)
            damage: list[list[str]] = [[]] * dist.get_world_size()
            dist.all_gather_object(damage, folder.damage(step, dist.get_rank(), dist.get_world_size()))
            if not any(damage):
                return folder, step
            if dist.get_rank() == 0:
                problems = "; ".join(problem for of_rank in damage for problem in of_rank)
                logger.warning("checkpoint %s is damaged and left out: %s", folder.step_url(step), problems)
        if candidates:
            raise ValueError(
                f"no checkpoint in {candidates[0][0]} is intact; restore its files, or remove the folder to start anew"
            )
        return None

    def _candidates(self) -> list[tuple[str, int]]:
        """URL of the folder and step of each checkpoint to continue from, the newest first, the same on all ranks."""
        # Rank 0 looks and tells the others, so that all load the same one.
        found: list[list[tuple[str, int]]] = [[]]
        if dist.get_rank() == 0:
            other = self._state.spec.checkpoint.resume_from
            folders = [self._folder] if other is None else [self._folder, CheckpointFolder(other)]
            listings = ([(folder.url, step) for step in reversed(folder.steps())] for folder in folders)
            found = [next(filter(None, listings), [])]
            if other is not None and not found[0]:
                raise ValueError(f"checkpoint.resume_from: no committed checkpoint is at {other!r}; check the URL")
        dist.broadcast_object_list(found, src=0)
        return found[0]

    def step(self) -> None:
        """One optimizer step and its report.

        Raises:
            FloatingPointError: The loss is not finite.
        """
        self.collect()
        state, training = self._state, self._state.spec.training
        state.ledger.clear()
        started = time.perf_counter()
        result = training_step(state, self._sampler)
        seconds = time.perf_counter() - started
        if not math.isfinite(result.loss):
            raise FloatingPointError(
                f"the loss of step {state.step} is {result.loss}; lower optimizer.learning_rate, lengthen "
                "optimizer.warmup_steps, or train in fp32"
            )
        if self._reporter:
            sent = state.ledger.sum()
            tokens_per_second = training.global_batch_size * training.sequence_length / seconds
            self._reporter.report(
                StepReport(
                    step=state.step,
                    steps=training.steps,
                    loss=result.loss,
                    learning_rate=result.learning_rate,
                    gradient_norm=result.gradient_norm,
                    tokens=state.samples * training.sequence_length,
                    tokens_per_second=tokens_per_second,
                    step_seconds=seconds,
                    communication_seconds=sent.seconds,
                    exposed_communication_seconds=sent.exposed_seconds,
                    communication_bytes=sent.bytes,
                    model_flops_per_second=tokens_per_second * self._flops_per_token,
                    eta_seconds=(training.steps - state.step) * seconds,
                )
            )

    def evaluate(self) -> None:
        """Evaluate on held-out text and report it."""
        started = time.perf_counter()
        loss, tokens = evaluate(self._state, self._corpus)
        if self._reporter:
            self._reporter.report(
                EvaluationReport(
                    step=self._state.step,
                    loss=loss,
                    tokens=tokens,
                    unigram_entropy=self._unigram_entropy,
                    seconds=time.perf_counter() - started,
                )
            )

    @cached_property
    def _unigram_entropy(self) -> float:
        return unigram_entropy(self._corpus)

    def save(self) -> None:
        """Copy the state and have it written while training goes on; waits for the checkpoint before it."""
        started = time.perf_counter()
        self.collect(wait=True)
        state = self._state
        self._saver.start(state.step, state.copied_chunks(), state.manifest_writer(self._folder))
        self._held_seconds = time.perf_counter() - started

    def collect(self, wait: bool = False) -> None:
        """Report the checkpoint that was being written, once it is committed.

        Args:
            wait: Whether to wait for it.

        Raises:
            SaveFailed: It is the job's last and could not be written.
        """
        outcome = self._saver.outcome(wait)
        if outcome is None:
            return
        url = self._folder.step_url(outcome.step)
        if outcome.manifest is None and outcome.step == self._state.spec.training.steps:
            raise SaveFailed(f"the last checkpoint, {url}, cannot be written: {outcome.failure}")
        if dist.get_rank() > 0:
            return
        if outcome.manifest is None:
            logger.warning("%s cannot be written: %s; training goes on without it", url, outcome.failure)
            return
        if self._reporter:
            self._reporter.report(
                CheckpointReport(
                    step=outcome.step,
                    url=url,
                    bytes=outcome.manifest.bytes,
                    seconds=self._held_seconds,
                    commit_seconds=outcome.seconds,
                )
            )
