"""Prometheus metrics, read from the record whenever they are asked for.

Nothing is counted on the side, so a restart loses nothing, and the series of a job end with the job.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

from service.jobs.ledger import as_of
from service.jobs.model import JobRecord
from service.jobs.states import JobState
from service.jobs.store import JobStore

_LABELS = ("job_id", "name")


@dataclass(frozen=True)
class _Gauge:
    """A metric of one job; ``read`` gives ``None`` when there is no value yet."""

    name: str
    help: str
    read: Callable[[JobRecord], float | None]
    unit: str = ""


def _of_step(field: str) -> Callable[[JobRecord], float | None]:
    return lambda job: getattr(job.progress, field) if job.progress else None


def _of_evaluation(field: str) -> Callable[[JobRecord], float | None]:
    return lambda job: getattr(job.evaluation, field) if job.evaluation else None


def _of_checkpoint(field: str) -> Callable[[JobRecord], float | None]:
    return lambda job: getattr(job.checkpoint, field) if job.checkpoint else None


def _of_shape(field: str) -> Callable[[JobRecord], float | None]:
    return lambda job: getattr(job.shape, field) if job.shape else None


def _workers(job: JobRecord) -> float:
    return job.present_shape.world_size if job.state is JobState.RUNNING else 0


def _goodput(job: JobRecord) -> Iterable[tuple[str, float]]:
    return as_of(job.goodput, datetime.now(UTC)).seconds.items()


def _restarts(job: JobRecord) -> Iterable[tuple[str, float]]:
    return job.restart_counts.items()


_GAUGES = (
    _Gauge("boost_job_attempts", "Gangs started for the job so far.", lambda job: job.attempt),
    _Gauge("boost_job_workers", "Workers that train now.", _workers),
    _Gauge(
        "boost_job_tensor_parallel_size",
        "Tensor parallel ranks of the newest gang.",
        _of_shape("tensor_parallel_size"),
    ),
    _Gauge(
        "boost_job_pipeline_parallel_size",
        "Pipeline parallel ranks of the newest gang.",
        _of_shape("pipeline_parallel_size"),
    ),
    _Gauge(
        "boost_job_data_parallel_size",
        "Data parallel ranks of the newest gang.",
        _of_shape("data_parallel_size"),
    ),
    _Gauge("boost_job_steps", "Optimizer steps that the job runs in all.", lambda job: job.spec.training.steps),
    _Gauge("boost_job_step", "Optimizer steps done.", _of_step("step")),
    _Gauge("boost_job_loss_nats", "Training loss of the newest step, in nats a token.", _of_step("loss"), "nats"),
    _Gauge("boost_job_held_out_loss_nats", "Loss on held-out text, in nats a token.", _of_evaluation("loss"), "nats"),
    _Gauge("boost_job_tokens_per_second", "Tokens trained on a second, newest step.", _of_step("tokens_per_second")),
    _Gauge("boost_job_step_seconds", "Duration of the newest step.", _of_step("step_seconds"), "seconds"),
    _Gauge(
        "boost_job_communication_seconds",
        "Duration of the newest step's collectives, each from start to end.",
        _of_step("communication_seconds"),
        "seconds",
    ),
    _Gauge(
        "boost_job_exposed_communication_seconds",
        "Part of the newest step spent waiting for collectives.",
        _of_step("exposed_communication_seconds"),
        "seconds",
    ),
    _Gauge(
        "boost_job_communication_bytes",
        "Payload of the newest step's collectives on one rank.",
        _of_step("communication_bytes"),
        "bytes",
    ),
    _Gauge(
        "boost_job_model_flops_per_second",
        "Model FLOPs a second over the whole gang, newest step.",
        _of_step("model_flops_per_second"),
    ),
    _Gauge(
        "boost_job_checkpoint_seconds",
        "How long the newest checkpoint held the step loop.",
        _of_checkpoint("seconds"),
        "seconds",
    ),
    _Gauge("boost_job_checkpoint_bytes", "Size of the newest checkpoint.", _of_checkpoint("bytes"), "bytes"),
    _Gauge("boost_job_checkpoint_step", "Step of the newest checkpoint.", _of_checkpoint("step")),
)


@dataclass(frozen=True)
class _Gauges:
    """A metric with several values a job; ``read`` gives each with the label that tells it apart."""

    name: str
    help: str
    label: str
    read: Callable[[JobRecord], Iterable[tuple[str, float]]]
    unit: str = ""


_LABELLED = (
    _Gauges("boost_job_goodput_seconds", "What the job's time so far went into.", "kind", _goodput, "seconds"),
    _Gauges("boost_job_restarts", "How often training went on after an interruption.", "cause", _restarts),
)


class JobCollector(Collector):
    """Collects the number of jobs in each state, and gauges of the jobs that are SCHEDULING, RUNNING or PAUSED.

    Args:
        store: The record.
        tenant: Whose jobs; ``None`` for all.
    """

    def __init__(self, store: JobStore, tenant: str | None = None) -> None:
        self._store, self._tenant = store, tenant

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The metrics as of now."""
        states = GaugeMetricFamily("boost_jobs", "Jobs in each state.", labels=("state",))
        for state, count in self._store.counts(self._tenant).items():
            states.add_metric((state,), count)
        yield states
        active = [job for job in self._store.active() if self._tenant in (None, job.tenant)]
        jobs = [job for job in active if job.state is not JobState.QUEUED]
        for gauge in _GAUGES:
            yield _family(gauge, jobs)
        for gauges in _LABELLED:
            yield _labelled_family(gauges, jobs)


def _family(gauge: _Gauge, jobs: list[JobRecord]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(gauge.name, gauge.help, labels=_LABELS, unit=gauge.unit)
    for job in jobs:
        value = gauge.read(job)
        if value is not None:
            family.add_metric((job.id, job.name), value)
    return family


def _labelled_family(gauges: _Gauges, jobs: list[JobRecord]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(gauges.name, gauges.help, labels=(*_LABELS, gauges.label), unit=gauges.unit)
    for job in jobs:
        for label, value in gauges.read(job):
            family.add_metric((job.id, job.name, label), value)
    return family
