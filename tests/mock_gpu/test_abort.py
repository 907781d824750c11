"""How a gang ends on the mock: nobody waits for ever, the error is the reason, and memory is given back."""

import subprocess
from pathlib import Path

import pytest

from tests.mock_gpu import MockGpu

RANKS = {"hang": 2, "bad_data": 2, "out_of_memory": 2, "broken": 1}


@pytest.mark.parametrize(
    "scenario", [pytest.param(each, marks=() if each == "hang" else pytest.mark.full) for each in RANKS]
)
def test_a_gang_ends(each_mock: MockGpu, tmp_path: Path, scenario: str) -> None:
    logs = [tmp_path / f"log of {rank}" for rank in range(RANKS[scenario])]
    processes = [
        each_mock.start(
            "-m", "tests.mock_gpu.faults", scenario, rank, len(logs), tmp_path,
            variables=each_mock.variables(log, rendezvous=tmp_path),
        )
        for rank, log in enumerate(logs)
    ]  # fmt: skip
    try:
        for process in processes:
            output, _ = process.communicate(timeout=60)
            assert process.returncode == 0, output
    except subprocess.TimeoutExpired:
        raise AssertionError("the ranks do not end") from None
    finally:
        for process in processes:
            process.kill()
    for log in logs:  # which is collective: whoever has failed would wait for the others
        assert "nccl finalize" not in log.read_text()
