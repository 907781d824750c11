"""Declarative metrics: a name, a help text, and how to read the value; and those of each active job."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import cached_property
from typing import NamedTuple

from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from boost_core.config.job import MOST_LOSSES
from boost_core.messages import PLANNED_CAUSES, Cause, Fault, StepReport
from service.jobs.goodput import Phase, as_of
from service.jobs.model import GANG_LOST, JobRecord
from service.jobs.states import JobState

Row = tuple[Sequence[str], float | None]  # values of labels, and the metric's; ``None``: left out
Values = Iterable[tuple[str, float]]  # each with its distinguishing label

# Name suffixes that are units, by Prometheus' conventions.
_UNITS = ("seconds", "bytes", "ratio", "nats")


class Family(Metric):
    """A metric whose type and unit follow from its name; prometheus-client's samples are made when they are asked for.

    Attributes:
        labels: Names of the labels.
        rows: Values of the labels, each with the metric's.
    """

    def __init__(self, name: str, help_text: str, labels: Sequence[str] = (), rows: Iterable[Row] = ()) -> None:
        unit = name.rsplit("_", 1)[-1]
        kind = "counter" if unit == "total" else "gauge"
        super().__init__(name.removesuffix("_total"), help_text, kind, unit if unit in _UNITS else "")
        self.labels, self.rows = labels, [(values, value) for values, value in rows if value is not None]
        del self.samples

    @cached_property
    def samples(self) -> list[Sample]:  # type: ignore[override]
        """The rows as prometheus-client has them."""
        name = self.name + ("_total" if self.type == "counter" else "")
        return [Sample(name, dict(zip(self.labels, values, strict=True)), value) for values, value in self.rows]


LABELS = ("job_id", "job_name", "tenant")

_OWN_FAULT, _LOST_NODE = "fault", "node_lost"
_STEPPING = frozenset({Phase.STEPPING, Phase.CLOSING})


class Seen(NamedTuple):
    """A job as seen at some moment."""

    job: JobRecord
    now: datetime


class Value(NamedTuple):
    """A metric with at most one value per job.

    Attributes:
        name: Name in Prometheus; names ending in ``_total`` are counters, all others gauges.
        help: Help text.
        read: A function that returns the value, or ``None`` while there is none; or the path of a field in a report,
            such as ``progress.loss``.
    """

    name: str
    help: str
    read: Callable[[Seen], float | None] | str


class Parts(NamedTuple):
    """A metric with several values per job; ``label`` is the name of the label that distinguishes them."""

    name: str
    help: str
    label: str
    read: Callable[[Seen], Values]


def families(metrics: Iterable[Value | Parts], jobs: Sequence[tuple[Sequence[str], Seen]]) -> Iterator[Family]:
    """Yield the metrics of some jobs in prometheus-client's form.

    Args:
        metrics: The metrics.
        jobs: The values of ``LABELS``, and the jobs they stand for.
    """
    for metric in metrics:
        if isinstance(metric, Parts):
            parts = (((*job, part), value) for job, seen in jobs for part, value in metric.read(seen))
            yield Family(metric.name, metric.help, (*LABELS, metric.label), parts)
        elif isinstance(metric.read, str):
            kind, field = metric.read.split(".")
            reports = ((job, getattr(seen.job, kind)) for job, seen in jobs)
            values = ((job, getattr(newest, field)) for job, newest in reports if newest)
            yield Family(metric.name, metric.help, LABELS, values)
        else:
            yield Family(metric.name, metric.help, LABELS, ((job, metric.read(seen)) for job, seen in jobs))


def _rate(
    read: Callable[[StepReport], float | None], per: Callable[[JobRecord], float] = lambda _job: 1
) -> Callable[[Seen], float | None]:
    """A rate of the newest step, which is zero while the gang does not step, per something of the job."""
    return lambda seen: (
        (value if seen.job.goodput.phase in _STEPPING else 0.0) / per(seen.job)
        if seen.job.progress and (value := read(seen.job.progress)) is not None
        else None
    )


def _of_sets(field: str) -> Callable[[Seen], Values]:
    return lambda seen: (
        (each.name, value)
        for each in (seen.job.evaluation.sets if seen.job.evaluation else ())
        if (value := getattr(each, field)) is not None
    )


def _recent_restarts(seen: Seen) -> Values:
    """Restarts that count towards the job's limits: after its own faults, and after nodes lost since a checkpoint."""
    since = seen.now - timedelta(seconds=seen.job.spec.fault_tolerance.restart_window_seconds)
    recent = [restart for restart in seen.job.restarts if since <= restart.time <= seen.now]
    stored = seen.job.checkpoint_at
    if stored is None or stored > seen.now:  # from before the clock was set back
        stored = since
    faults = sum(restart.cause not in (*PLANNED_CAUSES, Cause.NODE_LOST) for restart in recent)
    losses = sum(restart.cause is Cause.NODE_LOST and restart.time >= stored for restart in recent)
    return (_OWN_FAULT, faults), (_LOST_NODE, losses)


# For every job, from its submission on.
OF_ALL = (
    Value("boost_job_waiting_seconds",
        "How long the job has been QUEUED or SCHEDULING, since it last entered one of these states.",
        lambda seen: max(0.0, (seen.now - since).total_seconds()) if (since := seen.job.waiting_since) else None),
)  # fmt: skip

# For jobs that have had a gang. Counts have their zeros: Prometheus does not see the first increase of a series that
# begins with it.
OF_STARTED: tuple[Value | Parts, ...] = (
    Value("boost_job_attempts_total", "Gangs started for the job so far.", lambda seen: seen.job.attempt),
    Value("boost_job_workers", "Workers training now.",
        lambda seen: (
            job.present_layout.world_size if (job := seen.job).state is JobState.RUNNING and job.has_workers else 0
        )),
    Value("boost_job_tensor_parallel_size", "Tensor parallel ranks of the newest gang.", "shape.tensor_parallel_size"),
    Value("boost_job_pipeline_parallel_size", "Pipeline parallel ranks of the newest gang.",
        "shape.pipeline_parallel_size"),
    Value("boost_job_context_parallel_size", "Context parallel ranks of the newest gang.",
        "shape.context_parallel_size"),
    Value("boost_job_data_parallel_size", "Data parallel ranks of the newest gang.", "shape.data_parallel_size"),
    Value("boost_job_target_steps", "Total optimizer steps of the job.", lambda seen: seen.job.spec.training.steps),
    Value("boost_job_step", "Optimizer steps done.", "progress.step"),
    Value("boost_job_loss_nats", "Training loss of the newest step, per token.", "progress.loss"),
    Value("boost_job_validation_loss_nats", "Loss on validation text, per token.", "evaluation.loss"),
    Value("boost_job_validation_bpb", "The same in bits per byte of that text, if its size in bytes is known.",
        "evaluation.bits_per_byte"),
    Parts("boost_job_validation_set_loss_nats", "Loss on a named validation set, per token.", "set", _of_sets("loss")),
    Parts("boost_job_validation_set_bits_per_byte",
        "The same in bits per byte of its text, if its size in bytes is known.", "set", _of_sets("bits_per_byte")),
    Value("boost_job_gradient_norm", "Global norm of the newest step's gradient, before clipping.",
        "progress.gradient_norm"),
    Value("boost_job_learning_rate", "Learning rate of the newest step.", "progress.learning_rate"),
    Value("boost_job_tokens", "Tokens trained on since the job started.", "progress.tokens"),
    Value("boost_job_tokens_per_second", "Tokens trained on per second, newest step; 0 while no steps are made.",
        _rate(lambda step: step.tokens_per_second)),
    Value("boost_job_samples_per_second", "Sequences trained on per second, newest step; 0 while no steps are made.",
        _rate(lambda step: step.tokens_per_second, lambda job: job.spec.training.sequence_length)),
    Value("boost_job_tokens_per_second_per_worker",
        "Tokens trained on per second by each worker, newest step; 0 while no steps are made.",
        _rate(lambda step: step.tokens_per_second, lambda job: job.present_layout.world_size)),
    Value("boost_job_step_seconds", "Duration of the newest step.", "progress.step_seconds"),
    Value("boost_job_median_step_seconds",
        "Median of the gang's newest steps without waiting for data, updated now and then.", "comparison.step_seconds"),
    Value("boost_job_predicted_step_seconds", "The plan's prediction for that median.",
        "comparison.predicted_step_seconds"),
    Value("boost_job_peak_memory_bytes", "Peak memory up to the gang's second step, of the rank with the highest peak.",
        lambda seen: report.peak_bytes[report.fullest] if (report := seen.job.comparison) else None),
    Value("boost_job_planned_memory_bytes", "The plan's prediction for that rank.",
        lambda seen: report.planned_bytes[report.fullest] if (report := seen.job.comparison) else None),
    Value("boost_job_data_seconds", "Part of the newest step spent waiting for its batch.", "progress.data_seconds"),
    Value("boost_job_forward_seconds", "Part of the newest step spent computing losses.", "progress.forward_seconds"),
    Value("boost_job_backward_seconds", "Part of the newest step spent computing gradients.",
        "progress.backward_seconds"),
    Value("boost_job_optimizer_seconds", "Part of the newest step from its last gradient to the new weights.",
        "progress.optimizer_seconds"),
    Value("boost_job_communication_seconds", "Duration of the newest step's collectives, each from start to end.",
        "progress.communication_seconds"),
    Value("boost_job_exposed_communication_seconds", "Part of the newest step spent waiting for collectives.",
        "progress.exposed_communication_seconds"),
    Value("boost_job_context_imbalance_ratio",
        "Attention of the newest step's most loaded context parallel ranks over the mean, by its plans.",
        "progress.context_imbalance"),
    Value("boost_job_attention_recall_ratio",
        "Share of dense attention that the newest step's sparse attention kept, for some of rank 0's queries.",
        "progress.attention_recall"),
    Value("boost_job_attention_density_ratio", "Share of the query-key pairs that it computed.",
        "progress.attention_density"),
    Value("boost_job_communication_bytes", "Payload of the newest step's collectives on one rank.",
        "progress.communication_bytes"),
    Value("boost_job_model_flops_per_second",
        "Model FLOPs per second of the whole gang, newest step; 0 while no steps are made.",
        _rate(lambda step: step.model_flops_per_second)),
    Value("boost_job_model_flops_utilization_ratio",
        "Share of the devices' peak, if known, that these FLOPs are; 0 while no steps are made.",
        _rate(lambda step: step.model_flops_utilization)),
    Value("boost_job_hardware_flops_utilization_ratio",
        "The same, including recomputation in the backward pass; 0 while no steps are made.",
        _rate(lambda step: step.hardware_flops_utilization)),
    Value("boost_job_progress_timestamp_seconds",
        "When the newest step was done; before the first, when the first gang started training.",
        lambda seen: time.timestamp() if (time := seen.job.progress_at or seen.job.started_at) else None),
    Value("boost_job_checkpoint_seconds", "How long the newest checkpoint blocked the step loop.",
        "checkpoint.seconds"),
    Value("boost_job_checkpoint_commit_seconds", "Time from then until the newest checkpoint was committed.",
        "checkpoint.commit_seconds"),
    Value("boost_job_checkpoint_bytes", "Size of the newest checkpoint.", "checkpoint.bytes"),
    Value("boost_job_checkpoint_step", "Step of the newest checkpoint.", "checkpoint.step"),
    Value("boost_job_checkpoint_timestamp_seconds", "When the newest checkpoint was committed.",
        lambda seen: seen.job.checkpoint_at.timestamp() if seen.job.checkpoint_at else None),
    Value("boost_job_spare_copy_step", "Step of the state copy kept on a node outside the gang.",
        lambda seen: seen.job.spare_step),
    Parts("boost_job_goodput_seconds", "How the job's time so far was spent.", "kind",
        lambda seen: as_of(seen.job.goodput, seen.now).seconds.items()),
    Parts("boost_job_restarts_total", "How often training resumed after an interruption.", "cause",
        lambda seen: ((cause, seen.job.restart_counts.get(cause, 0)) for cause in Cause)),
    Value("boost_job_starting_seconds",
        "How long the newest gang has been starting, until it trains for the first time.",
        lambda seen: (
            max(0.0, (seen.now - seen.job.goodput.booked_until).total_seconds())
            if seen.job.state is JobState.SCHEDULING and seen.job.goodput.phase is Phase.STARTING
            else None
        )),
    Parts("boost_job_recent_restarts",
        "Restarts within the job's restart_window_seconds, of the newest 50; after lost nodes, since a checkpoint.",
        "kind", _recent_restarts),
    Parts("boost_job_recent_restarts_limit", "The number of these that the job survives.", "kind",
        lambda seen: ((_OWN_FAULT, seen.job.spec.fault_tolerance.max_restarts), (_LOST_NODE, MOST_LOSSES))),
    Parts("boost_job_faults_total", "How often a problem was detected.", "what",
        lambda seen: ((what, seen.job.fault_counts.get(what, 0)) for what in (*Fault, GANG_LOST))),
)  # fmt: skip
