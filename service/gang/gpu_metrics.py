"""What NVML says of a rank's GPUs whenever it is asked; nothing where there is no NVML."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from prometheus_client.core import GaugeMetricFamily
from prometheus_client.registry import Collector


@dataclass(frozen=True)
class _Gauge:
    """A figure of a GPU; ``read`` takes NVML and its handle of the GPU."""

    name: str
    help: str
    read: Callable[[Any, Any], float]


_GAUGES = (
    _Gauge(
        "utilization_ratio",
        "Part of the time in which a kernel ran, from 0 to 1.",
        lambda nvml, gpu: nvml.nvmlDeviceGetUtilizationRates(gpu).gpu / 100,
    ),
    _Gauge("memory_used_bytes", "Memory in use.", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).used),
    _Gauge("memory_total_bytes", "Memory in all.", lambda nvml, gpu: nvml.nvmlDeviceGetMemoryInfo(gpu).total),
    _Gauge("power_watts", "Power drawn.", lambda nvml, gpu: nvml.nvmlDeviceGetPowerUsage(gpu) / 1000),
    _Gauge(
        "temperature_celsius",
        "Temperature of the chip.",
        lambda nvml, gpu: nvml.nvmlDeviceGetTemperature(gpu, nvml.NVML_TEMPERATURE_GPU),
    ),
)


class GpuCollector(Collector):
    """Collects gauges of some GPUs; what NVML does not say of one is left out.

    Args:
        gpus: By number, as NVML counts them, or by UUID.
    """

    def __init__(self, gpus: Sequence[str]) -> None:
        self._gpus = gpus

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """The gauges as of now."""
        if self._gpus and self._nvml is not None:
            yield from gauges(self._nvml, self._gpus)

    @cached_property
    def _nvml(self) -> Any | None:
        """The module, initialised; ``None`` where there is no NVML."""
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError:
            return None
        return pynvml


def gauges(nvml: Any, gpus: Sequence[str]) -> list[GaugeMetricFamily]:
    """What NVML, initialised, says of GPUs.

    Args:
        nvml: The module ``pynvml``.
        gpus: As of ``GpuCollector``.
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
            except nvml.NVMLError:  # as of a part of a GPU, which has no utilization
                continue
    return families


def _handle(nvml: Any, gpu: str) -> Any:
    return nvml.nvmlDeviceGetHandleByIndex(int(gpu)) if gpu.isdigit() else nvml.nvmlDeviceGetHandleByUUID(gpu)
