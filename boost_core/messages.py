"""Reports: what the trainer sends back.

A trainer hands reports to a ``Reporter``, which prints them under ``torchrun`` and, in a gang, sends them to the
job's supervisor; the service stores them as events.
"""

import json
import math
from collections.abc import Mapping
from datetime import datetime
from enum import StrEnum
from typing import Annotated, Any, Literal, Protocol

from pydantic import Field, TypeAdapter

from boost_core.config import JobSpec, Layout
from boost_core.config.base import Config, Frozen
from boost_core.config.job import Steering
from boost_core.config.parallelism import LayoutSizes
from boost_core.config.training import MOST_SAMPLINGS
from boost_core.terminal import duration

Provenance = Literal["assumed", "fitted", "measured", "measured_fitted"]
PROVENANCE = (
    "Where predicted seconds come from. assumed: data sheets; measured: a profile of such a device; fitted and "
    "measured_fitted: the same, corrected by the times of jobs that ran there."
)


class StepReport(Frozen):
    """One optimizer step, as seen by rank 0."""

    kind: Literal["progress"] = "progress"
    step: int = Field(description="Steps done, this one included.")
    steps: int = Field(description="Total number of steps of the job.")
    loss: float = Field(description="Mean cross entropy of the global batch, in nats per token.")
    learning_rate: float
    gradient_norm: float = Field(description="Global norm before clipping.")
    tokens: int = Field(description="Tokens trained on since the job started.")
    tokens_per_second: float
    step_seconds: float
    communication_seconds: float = Field(description="Duration of this step's collectives, each from start to end.")
    exposed_communication_seconds: float = Field(
        description="Part of step_seconds spent waiting for collectives: communication that computation did not hide."
    )
    communication_bytes: int = Field(description="Payload bytes of this step's collectives on one rank.")
    model_flops_per_second: float = Field(description="Model FLOPs per second of the whole gang.")
    model_flops_utilization: float | None = Field(
        None, description="Model FLOPs utilization, from 0 to 1; null if the devices' peak is unknown."
    )
    hardware_flops_utilization: float | None = Field(
        None, description="The same, counting what the backward pass recomputes as well."
    )
    eta_seconds: float = Field(description="Expected seconds until the last step, without evaluations and saves.")
    data_seconds: float = Field(0.0, description="Part of step_seconds spent waiting for the batch.")
    forward_seconds: float = Field(
        0.0, description="Part of step_seconds spent computing losses, without waiting for collectives."
    )
    backward_seconds: float = Field(0.0, description="The same for gradients, including recomputation.")
    optimizer_seconds: float = Field(
        0.0, description="The same for the optimizer: from the last gradient to the new weights."
    )
    context_imbalance: float | None = Field(
        None,
        description="Attention work of the busiest context parallel rank in each micro-batch, relative to the mean, "
        "according to the plans of rank 0's sequences; null if each rank has whole sequences.",
    )
    attention_recall: float | None = Field(
        None,
        description="Share of dense attention that sparse attention kept, averaged over some queries of rank 0's "
        "documents, heads and layers; null if attention is dense.",
    )
    attention_density: float | None = Field(
        None, description="Share of their query-key pairs that it computed; null if attention is dense."
    )
    held_seconds: float = Field(
        0.0, description="Seconds for which checkpoints and copies blocked the loop since the previous step."
    )

    @property
    def exposed_communication_share(self) -> float:
        """Fraction of the step spent waiting for collectives, from 0 to 1."""
        return self.exposed_communication_seconds / self.step_seconds if self.step_seconds else 0.0


class ValidationLoss(Frozen):
    """A validation loss."""

    loss: float = Field(description="Mean cross entropy over all evaluated tokens, in nats per token.")
    tokens: int
    bits_per_byte: float | None = Field(
        None,
        description="The loss in bits per byte of text, which is comparable between tokenizers; null if the text's "
        "size in bytes is unknown.",
    )


def perplexity_of(loss: float) -> float:
    """The exponential of a loss in nats per token; infinity if it overflows."""
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf


class NamedLoss(ValidationLoss):
    """The loss on a set of ``data.validation``."""

    name: str


class EvaluationReport(ValidationLoss):
    """One evaluation on the part of the sources kept for validation and on each named set."""

    kind: Literal["evaluation"] = "evaluation"
    step: int
    unigram_entropy: float = Field(description="Entropy of single tokens of the validation text, in nats.")
    sets: tuple[NamedLoss, ...] = Field((), description="The losses on data.validation.")
    seconds: float


class Sample(Frozen):
    """The model's continuation of a prompt."""

    prompt: str
    text: str = Field(description="The continuation by the likeliest tokens, up to the end of the document.")


class SampleReport(Frozen):
    """Text that the model generated during training."""

    kind: Literal["sample"] = "sample"
    step: int
    samples: tuple[Sample, ...] = Field(description="One for each prompt of training.sample.")
    seconds: float


class CheckpointReport(Frozen):
    """One committed checkpoint."""

    kind: Literal["checkpoint"] = "checkpoint"
    step: int
    url: str
    bytes: int
    seconds: float = Field(description="Seconds for which the step loop was blocked.")
    commit_seconds: float = Field(0.0, description="Seconds from then until the commit, while training continued.")


class StartReport(Frozen):
    """The trainer has started, from scratch or from a checkpoint."""

    kind: Literal["started"] = "started"
    step: int = Field(description="Steps already done.")
    world_size: int
    parameters: int
    load_seconds: float = Field(0.0, description="Seconds taken to load the state.")
    resumed_from: str | None = Field(description="URL of the checkpoint, or memory; null if it starts from scratch.")
    attention: str | None = Field(
        None, description="Whose kernels compute attention: cudnn, flash, efficient or math; null in old records."
    )


class Cause(StrEnum):
    """Why a gang stopped or changed its layout."""

    WORKER_LOST = "WORKER_LOST"
    NODE_LOST = "NODE_LOST"
    HANG = "HANG"
    DIVERGENCE = "DIVERGENCE"
    ERROR = "ERROR"
    NODE_DRAINED = "NODE_DRAINED"
    NODE_JOINED = "NODE_JOINED"
    PREEMPTED = "PREEMPTED"
    LIMITS_CHANGED = "LIMITS_CHANGED"
    WORKER_BACK = "WORKER_BACK"
    PAUSED = "PAUSED"
    WAITING_FOR_STORE = "WAITING_FOR_STORE"

    @classmethod
    def _missing_(cls, value: object) -> "Cause | None":
        return cls.PREEMPTED if value == "ROOM_NEEDED" else None  # its name in old records


# All but the faults.
PLANNED_CAUSES = frozenset(Cause) - {Cause.WORKER_LOST, Cause.NODE_LOST, Cause.HANG, Cause.DIVERGENCE, Cause.ERROR}


class InterruptionReport(Frozen):
    """A gang stops between two steps, due to a fault or a change. Training resumes with the ``RestartReport``."""

    kind: Literal["interruption"] = "interruption"
    cause: Cause
    message: str
    step: int = Field(description="Steps done when it stopped.")


class ShapeReport(LayoutSizes):
    """The gang has been formed, again or in another layout."""

    kind: Literal["shape"] = "shape"
    nodes: list[str] = Field(description="The node of each rank.")
    metrics_endpoints: list[str | None] = Field(
        [], description="host:port of each rank's metrics; null for a rank without metrics, empty if none are known."
    )
    supervisor: str | None = Field(None, description="Ray's ID of the actor that runs the gang.")
    keeps: bool = Field(
        False,
        description="Whether the ranks hold neither CPUs nor GPUs: all steps are done, and they only keep the state "
        "until the store accepts it.",
    )


class RestartReport(Frozen):
    """Training resumes after an interruption; precedes the report of the first step."""

    kind: Literal["restart"] = "restart"
    cause: Cause
    message: str
    step: int = Field(description="Steps done when training stopped.")
    resumed_step: int = Field(description="Steps done where training resumed; the steps in between are repeated.")
    recovered_from: Literal["memory", "storage", "start"]
    seconds: float = Field(description="From the fault, or the end of the last step, to the end of the first new step.")
    waiting_seconds: float = Field(description="Part of seconds spent waiting for resources.")
    parts: dict[str, float] = Field(description="Seconds by phase: detect, stop, place, start, load and first_step.")


class Fault(StrEnum):
    """Faults that do not by themselves end a job."""

    HANG = "hang"
    SLOW_RANK = "slow_rank"
    DIVERGENCE = "divergence"
    STORE = "store"
    PROFILE = "profile"
    CUDA_GRAPHS = "cuda_graphs"
    TRACKER = "tracker"
    RECALL = "recall"
    DEVICE = "device"


class FaultReport(Frozen):
    """A problem with a rank, a step or a checkpoint that people should know about."""

    kind: Literal["fault"] = "fault"
    what: Fault = Field(description="store: the store did not accept a checkpoint that was due; it stays due.")
    step: int
    rank: int | None = None
    share: float | None = Field(None, description="For a slow rank: the share of the step it spent computing.")
    message: str


class RankTimesReport(Frozen):
    """How long each rank computed in the steps since the last such report; sent now and then, not every step."""

    kind: Literal["ranks"] = "ranks"
    step: int = Field(description="The newest step.")
    busy_seconds: list[float] = Field(description="By rank: mean seconds per step not spent waiting for others.")


class ComparisonReport(LayoutSizes):
    """The gang's memory and time compared with the plan, after its second and tenth steps, then ever less often."""

    kind: Literal["comparison"] = "comparison"
    step: int = Field(description="Steps done.")
    planned_bytes: list[int] = Field(description="By rank: planned memory.")
    peak_bytes: list[int] = Field(
        description="By rank: peak memory up to the end of the gang's second step, as counted by torch's allocator on "
        "a GPU and by storages on a CPU."
    )
    predicted_step_seconds: float
    predicted_step_seconds_range: tuple[float, float] = Field(
        description="The range in which eight of ten steps were expected."
    )
    provenance: Provenance = Field("assumed", description=PROVENANCE)
    correction: float = Field(
        1.0,
        description="Factor applied to the prediction because earlier jobs took more or less time than predicted. "
        "Later jobs are corrected by this job's seconds relative to the prediction without the factor.",
    )
    predicted_exposed_communication_seconds: float = Field(
        0.0, description="Part of predicted_step_seconds that rank 0 waits for collectives."
    )
    communication_correction: float = Field(1.0, gt=0, description="Factor applied to that part, likewise.")
    communication_share: Annotated[float, Field(ge=0, lt=1)] = Field(
        0.0,
        description="Share of the prediction without any factor that depends on the speed of collectives: waiting for "
        "them, and for other pipeline ranks that wait for theirs.",
    )
    step_seconds: float | None = Field(
        description="Median of the newest steps, at most 100, with the whole batch, without waiting for data; null "
        "until there are any."
    )
    exposed_communication_seconds: float | None = Field(
        None,
        description="Median of those steps' exposed_communication_seconds on rank 0; null until there are any, and in "
        "records of versions that did not compare it.",
    )

    @property
    def fullest(self) -> int:
        """The rank with the largest peak memory."""
        return self.peak_bytes.index(max(self.peak_bytes))


class ProfileReport(Frozen):
    """A trace of some steps of a rank has been stored."""

    kind: Literal["profile"] = "profile"
    step: int = Field(description="Steps done when the trace began.")
    steps: int = Field(description="Number of steps in the trace.")
    rank: int
    url: str = Field(description="A gzipped JSON trace that Perfetto and TensorBoard can read.")
    bytes: int


class SpareReport(Frozen):
    """A newer spare copy of the state is complete on a node outside the gang, or no spare copy is kept any more."""

    kind: Literal["spare"] = "spare"
    step: int | None = Field(description="Steps done in that state; null if no spare copy is kept any more.")
    node: str | None = Field(description="The node that keeps it.")


class SteeredReport(Frozen):
    """The job's values have been changed while it trained: the new ones hold from the next step on, on all ranks."""

    kind: Literal["steered"] = "steered"
    number: int = Field(description="Number of the change, counted over the job's life; 0 before its first gang.")
    step: int = Field(description="The last step with the old values.")
    by: str = Field(description="Name of the API key with which they were changed.")
    requested_at: datetime | None = Field(description="When that was requested.")
    changes: dict[str, Any] = Field(description="from and to of each changed field.")
    steering: Steering = Field(description="The values that hold now, changed or not.")

    def applied_to(self, spec: JobSpec) -> JobSpec:
        """Return the job with the change, unless it has been made there."""
        if self.number <= len(spec.steered):
            return spec
        return spec.steered_after(self.step, self.steering, self.by, self.requested_at)


class LogLine(Frozen):
    """One line of a rank's log."""

    kind: Literal["log"] = "log"
    rank: int
    level: str
    message: str


_OfTraining = StepReport | EvaluationReport | SampleReport | CheckpointReport | StartReport
_OfItsGang = InterruptionReport | ShapeReport | RestartReport | FaultReport | RankTimesReport
Report = _OfTraining | _OfItsGang | ComparisonReport | ProfileReport | SpareReport | SteeredReport | LogLine

report_adapter: TypeAdapter[Report] = TypeAdapter(Annotated[Report, Field(discriminator="kind")])


class Reporter(Protocol):
    """Takes a trainer's reports. Must not block the step loop and must not raise."""

    def report(self, report: Report) -> None:
        """Take one report."""


# What a training gang can be asked to do besides training. Commands are told apart by ``kind``.


class Drill(Config):
    """One fault, injected once."""

    kind: Literal["kill_rank", "hang_rank", "drop_node", "delay_rank", "fill_store"] = Field(
        description="kill_rank: the rank's process is killed. hang_rank: it is stopped and never resumes. drop_node: "
        "all of the job's processes on the rank's node are killed at once, and the job stays off that node for a "
        "while. delay_rank: the rank is late in each of several steps, as if behind a slow link. fill_store: "
        "checkpoints cannot be written for a while, as if the store were full."
    )
    rank: int = Field(0, ge=0, description="The rank to inject it into; for drop_node, any rank on the node.")
    at_step: int | None = Field(None, ge=0, description="Inject after this step (null: immediately).")
    steps: int = Field(10, ge=1, le=100_000, description="For delay_rank: the number of steps.")
    seconds: Annotated[float, Field(gt=0, le=3600)] = Field(
        10.0, description="For delay_rank: the delay per step; for drop_node and fill_store: the duration."
    )


class Profile(Config):
    """A one-time trace of some whole steps of some ranks."""

    kind: Literal["profile"] = "profile"
    steps: int = Field(3, ge=1, le=20, description="Number of steps to trace, starting with the next.")
    ranks: tuple[Annotated[int, Field(ge=0)], ...] = Field(
        (0,), min_length=1, max_length=64, description="Ranks to trace; each writes its own trace."
    )


WorkerCommand = Drill | Profile


class Steer(Frozen):
    """A change of values, which all ranks make between the same two steps. Changes are made in order, each once."""

    number: int = Field(ge=1, description="Number of the change, counted over the job's life.")
    by: str = Field(description="Name of the API key with which it was requested.")
    requested_at: datetime
    steering: Steering = Field(description="The values that are to hold, changed or not.")

    def made(self, spec: JobSpec, step: int) -> tuple[JobSpec, SteeredReport]:
        """Return a job with the change made after a step, and the report of it.

        If the job has meanwhile passed the last step requested, it ends after its next one. It samples no more often
        than its number of steps allows, because the result is stored and validated as a job when it is read.
        """
        training = self.steering.training
        steps, sample = max(training.steps, step + 1), training.sample
        if sample is not None:
            sample = sample.model_copy(update={"every_steps": max(sample.every_steps, -(-steps // MOST_SAMPLINGS))})
        training = training.model_copy(update={"steps": steps, "sample": sample})
        steering = self.steering.model_copy(update={"training": training})
        report = SteeredReport(
            number=self.number, step=step, by=self.by, requested_at=self.requested_at,
            changes=spec.steering.changes_to(steering), steering=steering,
        )  # fmt: skip
        return report.applied_to(spec), report


# A checkpoint's scores on tasks, as the trainer's side hands them to whoever stores them.

_Word = Annotated[str, Field(min_length=1, max_length=200)]
_Number = Annotated[float, Field(allow_inf_nan=False)]


class Score(Config):
    """One metric of one task."""

    task: _Word = Field(description="The task's name.")
    metric: _Word = Field(description="Metric and, after a comma, the filter applied to the answers, if any.")
    value: _Number | None = Field(description="Null if it is not finite.")
    stderr: _Number | None = Field(None, description="Standard error of the value; null if the task has none.")
    higher_is_better: bool | None = Field(None, description="Null if the task does not say.")
    samples: int = Field(ge=0, le=10**12, description="Number of documents evaluated.")
    version: str | None = Field(None, max_length=100, description="Version of the task, as given in its file.")
    task_hash: str = Field(
        pattern="^[0-9a-f]{16}$", description="Hash of all documents, prompts and answers; equal for equal questions."
    )


class Scores(Config):
    """The results of evaluating a checkpoint on some tasks."""

    step: int = Field(ge=0, le=10**15, description="Step of the checkpoint.")
    evaluated_by: _Word = Field(description="Package and version, such as lm-eval 0.4.13.")
    scores: tuple[Score, ...] = Field(min_length=1, fail_fast=True, description="One score per task and metric.")


# Reports as text, one line each: what the trainer prints when it runs alone, and what ``boost`` prints for a job.


def line_of(report: Report) -> str:
    """Describe a report in one line."""
    match report:
        case StepReport():
            return f"step {report.step}/{report.steps}  {numbers_of(report)}  ETA {duration(report.eta_seconds)}"
        case EvaluationReport():
            named = "".join(f"; {each.name} {validation_in_words(each)}" for each in report.sets)
            entropy = f"unigram entropy of that text {report.unigram_entropy:.4f}"
            return f"step {report.step}  validation loss {validation_in_words(report)}, {entropy}{named}"
        case SampleReport():
            samples = (f"{json.dumps(each.prompt + each.text, ensure_ascii=False)}" for each in report.samples)
            return f"step {report.step}  samples {'; '.join(samples)}"
        case CheckpointReport():
            size = f"{report.bytes / 2**20:.1f} MiB"
            return f"step {report.step}  checkpoint {report.url} ({size}, {report.seconds:.2f} s)"
        case StartReport():
            origin = f"from {report.resumed_from}" if report.resumed_from else "from scratch"
            size = f"{report.parameters:,} parameters on {report.world_size} worker(s)"
            attention = f", attention by {report.attention}" if report.attention else ""
            return f"training starts {origin} at step {report.step}: {size}{attention}"
        case ShapeReport():
            return f"the gang is {layout_in_words(report)}"
        case InterruptionReport():
            return f"step {report.step}  interrupted by {report.cause}: {report.message}"
        case RestartReport():
            return f"step {report.resumed_step}  continues after {restart_in_words(report)}"
        case FaultReport():
            return f"step {report.step}  {report.what.replace('_', ' ')}: {report.message}"
        case RankTimesReport():
            seconds = ", ".join(f"{each:.3g}" for each in report.busy_seconds)
            return f"step {report.step}  busy seconds by rank: {seconds}"
        case ComparisonReport():
            return f"step {report.step}  compared with the plan: {comparison_in_words(report)}"
        case ProfileReport():
            what = f"profile of {report.steps} step(s) of rank {report.rank}"
            return f"step {report.step}  {what}: {report.url} ({report.bytes / 2**20:.1f} MiB)"
        case SpareReport(step=None):
            return "no spare copy of the state is kept any more"
        case SpareReport():
            return f"step {report.step}  spare copy of the state on node {(report.node or '')[:12]}"
        case SteeredReport():
            return f"steered by {report.by}: from step {report.step + 1} on {changes_in_words(report.changes)}"
        case LogLine():
            return f"rank {report.rank} {report.level}: {report.message}"


def numbers_of(step: StepReport) -> str:
    """A step's loss, throughput and share of time spent waiting for collectives."""
    share = f"{step.exposed_communication_share:.0%}"
    return f"loss {step.loss:.4f}  {step.tokens_per_second:,.0f} tokens/s  communication {share}"


def validation_in_words(validation: ValidationLoss) -> str:
    """A validation loss, with its perplexity, and in bits per byte if known."""
    bits = "" if validation.bits_per_byte is None else f", {validation.bits_per_byte:.4f} bits/byte"
    return f"{validation.loss:.4f} (perplexity {perplexity_of(validation.loss):.4g}{bits})"


def comparison_in_words(report: ComparisonReport) -> str:
    """Peak memory of the fullest rank, and seconds per step, both measured and planned."""
    rank = report.fullest
    peak, planned = report.peak_bytes[rank] / 1e9, report.planned_bytes[rank] / 1e9
    memory = f"{peak:.3g} GB of {planned:.3g} GB planned on rank {rank}"
    if report.step_seconds is None:
        return memory
    return f"{memory}; {report.step_seconds:.3g} s a step, predicted {report.predicted_step_seconds:.3g} s"


def changes_in_words(changes: Mapping[str, Any]) -> str:
    """What was changed, given ``from`` and ``to`` of each field."""
    return ", ".join(f"{field} from {_value(each['from'])} to {_value(each['to'])}" for field, each in changes.items())


def _value(value: object) -> str:
    if value is None or value in ("", []):
        return "none"
    if isinstance(value, list):
        return " ".join(map(str, value))
    if isinstance(value, dict):
        return f"{value['min']}–{value['max']}" if "min" in value else json.dumps(value, ensure_ascii=False)
    return str(value)


def layout_in_words(shape: ShapeReport) -> str:
    """The layout of a gang and the number of its workers and nodes."""
    return f"{Layout.of(shape)}, {len(shape.nodes)} worker(s) on {len(set(shape.nodes))} node(s)"


def restart_in_words(restart: RestartReport) -> str:
    """Why training was interrupted, where it resumed, and what that cost."""
    step, resumed = restart.step, f"resumed from {restart.recovered_from} at step {restart.resumed_step}"
    cost = f"cost {step - restart.resumed_step} step(s) and {restart.seconds:.1f} s"
    waiting = f"{restart.waiting_seconds:.1f} s of it waiting for resources"
    return f"{restart.cause} at step {step}: {resumed}; {cost}, {waiting}"
