"""The kit for the first minutes on a GPU: its stages run on the mock, so that they do not fail for want of a trial.

With ``--no-values``, as the mock computes nothing: what stages find out from numbers is not seen here.
"""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.__main__ import LIMITS
from tests.mock_gpu import TORCH, build, trouble
from tests.used import ROOT


@pytest.fixture(scope="session")
def kit(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What stages read of a prepared folder: the corpus."""
    folder, text = tmp_path_factory.mktemp("kit"), ROOT / "boost_core/plan/*.py"
    command = [sys.executable, "-m", "boost_core.data", "tokenize", "--kind", "text", "--validation", "0.2"]
    subprocess.run([*command, text, folder / "corpus"], check=True, capture_output=True)
    return folder


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "torch"),
    [
        *(pytest.param(stage, TORCH[0], marks=() if stage == "smoke" else pytest.mark.nightly) for stage in LIMITS),
        *(pytest.param(stage, TORCH[1], marks=pytest.mark.nightly) for stage in LIMITS),
    ],
)
def test_a_stage_runs_on_the_mock(request: pytest.FixtureRequest, tmp_path: Path, stage: str, torch: str) -> None:
    log, out, mock = tmp_path / "log", tmp_path / "out", build(torch)
    kit = request.getfixturevalue("kit") if stage == "train" else tmp_path
    arguments = ("-m", "tests.gpu", out, stage, "--no-values", "--kit", kit)
    arch = 80 if (stage, torch) == ("kernels", TORCH[1]) else 90  # an A100 has no 8-bit products
    mock.run(*arguments, variables=mock.variables(log=log, arch=arch), seconds=480)
    lines = [json.loads(line) for line in (out / "figures.jsonl").read_text().splitlines()]
    assert lines and not [line for line in lines if line["quantity"] == "failed"]
    assert {line["unit"] for line in lines if line["quantity"] == "peak memory"} <= {"GiB"}
    assert not trouble(log)
