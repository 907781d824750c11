"""What NVML's answers become, with NVML played: there is none without a GPU."""

from types import SimpleNamespace

import pynvml
import pytest
from prometheus_client import CollectorRegistry, generate_latest

from service.gang.worker.rank_metrics import GpuCollector, gauges

UUID = "GPU-8f6d"


class FakeNvml:
    """Two GPUs, the second of which says nothing but its memory."""

    NVMLError = pynvml.NVMLError
    NVML_TEMPERATURE_GPU = pynvml.NVML_TEMPERATURE_GPU

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:  # noqa: N802
        if index > 1:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_INVALID_ARGUMENT)
        return index

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> int:  # noqa: N802
        if uuid != UUID:
            raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_FOUND)
        return 0

    def nvmlDeviceGetUUID(self, handle: int) -> str:  # noqa: N802
        return (UUID, "MIG-41aa")[handle]

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(used=10 * 2**30, total=80 * 2**30)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> SimpleNamespace:  # noqa: N802
        return SimpleNamespace(gpu=_of_whole(handle, 37))

    def nvmlDeviceGetPowerUsage(self, handle: int) -> int:  # noqa: N802
        return _of_whole(handle, 412_500)

    def nvmlDeviceGetTemperature(self, handle: int, sensor: int) -> int:  # noqa: N802
        assert sensor == pynvml.NVML_TEMPERATURE_GPU
        return _of_whole(handle, 61)


def _of_whole(handle: int, value: int) -> int:
    if handle == 1:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)
    return value


def values(*gpus: str) -> dict[tuple[str, str], float]:
    samples = [sample for family in gauges(FakeNvml(), gpus) for sample in family.samples]
    return {(sample.name.removeprefix("boost_rank_gpu_"), sample.labels["gpu"]): sample.value for sample in samples}


@pytest.mark.parametrize("gpu", ["0", UUID])
def test_a_gpu_is_found_by_number_and_by_uuid_in_base_units(gpu: str) -> None:
    assert values(gpu) == {
        ("utilization_ratio", UUID): 0.37,
        ("memory_used_bytes", UUID): 10 * 2**30,
        ("memory_total_bytes", UUID): 80 * 2**30,
        ("power_watts", UUID): 412.5,
        ("temperature_celsius", UUID): 61,
    }


def test_what_nvml_does_not_say_is_left_out() -> None:
    assert values("1", "7", "GPU-none").keys() == {
        ("memory_used_bytes", "MIG-41aa"),
        ("memory_total_bytes", "MIG-41aa"),
    }


def test_without_nvml_a_scrape_says_nothing_and_does_not_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> None:
        raise pynvml.NVMLError(pynvml.NVML_ERROR_LIBRARY_NOT_FOUND)

    monkeypatch.setattr(pynvml, "nvmlInit", absent)
    registry = CollectorRegistry()
    registry.register(GpuCollector(["0"]))
    assert generate_latest(registry) == b""
