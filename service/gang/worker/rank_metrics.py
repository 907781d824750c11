"""A rank's metrics, for Prometheus to scrape from the rank's own process: step counters and GPU gauges.

The series name no job or rank: these labels come from ``GET /v1/metrics/targets``, where the endpoint is found.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from prometheus_client import CollectorRegistry, ProcessCollector, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.registry import Collector

from boost_core.train import StepTimes, Totals


class StepCollector(Collector):
    """Counts a process's steps and their parts over its life. The step loop adds and scrapes read, each atomically."""

    def __init__(self) -> None:
        self._steps = 0
        self._parts: defaultdict[str, float] = defaultdict(float)
        self._communication: dict[tuple[str, str], Totals] = {}
        self._lock = threading.Lock()

    def add(self, times: StepTimes) -> None:
        """Add a step."""
        with self._lock:
            self._steps += 1
            for part, seconds in vars(times.parts).items():
                self._parts[part] += seconds
            for line, totals in times.communication.items():
                self._communication[line] = self._communication.get(line, Totals()) + totals

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield the counters as of the newest step."""
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


@dataclass(frozen=True)
class _Gauge:
    """A gauge of a GPU; ``read`` takes NVML and its handle of the GPU."""

    name: str
    help: str
    read: Callable[[Any, Any], float]


_GAUGES = (
    _Gauge(
        "utilization_ratio",
        "Share of time in which a kernel ran, from 0 to 1.",
        lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    ),
    _Gauge("memory_used_bytes", "Memory in use.", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used),
    _Gauge("memory_total_bytes", "Total memory.", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total),
    _Gauge("power_watts", "Power drawn.", lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
    _Gauge(
        "temperature_celsius",
        "Temperature of the chip.",
        lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    ),
)


class GpuCollector(Collector):
    """Collects gauges of some GPUs; values that NVML does not provide are left out.

    Args:
        gpus: GPUs by NVML's index or by UUID.
    """

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus = gpus

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """Yield the present values of the gauges."""
        if self._gpus and self._nvml is not None:
            yield from gauges(self._nvml, self._gpus)

    @cached_property
    def _nvml(self) -> Any | None:
        """The initialised module; ``None`` if there is no NVML."""
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return None
        return pynvml


def gauges(nvml: Any, gpus: Sequence[str]) -> list[GaugeMetricFamily]:
    """Read the gauges of GPUs from an initialised NVML.

    Args:
        nvml: The module ``pynvml``.
        gpus: As for ``GpuCollector``.
    """
    families = [GaugeMetricFamily(f"boost_rank_gpu_{each.name}", each.help, labels=["gpu"]) for each in _GAUGES]
    for gpu in gpus:
        try:
            handle = _handle(nvml, gpu)
            uuid = nvml.nvmlDeviceGetUUID(handle)
        except nvml.NVMLError:
            continue
        for gauge, family in zip(_GAUGES, families, strict=True):
            try:
                family.add_metric([uuid], gauge.read(nvml, handle))
            except nvml.NVMLError:  # as for a part of a GPU (MIG), which has no utilization
                continue
    return families


def _handle(nvml: Any, gpu: str) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(int(gpu)) if gpu.isdigit() else nvml.nvmlDeviceGetHandleByUUID(gpu)


def serve_metrics(own: Sequence[Collector], gpus: Sequence[str], address: str, ports: range) -> str | None:
    """Serve a process's metrics over HTTP for as long as it lives.

    Args:
        own: What the process measures itself.
        gpus: The GPUs that it may use, by index or UUID.
        address: The address to listen on.
        ports: The first free one of these is used.

    Returns:
        ``host:port``; ``None`` if none of the ports is free.
    """
    registry = CollectorRegistry()
    for collector in (*own, GpuCollector(gpus)):
        registry.register(collector)
    ProcessCollector(registry=registry)
    host = f"[{address}]" if ":" in address else address
    for port in ports:
        with suppress(OSError):
            start_http_server(port, address, registry)
            return f"{host}:{port}"
    return None
