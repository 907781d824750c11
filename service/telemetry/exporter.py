"""Prometheus metrics, read from the record whenever they are asked for.

Nothing is counted on the side, so a restart loses nothing, and the series of a job end with the job.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector

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


def _workers(job: JobRecord) -> float:
    return job.spec.parallelism.world_size if job.state is JobState.RUNNING else 0


_GAUGES = (
    _Gauge("boost_job_attempts", "Gangs started for the job so far.", lambda job: job.attempt),
    _Gauge("boost_job_workers", "Workers that train now.", _workers),
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


class JobCollector(Collector):
    """Collects the number of jobs in each state, and gauges of the jobs that are SCHEDULING or RUNNING."""

    def __init__(self, store: JobStore) -> None:
        self._store = store

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The metrics as of now."""
        states = GaugeMetricFamily("boost_jobs", "Jobs in each state.", labels=("state",))
        for state, count in self._store.counts().items():
            states.add_metric((state,), count)
        yield states
        jobs = [job for job in self._store.active() if job.state is not JobState.QUEUED]
        for gauge in _GAUGES:
            yield _family(gauge, jobs)


def _family(gauge: _Gauge, jobs: list[JobRecord]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(gauge.name, gauge.help, labels=_LABELS, unit=gauge.unit)
    for job in jobs:
        value = gauge.read(job)
        if value is not None:
            family.add_metric((job.id, job.name), value)
    return family
