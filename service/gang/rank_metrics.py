"""A rank's metrics: what its steps took, as counters that Prometheus scrapes from the rank's own process.

The series name no job and no rank: whoever finds the endpoint, by ``GET /v1/metrics/targets``, gives them these labels.
"""

import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from boost_core.train import StepTimes, Totals
from service.gang.gpu_metrics import GpuCollector


class StepCollector(Collector):
    """Counts a process's steps and their parts over its life. The step loop adds, a scrape reads, each in one piece."""

    def __init__(self) -> None:
        self._steps = 0
        self._parts: defaultdict[str, float] = defaultdict(float)
        self._communication: dict[tuple[str, str], Totals] = {}
        self._lock = threading.Lock()

    def add(self, times: StepTimes) -> None:
        """Take a step."""
        with self._lock:
            self._steps += 1
            for part, seconds in vars(times.parts).items():
                self._parts[part] += seconds
            for line, totals in times.communication.items():
                self._communication[line] = self._communication.get(line, Totals()) + totals

    def collect(self) -> Iterator[CounterMetricFamily]:
        """The counters as of the newest step."""
        with self._lock:
            steps, parts, lines = self._steps, dict(self._parts), dict(self._communication)
        yield CounterMetricFamily("boost_rank_steps", "Steps done.", steps)
        seconds = CounterMetricFamily(
            "boost_rank_step_part_seconds", "Seconds of steps by part; the parts add up to the steps.", labels=["part"]
        )
        for part, value in parts.items():
            seconds.add_metric([part], value)
        yield seconds
        yield _by_line("seconds", "Seconds of collectives from start to end.", lines, "seconds")
        yield _by_line("calls", "Collectives.", lines, "calls")
        yield _by_line("bytes", "Payload bytes of collectives.", lines, "bytes")
        exposed = "Seconds of collectives that were waited for."
        yield _by_line("seconds", exposed, lines, "exposed_seconds", prefix="boost_rank_exposed_communication")


def _by_line(
    unit: str, text: str, lines: dict[tuple[str, str], Totals], field: str, prefix: str = "boost_rank_communication"
) -> CounterMetricFamily:
    family = CounterMetricFamily(f"{prefix}_{unit}", text, labels=["collective", "group"])
    for line, totals in lines.items():
        family.add_metric(line, getattr(totals, field))
    return family


def serve_metrics(steps: StepCollector, gpus: Sequence[str], address: str, ports: range) -> str | None:
    """Serve a process's metrics over HTTP for as long as it lives.

    Args:
        steps: Its steps.
        gpus: The GPUs that it may use, by number or UUID.
        address: The address to listen on.
        ports: The first of these that is free is taken.

    Returns:
        ``host:port``; ``None`` if none of the ports is free.
    """
    registry = CollectorRegistry()
    for collector in (steps, GpuCollector(gpus)):
        registry.register(collector)
    ProcessCollector(registry=registry)
    host = f"[{address}]" if ":" in address else address
    for port in ports:
        with suppress(OSError):
            start_http_server(port, address, registry)
            return f"{host}:{port}"
    return None
