"""What this process measures itself: requests, the scheduler's passes, memory. Lost when it ends."""

from collections.abc import Iterator
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from boost_core import __version__

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # seconds
_LONG_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)


class HttpMetrics(NamedTuple):
    """Metrics of requests.

    Attributes:
        requests: Requests answered.
        seconds: Their durations, event streams excluded.
        streams: Open event streams.
    """

    requests: Counter
    seconds: Histogram
    streams: Gauge


class SchedulerMetrics(NamedTuple):
    """Metrics of the scheduler.

    Attributes:
        seconds: Durations of passes.
        good: Passes that succeeded.
        failed: Passes that failed.
        leading: Whether this process schedules.
    """

    seconds: Histogram
    good: Counter
    failed: Counter
    leading: Gauge


class ProcessMetrics(Collector):
    """Everything that a process measures itself, in a registry of its own: a process may have several."""

    def __init__(self) -> None:
        self._registry = registry = CollectorRegistry()
        labels = "method", "route"
        requests = Counter("boost_http_requests", "Requests answered.", (*labels, "status"), registry=registry)
        text = "Time from the first byte of a request to the last byte of its response; event streams are excluded."
        name = "boost_http_request_duration_seconds"
        seconds = Histogram(name, text, labels, buckets=_BUCKETS, registry=registry)
        streams = Gauge("boost_http_streams", "Open event streams.", registry=registry)
        self.http = HttpMetrics(requests, seconds, streams)

        name, text = "boost_scheduler_pass_duration_seconds", "Duration of the scheduler's passes."
        seconds = Histogram(name, text, buckets=_LONG_BUCKETS, registry=registry)
        leading = Gauge("boost_scheduler_leading", "1 if this process schedules, else 0.", registry=registry)
        passes = Counter("boost_scheduler_passes", "Passes of the scheduler.", ("outcome",), registry=registry)
        self.scheduler = SchedulerMetrics(seconds, passes.labels("ok"), passes.labels("failed"), leading)

        Info("boost_build", "The version in use; always 1.", registry=registry).info({"version": __version__})
        ProcessCollector(registry=registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the present metrics, without their creation times, which would double the series."""
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
