"""Jobs, as the API takes and shows them: requests, plans, evaluations, checkpoints, curves and trackers.

Also the requests for keys and for settings of queues and tenants.
"""

import csv
import io
import json
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from boost_core.config import JobSpec, Layout
from boost_core.config.base import Config, Moment
from boost_core.messages import Scores
from boost_core.plan.machine import Fitted
from boost_core.plan.report import Plan
from boost_core.plan.resolve import ChosenLayouts
from boost_core.plan.run_cost import CONDITIONS, RunConditions
from boost_core.plan.search import PlanSearch, SearchReport
from service.models.access import Scope, TenantName
from service.models.cluster import StoredProfile

if TYPE_CHECKING:
    from boost_core.checkpoint.folder import CheckpointFolder, StoredCheckpoint
    from boost_core.checkpoint.manifest import Manifest

_CHOSEN = "The layouts of a job with layouts=auto, and why; null for others."
_PROFILE = "Stored profile used for the predicted times; null if there is none"
_FITTED = "Measured times of jobs relative to the predictions, used to correct these; null without any."

AnswerFormat = Annotated[Literal["json", "csv"], Field(description="Media type of the answer.")]


def csv_of(rows: Iterable[Sequence[Any]]) -> str:
    """Return rows as CSV. A text that a spreadsheet would calculate is marked as text; lists and sections are JSON."""

    def cell(value: Any) -> Any:
        if isinstance(value, str):
            return f"'{value}" if value.startswith(("=", "+", "-", "@", "\t", "\r")) else value
        return value if isinstance(value, int | float | None) else json.dumps(value, ensure_ascii=False)

    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([cell(each) for each in row] for row in rows)
    return text.getvalue()


class Tabular(BaseModel):
    """An answer that is also given as CSV."""

    def rows(self) -> Iterable[Sequence[Any]]:
        """The heading and the rows."""
        raise NotImplementedError

    def as_csv(self) -> str:
        """The same as CSV."""
        return csv_of(self.rows())


class CloneRequest(Config):
    """A request for a new job made from another one's spec."""

    changes: dict[str, Any] = Field(
        {},
        description="Changes to the spec as a JSON merge patch (RFC 7396): a field replaces the original's, null "
        "removes it so that its default applies.",
    )
    from_checkpoint: bool = Field(
        False,
        description="Continue from the original's newest checkpoint, with all that is in it "
        "(checkpoint.continue_from); training.steps has to be above its step.",
    )
    from_weights: bool = Field(
        False,
        description="Start at step 0 from the weights of the original's newest checkpoint (checkpoint.weights_from). "
        "With neither, the clone starts where its spec says: from scratch unless the original or changes name a "
        "checkpoint.",
    )

    @model_validator(mode="after")
    def _one_origin(self) -> "CloneRequest":
        if self.from_checkpoint and self.from_weights:
            raise ValueError("from_checkpoint continues and from_weights starts at step 0; set one of them")
        return self


class DryRun(BaseModel):
    """The result of a dry run."""

    spec: JobSpec = Field(description="The job as it would be recorded, with all defaults filled in.")
    plan: Plan = Field(description="Its plan.")
    chosen: ChosenLayouts | None = Field(None, description=_CHOSEN)
    profile: StoredProfile | None = Field(None, description=f"{_PROFILE}.")
    fitted: Fitted | None = Field(None, description=_FITTED)


class PlanRequest(JobSpec):
    """A job, and a search to run for it."""

    search: PlanSearch | None = Field(None, description="Search for the best ways to train it; default: no search.")
    conditions: RunConditions = Field(CONDITIONS, description="Prices, failures and the checkpoints' store.")


def unused_replicas(spec: JobSpec) -> str | None:
    """Say that a job never has as many replicas as its elasticity allows, if that is so."""
    sizes = spec.elasticity and spec.elasticity.data_parallel_size
    if not sizes or (most := max(layout.dp for layout in spec.layouts())) == sizes.max:
        return None
    allowed = f"elasticity.data_parallel_size allows {sizes.max} replicas, but the job never has more than {most}"
    why = "more could not share its micro-batches equally, or would leave a pipeline with fewer than it has stages"
    return f"{allowed}: {why}"


class PlanAnswer(Plan):
    """A job's plan, and the best ways to train it if requested."""

    chosen: ChosenLayouts | None = Field(None, description=_CHOSEN)
    search: SearchReport | None = Field(None, description="Result of the search; null if none was requested.")
    profile: StoredProfile | None = Field(None, description=f"{_PROFILE}, or one was given.")
    fitted: Fitted | None = Field(None, description=_FITTED)


class JobExample(BaseModel):
    """An example job file."""

    name: str = Field(description="Name of its file, without the suffix.")
    description: str = Field(description="What it shows.")
    text: str = Field(description="The file: YAML with comments.")


class JobExampleList(BaseModel):
    """All examples; those that need no GPU come first."""

    examples: list[JobExample]


class KeyRequest(Config):
    """A request for a new key."""

    name: str = Field(min_length=1, max_length=100, description="Its name in job records and the audit log.")
    tenant: TenantName = Field(description="The tenant it acts for; created if it does not exist.")
    scopes: list[Scope] = Field(min_length=1, max_length=len(Scope), description="Scopes of the key.")
    expires_at: Moment | None = Field(None, description="Expiry; null: never.")


class QueueSettings(Config):
    """An operator's settings of a queue. They replace all previous ones: a missing field gets its default."""

    description: str = Field("", max_length=500, description="What it is for.")
    gpus: float | None = Field(None, ge=0, description="Maximum number of GPUs that its jobs may hold; null: no limit.")
    cpus: float | None = Field(None, ge=0, description="Maximum number of CPUs that its jobs may hold; null: no limit.")


class TenantSettings(Config):
    """A tenant's quota. It replaces the previous one: a missing field gets its default."""

    gpus: float | None = Field(None, ge=0, description="Maximum number of GPUs that its jobs may hold; null: no limit.")
    cpus: float | None = Field(None, ge=0, description="Maximum number of CPUs that its jobs may hold; null: no limit.")


class JobEvaluation(Scores):
    """An evaluation of one of a job's checkpoints."""

    model_config = ConfigDict(extra="ignore")

    time: datetime = Field(description="When it was recorded.")


class EvaluationList(BaseModel):
    """A job's evaluations on tasks."""

    evaluations: list[JobEvaluation] = Field(description="The newest 50, newest first.")


class DifferingField(BaseModel):
    """A field in which jobs' specs differ."""

    field: str = Field(description="Its path, for example training.steps or data.mixture[0].weight.")
    values: list[Any] = Field(
        description="Its value in each job, with defaults, presets and chosen layouts filled in; null if it has none."
    )
    values_at_first: list[Any] | None = Field(
        None, description="The same in each job's first step, if some have been steered to others since."
    )
    submitted: bool = Field(
        description="Whether the jobs differ in it as submitted. Otherwise it follows from fields in which they do, as "
        "a model's width follows from its preset, or the service has chosen it."
    )


class SpecDiff(BaseModel):
    """The fields in which the specs of two jobs differ."""

    jobs: list[str] = Field(description="The two jobs.")
    fields: list[DifferingField] = Field(description="In the order of the job file.")


class Result(StrEnum):
    """What jobs are compared and sorted by; each is a field of ``ComparedJob``."""

    FINAL_LOSS = "final_loss"
    BEST_VALIDATION_LOSS = "best_validation_loss"
    TOKENS_PER_SECOND = "tokens_per_second"
    TOKENS = "tokens"
    SECONDS = "seconds"
    GPU_HOURS = "gpu_hours"


class ComparedJob(BaseModel):
    """A job's results. Null: not available yet, or not finite."""

    id: str
    name: str
    state: str
    message: str | None = Field(None, description="Why it FAILED or was CANCELLED.")
    final_loss: float | None = Field(description="Mean loss of the newest 20 steps, in nats per token.")
    best_validation_loss: float | None = Field(description="The lowest validation loss, in nats per token.")
    tokens_per_second: float | None = Field(
        description="The run's throughput: tokens, by the seconds in which it trained on them (goodput's productive "
        "and data_stall: new steps and evaluations; no starts, compilation, checkpoints, repeated steps or pauses)."
    )
    tokens: int | None = Field(
        description="Tokens that this job has trained on, without those before a checkpoint that it continues from."
    )
    seconds: float | None = Field(description="From the start of training to the end, or to now; pauses included.")
    gpu_hours: float = Field(
        description="GPUs of each of its gangs, times the hours from when it was formed until it ended or changed."
    )
    validation_sets: list[str] = Field([], description="Names of its validation sets.")


class Comparison(BaseModel):
    """Jobs beside each other."""

    jobs: list[ComparedJob] = Field(description="As requested, or sorted; jobs without the result come last.")
    fields: list[DifferingField] = Field(
        description="The fields in which they differ as submitted, but for name and notes; values in the jobs' order."
    )


class Axis(StrEnum):
    """What curves are drawn over."""

    STEP = "step"
    TOKENS = "tokens"
    FLOPS = "flops"
    SECONDS = "seconds"


class Curve(BaseModel):
    """One value of a job over its course, in points of consecutive steps. Null: no finite value."""

    id: str = Field(description="The job.")
    x: list[float] = Field(
        description="Of the last step of each point: its number, the tokens or model FLOPs so far, or the seconds "
        "since the job was started, pauses included."
    )
    mean: list[float | None] = Field(description="Mean of the point's steps; all values have seven digits.")
    min: list[float | None] = Field(description="The lowest of them.")
    max: list[float | None] = Field(description="The highest of them.")


class Curves(Tabular):
    """The same curve of several jobs."""

    metric: str
    axis: Axis
    curves: list[Curve] = Field(description="As requested; a job without a value has no points.")

    def rows(self) -> Iterator[Sequence[Any]]:
        """A row for each point."""
        yield "id", self.axis, f"{self.metric}_mean", f"{self.metric}_min", f"{self.metric}_max"
        for each in self.curves:
            yield from ((each.id, *point) for point in zip(each.x, each.mean, each.min, each.max, strict=True))


class Checkpoint(BaseModel):
    """One committed checkpoint of a job."""

    step: int = Field(description="Step at which it was written.")
    url: str = Field(description="Its folder.")
    bytes: int = Field(description="Size of all its files.")
    saved_at: datetime = Field(description="When it was committed.")
    pinned: bool = Field(description="Whether it is kept until it is unpinned, regardless of retention.")
    tensor_parallel_size: int = Field(description="Tensor parallel size of the writing gang; any layout loads it.")
    pipeline_parallel_size: int = Field(description="Pipeline parallel size of the gang that wrote it.")
    data_parallel_size: int = Field(description="Data parallel size of the gang that wrote it.")
    context_parallel_size: int = Field(1, description="Context parallel size of the gang that wrote it.")
    samples: int = Field(description="Samples consumed so far.")

    @classmethod
    def of(cls, manifest: "Manifest", **more: Any) -> Self:
        """Describe a checkpoint by its manifest and fields that are not in it."""
        facts = {name: getattr(manifest, name) for name in ("step", "bytes", "saved_at", "samples")}
        return cls(**facts, **Layout.of(manifest.parallelism).sizes, **more)


class CheckpointFile(BaseModel):
    """One file of a checkpoint."""

    bytes: int = Field(description="Its size.")
    crc32: int = Field(description="CRC-32 of its content as written.")


class CheckpointDetail(Checkpoint):
    """A checkpoint with its files and the versions that wrote it."""

    files: dict[str, CheckpointFile] = Field(description="The files by name.")
    versions: dict[str, str] = Field(description="Versions of the packages that wrote it.")


class DamagedCheckpoint(BaseModel):
    """A committed checkpoint that no job can resume from."""

    step: int = Field(description="Step at which it was written.")
    url: str = Field(description="Its folder.")
    pinned: bool = Field(description="Whether it is kept until it is unpinned, regardless of retention.")
    damage: str = Field(description="Which file is damaged, and how.")


class CheckpointList(BaseModel):
    """A job's committed checkpoints."""

    checkpoints: list[Checkpoint] = Field(
        description="Newest first. All files exist with the right size; their content is not verified."
    )
    damaged: list[DamagedCheckpoint] = Field(
        [], description="Checkpoints whose manifest or files are missing, truncated or changed, newest first."
    )

    @classmethod
    def of(
        cls, folder: "CheckpointFolder", committed: "Iterable[StoredCheckpoint]", pinned: Collection[int]
    ) -> "CheckpointList":
        """Describe a folder's checkpoints."""
        result = cls(checkpoints=[])
        for each in committed:
            about = {"url": folder.step_url(each.step), "pinned": each.step in pinned}
            if each.manifest is None or each.damage:
                result.damaged.append(DamagedCheckpoint(step=each.step, **about, damage=each.damage))
            else:
                result.checkpoints.append(Checkpoint.of(each.manifest, **about))
        return result


class MetricsSample(BaseModel):
    """Consecutive steps, as one point of a curve. Numbers that JSON cannot represent are null."""

    step: int = Field(description="The last of these steps.")
    time: datetime = Field(description="When that step was done.")
    loss: float | None = Field(description="Mean cross entropy, in nats per token.")
    loss_min: float | None = Field(description="The lowest loss of a step.")
    loss_max: float | None = Field(description="The highest loss of a step.")
    learning_rate: float | None = Field(description="Mean learning rate.")
    gradient_norm: float | None = Field(description="Mean global norm before clipping.")
    tokens_per_second: float | None = Field(description="Mean throughput of the gang, in tokens per second.")
    step_seconds: float | None = Field(description="Mean duration of a step.")
    exposed_communication_seconds: float | None = Field(description="Mean part of a step waiting for collectives.")
    model_flops_per_second: float | None = Field(description="Mean model FLOPs per second of the whole gang.")


class ValidationPoint(BaseModel):
    """The loss on some text, in three forms."""

    loss: float | None = Field(description="Mean cross entropy, in nats per token.")
    perplexity: float | None = Field(None, description="Exponential of the loss.")
    bits_per_byte: float | None = Field(
        None, description="The loss in bits per byte of the text; null if the text's size in bytes is not known."
    )


class NamedValidationPoint(ValidationPoint):
    """The loss on one set of data.validation."""

    name: str = Field(description="The set's name.")


class EvaluationPoint(ValidationPoint):
    """One evaluation on validation text."""

    step: int = Field(description="Step at which it ran.")
    sets: list[NamedValidationPoint] = Field([], description="The named sets, in the job's order.")


class RankTimes(BaseModel):
    """How long each rank computed in a step."""

    step: int = Field(description="The step.")
    busy_seconds: list[float | None] = Field(description="Seconds that each rank computed, by rank.")


class MetricsHistory(Tabular):
    """A job's curves between two steps, downsampled to a number of points."""

    job_id: str = Field(description="The job.")
    from_step: int = Field(description="First step requested.")
    to_step: int = Field(description="Last step available of those requested.")
    bucket_steps: int = Field(description="Steps per point.")
    samples: list[MetricsSample] = Field(description="In order of steps.")
    evaluations: list[EvaluationPoint] = Field(description="In order of steps.")
    ranks: list[RankTimes] = Field(description="In order of steps; empty if nothing was measured by rank.")

    def rows(self) -> Iterator[Sequence[Any]]:
        """A row for each of the samples."""
        yield [*MetricsSample.model_fields]
        yield from ([*each.model_dump(mode="json").values()] for each in self.samples)


class TrackerState(BaseModel):
    """The progress of one of a job's trackers."""

    kind: Literal["tensorboard", "mlflow", "wandb"]
    place: str = Field(description="Where the job is tracked: a folder of event files, or the URL of a run.")
    behind: int = Field(description="Events not sent to it yet; capped at 10,000.")
    failures: int = Field(description="Number of failed deliveries so far.")
    failing_since: datetime | None = Field(description="When it began to fail; null if it works.")
    problem: str | None = Field(description="Why the last delivery failed; null if it did not.")


class TrackerList(BaseModel):
    """A job's trackers."""

    trackers: list[TrackerState]
