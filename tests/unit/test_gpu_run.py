import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from boost_core.bench.results import Environment, Row, append
from tests.gpu import bundle
from tests.gpu.report import losses, write_report
from tests.gpu.stages import Stage, StageEnd, run

ENVIRONMENT = Environment("abc1234", "a GPU", "2.11.0", "3.6.0")
EXACT = [2.0, 1.0]


def test_the_gpus_losses_are_held_to_what_bf16_makes_on_the_cpu() -> None:
    curves = {"CPU, fp32": EXACT, "CPU, bf16": [2.002, 1.001]}
    captured, plain = "GPU, bf16", "GPU, bf16, not captured"
    text, right = losses(curves | {captured: [1.998, 0.999], plain: [1.998, 1.0]})
    assert right and "graphs are 1.0e-03 from" in text
    for off in (captured, plain):
        text, right = losses(curves | {captured: EXACT, plain: EXACT} | {off: [2.002, 1.003]})
        assert not right
        assert "**not within** 2 times" in text and f"| {off} | 1.00300 | 3.0e-03 |" in text
        assert not losses(curves | {captured: EXACT, plain: EXACT} | {off: [2.0]})[1]  # it ended early


def test_a_report_has_what_was_measured_and_what_went_wrong(tmp_path: Path) -> None:
    append(tmp_path / "results.csv", ENVIRONMENT, [Row("rank", "7b, btp", "step", "s", 0.1, 0.2, 0.3)])
    assert write_report(tmp_path, ENVIRONMENT, [StageEnd("rank-7b", 12.0, "")])
    assert not write_report(
        tmp_path, ENVIRONMENT, [StageEnd("rank-7b", 12.0, ""), StageEnd("tests", 3.0, "exit status 1")]
    )
    report = (tmp_path / "report.md").read_text()
    assert "7b, btp  200.000 ms (100.000 – 300.000)" in report
    assert "| tests | 3 | exit status 1 |" in report
    assert "commit abc1234 on a GPU, torch 2.11.0, Triton 3.6.0" in report


def test_a_stage_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    end = run(Stage("slow", 1, ("-c", "import time; print('begun', flush=True); time.sleep(60)")), tmp_path)
    assert end.problem == "ended after 1 s"
    assert (tmp_path / "slow.log").read_text() == "begun\n"
    assert run(Stage("wrong", 9, ("-c", "raise SystemExit(3)")), tmp_path).problem == "exit status 3"


def test_wheels_are_those_that_the_machine_lacks() -> None:
    names = {bundle._normal(each) for each in bundle.requirements({"torch", "numpy"})}
    assert {"pydantic", "pyyaml", "tokenizers", "pytest"} <= names
    assert not names & {"torch", "numpy", "ruff", "ray"}


@pytest.mark.full
def test_the_archive_runs_where_it_is_unpacked(tmp_path: Path) -> None:
    archive, out = tmp_path / "bundle.tar.gz", tmp_path / "out"
    bundle.write(archive, [])
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path / "there", filter="data")
    here = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [tmp_path / "there" / "run", out, "losses"],
        env=os.environ | here | {"CUDA_VISIBLE_DEVICES": ""}, cwd=tmp_path, check=True,
    )  # fmt: skip
    report = (out / "report.md").read_text()
    assert "| CPU, bf16 | " in report and "There is no GPU." in report
    assert re.search(r"at commit [0-9a-f]{7,} on", report)
    assert (out / "losses.svg").exists()
