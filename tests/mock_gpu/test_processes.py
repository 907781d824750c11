"""Processes and CUDA: who touches it, forks, and what NVML tells without it."""

import json
import os
import subprocess
from pathlib import Path

import pytest

from service.gang.ray import fork_client
from tests.mock_gpu import MockGpu, trouble

ON_THE_GPU = """
import json, os, sys, torch
with open(sys.argv[2], "a") as file:
    print(json.dumps([os.getpid(), os.getppid(), torch.ones(2, device="cuda").tolist()]), file=file)
"""


def touched(log: Path) -> list[int]:
    """The processes that have touched CUDA."""
    return [int(line.split()[2]) for line in log.read_text().splitlines() if line.startswith("TOUCHED")]


@pytest.mark.full
def test_the_fork_server_never_touches_cuda_and_its_forks_can(each_mock: MockGpu, tmp_path: Path) -> None:
    log, script, told = tmp_path / "log", tmp_path / "rank.py", tmp_path / "told"
    script.write_text(ON_THE_GPU)
    raylet = subprocess.Popen(["sleep", "600"])  # with which the server ends
    try:
        command = [each_mock.python, "-I", "-S", fork_client.__file__, script, f"--raylet-name={tmp_path}/raylet", told]
        environment = {**each_mock.variables(log), "RAY_RAYLET_PID": str(raylet.pid)}
        for _ in range(2):
            subprocess.run(command, env=environment, check=True, timeout=120)
    finally:
        raylet.kill()
        raylet.wait()
    (first, server, values), (second, same_server, again) = map(json.loads, told.read_text().splitlines())
    assert values == again == [1, 1]
    assert server == same_server != os.getpid()  # they are forks of one process
    assert touched(log) == [first, second]
    assert not trouble(log)


@pytest.mark.full
def test_a_fork_of_a_process_that_has_touched_cuda_is_refused(mock: MockGpu, tmp_path: Path) -> None:
    log = tmp_path / "log"
    script = """
import ctypes, os, torch
torch.ones(1, device="cuda")
if os.fork() == 0:
    count = ctypes.c_int()
    os._exit(ctypes.CDLL(None).cudaGetDeviceCount(ctypes.byref(count)))
print(os.waitstatus_to_exitcode(os.wait()[1]))
"""
    assert mock.run("-c", script, variables=mock.variables(log)) == "3\n"  # cudaErrorInitializationError
    (line,) = trouble(log)
    assert line.startswith("FORKED")


NVML = """
import json, sys, torch
from service.gang.worker.rank_metrics import GpuCollector
families = GpuCollector(sys.argv[1:]).collect()
gauges = {family.name: {s.labels["gpu"]: s.value for s in family.samples} for family in families}
print(json.dumps([torch.cuda.device_count(), gauges]))
"""
GPU, INSTANCE = "GPU-00000000-0000-0000-0000-000000000001", "MIG-00000000-0000-0000-0001-000000000000"


@pytest.mark.full
@pytest.mark.parametrize("present", [False, True])
def test_with_nvml_gpus_are_counted_and_watched_without_touching_cuda(
    mock: MockGpu, tmp_path: Path, present: bool
) -> None:
    log = tmp_path / "log"
    variables = mock.variables(log, nvml=present, count=2)
    count, gauges = json.loads(mock.run("-c", NVML, "1", GPU, variables=variables))
    assert count == 2
    assert bool(touched(log)) == (not present)
    if not present:
        assert gauges == {}
        return
    assert {name.removeprefix("boost_rank_gpu_"): values for name, values in gauges.items()} == {
        "utilization_ratio": {GPU: 0.5}, "memory_used_bytes": {GPU: 2**30}, "memory_total_bytes": {GPU: 85520809984},
        "power_watts": {GPU: 350}, "temperature_celsius": {GPU: 60},
    }  # fmt: skip


@pytest.mark.full
def test_of_a_part_of_a_gpu_only_memory_is_known(mock: MockGpu, tmp_path: Path) -> None:
    variables = {**mock.variables(tmp_path / "log", nvml=True, mig=1), "CUDA_VISIBLE_DEVICES": INSTANCE}
    count, gauges = json.loads(mock.run("-c", NVML, INSTANCE, variables=variables))
    assert count == 1
    known = {name.removeprefix("boost_rank_gpu_"): values for name, values in gauges.items() if values}
    assert known == {"memory_used_bytes": {INSTANCE: 2**30}, "memory_total_bytes": {INSTANCE: 85520809984 // 2}}
