"""The metrics of trackers' progress with each active job."""

from collections.abc import Iterator, Sequence

from prometheus_client.metrics_core import Metric

from service.jobs.trackers import TrackerStore
from service.telemetry.families import family
from service.telemetry.jobs import LABELS, Seen


def tracker_families(trackers: TrackerStore, jobs: Sequence[Seen]) -> Iterator[Metric]:
    """Yield the metrics of some jobs' trackers."""
    labels = (*LABELS, "tracker")
    untold = "Events not sent to the tracker yet; capped at 10000."
    behind = family("boost_job_tracker_events_behind", untold, labels)
    failures = family("boost_job_tracker_failures_total", "Number of failed deliveries to the tracker.", labels)
    by_id = {seen.job.id: seen.job for seen in jobs}
    for tracked, count in trackers.of_jobs(by_id):
        job = by_id[tracked.job_id]
        values = (job.id, job.name, job.tenant, tracked.kind)
        behind.add_metric(values, count)
        failures.add_metric(values, tracked.failures)
    yield behind
    yield failures
