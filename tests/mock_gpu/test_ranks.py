"""Several ranks on the mock: their collectives wait for one another through NCCL's entry points."""

import subprocess
from pathlib import Path

import pytest

from tests.mock_gpu import MockGpu, trouble
from tests.mock_gpu.rank import SCENARIOS

RANKS = {"numbers": 3, "split_groups": 4}
ORDERED = {"hang": {"hang_at": 1}}  # of rank 1, by its environment
WRONG = {"mismatch": "MISMATCH"}
IN_MAKE_TEST = ("numbers", "hang", "abort_of_a_captured_communicator", "tensor_parallel_steps")


@pytest.mark.full
@pytest.mark.parametrize(
    "scenario", [name if name in IN_MAKE_TEST else pytest.param(name, marks=pytest.mark.nightly) for name in SCENARIOS]
)
def test_ranks(each_mock: MockGpu, tmp_path: Path, scenario: str) -> None:
    size = RANKS.get(scenario, 2)
    logs = [tmp_path / f"log of {rank}" for rank in range(size)]
    processes = []
    for rank, log in enumerate(logs):
        ordered = ORDERED.get(scenario, {}) if rank == 1 else {}
        variables = each_mock.variables(log, rendezvous=tmp_path, **ordered)
        arguments = ("-m", "tests.mock_gpu.rank", scenario, rank, size, tmp_path / "meeting")
        processes.append(each_mock.start(*arguments, variables=variables))
    try:
        for process in processes:
            output, _ = process.communicate(timeout=120)
            assert process.returncode == 0, output
    except subprocess.TimeoutExpired:
        raise AssertionError("the ranks do not end") from None
    finally:
        for process in processes:
            process.kill()
    for log in logs:
        assert all(line.startswith(WRONG[scenario]) if scenario in WRONG else False for line in trouble(log))
    assert not list(tmp_path.glob("mock-nccl-*"))
