"""What this process measures itself: requests, the scheduler's passes, memory. Lost when it ends."""

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from boost_core import __version__

_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0)  # seconds
_LONG_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 120.0)


class HttpMetrics:
    """Metrics of requests.

    Attributes:
        requests: Requests answered.
        seconds: Their durations, event streams excluded.
        streams: Open event streams.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = Counter(
            "boost_http_requests", "Requests answered.", ("method", "route", "status"), registry=registry
        )
        self.seconds = Histogram(
            "boost_http_request_duration_seconds",
            "Time from the first byte of a request to the last byte of its response; event streams are excluded.",
            ("method", "route"),
            buckets=_BUCKETS,
            registry=registry,
        )
        self.streams = Gauge("boost_http_streams", "Open event streams.", registry=registry)


class SchedulerMetrics:
    """Metrics of the scheduler.

    Attributes:
        seconds: Durations of passes.
        good: Passes that succeeded.
        failed: Passes that failed.
        leading: Whether this process schedules.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.seconds = Histogram(
            "boost_scheduler_pass_duration_seconds",
            "Duration of the scheduler's passes.",
            buckets=_LONG_BUCKETS,
            registry=registry,
        )
        self.leading = Gauge("boost_scheduler_leading", "1 if this process schedules, else 0.", registry=registry)
        passes = Counter("boost_scheduler_passes", "Passes of the scheduler.", ("outcome",), registry=registry)
        self.good, self.failed = passes.labels("ok"), passes.labels("failed")


class ProcessMetrics(Collector):
    """Everything that a process measures itself, in a registry of its own: a process may have several."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self.http, self.scheduler = HttpMetrics(self._registry), SchedulerMetrics(self._registry)
        Info("boost_build", "The version in use; always 1.", registry=self._registry).info({"version": __version__})
        ProcessCollector(registry=self._registry)

    def collect(self) -> Iterator[Metric]:
        """Yield the present metrics, without their creation times, which would double the series."""
        for metric in self._registry.collect():
            metric.samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
            yield metric
