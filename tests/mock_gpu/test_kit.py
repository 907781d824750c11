"""The kit for the first minutes on a GPU: its stages run on the mock, so that they do not fail for want of a trial.

What stages find out from numbers is not seen here: ``smoke``, ``models``, ``train`` and ``kernels``, which compare
numbers or rates, are left out.
"""

import json
from pathlib import Path

import pytest

from tests.mock_gpu import MockGpu, trouble

STAGES = ("single", "rank7b", "fp8", "profile")


@pytest.mark.full
@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_runs_on_the_mock(each_mock: MockGpu, tmp_path: Path, stage: str) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    variables = each_mock.variables(log=log) | {"MINUTES_MOCK": "1"}
    each_mock.run("-m", "tests.gpu", out, stage, variables=variables, seconds=480)
    lines = [json.loads(line) for line in (out / "figures.jsonl").read_text().splitlines()]
    assert lines and not [line for line in lines if line["quantity"] == "failed"]
    assert {line["unit"] for line in lines if line["quantity"] == "peak memory"} <= {"GiB"}
    assert not trouble(log)
