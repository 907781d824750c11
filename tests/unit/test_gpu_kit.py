"""The kit as it is on a GPU machine: a folder beside a Python that has torch and no package of ours."""

import os
import subprocess
import sys
import time
import venv
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement

from tests.gpu import __main__ as runner
from tests.gpu.page import PAGE, STORED, page, read

CASES = {"environment": {"gpu": True, "device": "a GPU", "commit": "abc1234", "versions": "torch 2.11.0"}}
STAGE = """
import json, os, sys, time
arguments = sys.argv[1:]
pipe = os.fdopen(int(arguments[arguments.index("--messages") + 1]), "w")
names = arguments[arguments.index("--cases") + 1 :] if "--cases" in arguments else [{names}]
def send(**message): print(json.dumps(message), file=pipe, flush=True)
send(cases=names, environment={environment})
for name in names:
    send(begin=name)
    send(figure=(name, len(name) / 2, "ms"))
    print("in the log:", name, flush=True)
    {body}
"""


def run_stage(tmp_path: Path, names: list[str], body: str, limits: runner.Limits) -> list[dict[str, Any]]:
    text = STAGE.format(names=", ".join(map(repr, names)), body=body, environment=CASES["environment"])
    runner.run_stage([sys.executable, "-c", text], "stage", output := runner.Output(tmp_path), limits)
    assert read(tmp_path / "figures.jsonl") == output.lines
    return output.lines


def quantities(lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(line["case"], line["quantity"]) for line in lines]


def test_a_case_that_takes_its_process_with_it_leaves_the_others(tmp_path: Path) -> None:
    body = "name == 'b' and os.kill(os.getpid(), 11)"
    lines = run_stage(tmp_path, ["a", "b", "c"], body, runner.Limits(9, time.monotonic() + 20))
    assert quantities(lines) == [("a", "a"), ("b", "b"), ("b", "failed"), ("c", "c")]
    assert lines[2]["value"] == "exit status -11, see log.txt"
    assert {line["device"] for line in lines} == {"a GPU"}
    assert (tmp_path / "log.txt").read_text().count("in the log") == 3
    assert runner.table(lines).splitlines()[1] == "stage | b | b 0.5 ms, failed exit status -11, see log.txt"


@pytest.mark.full
def test_a_case_that_hangs_is_ended_with_its_children_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    child = "import subprocess; subprocess.run(['sh', '-c', 'echo $$ > pid; sleep 60'])"
    body = f"name == 'b' and exec({child!r})"
    monkeypatch.chdir(tmp_path)
    lines = run_stage(tmp_path, ["a", "b", "c"], body, runner.Limits(3.0, time.monotonic() + 30))
    assert quantities(lines) == [("a", "a"), ("b", "b"), ("b", "failed"), ("c", "c")]
    assert lines[2]["value"] == "took longer than the case may"
    process = Path(f"/proc/{(tmp_path / 'pid').read_text().strip()}/stat")
    assert not process.exists() or process.read_text().split()[2] == "Z"  # init has yet to reap it


@pytest.mark.full
def test_a_stage_ends_in_time(tmp_path: Path) -> None:
    started = time.monotonic()
    lines = run_stage(tmp_path, ["a", "b"], "time.sleep(60)", runner.Limits(50, started + 4))
    assert quantities(lines) == [("a", "a"), ("a", "failed")] and "stage had left" in lines[1]["value"]
    assert time.monotonic() - started < 5


def test_a_stage_that_cannot_start_is_recorded_once(tmp_path: Path) -> None:
    output = runner.Output(tmp_path)
    command = [sys.executable, "-c", "import nothing_of_this_name"]
    runner.run_stage(command, "smoke", output, runner.Limits(9, time.monotonic() + 9))
    assert quantities(output.lines) == [("start", "failed")]
    assert "nothing_of_this_name" in (tmp_path / "log.txt").read_text()


def test_the_stages_that_run_by_default_take_eight_minutes_at_most() -> None:
    assert sum(runner.LIMITS[name] for name in runner.DEFAULT) <= 470  # and some seconds to install and to end
    assert min(runner.LIMITS[name] for name in ("single", "rank7b")) > runner.CASE_LIMIT


def test_the_page_is_made_from_the_stored_figures() -> None:
    assert PAGE.read_text() == page(read(STORED))


def test_a_page_has_the_newest_figures_of_each_gpu_and_leaves_the_rest_empty() -> None:
    line = CASES["environment"] | {"stage": "single", "case": "cola", "quantity": "step", "value": 81.0, "unit": "ms"}
    lines = [line, line | {"value": 80.25, "commit": "def5678"}, line | {"device": "another", "value": 60.0}]
    text = page(lines)
    first, _, second = text.partition("## another")
    assert "| cola | 80.25 ms |  |" in first and "| dense |  |" in first and "def5678" in first
    assert "abc1234" not in first and "| cola | 60 ms |" in second


@pytest.fixture(scope="module")
def bare_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python with pip, torch, NumPy and what these bring, and nothing else."""
    folder = tmp_path_factory.mktemp("gpu-machine")
    venv.create(folder)
    (site,) = folder.glob("lib/python*/site-packages")
    for name in _required({"pip", "torch", "numpy"}):
        files = distribution(name).files or []
        for top in {file.parts[0] for file in files if file.parts[0] not in ("..", "bin", "__pycache__")}:
            source = Path(str(distribution(name).locate_file(top)))
            if source.exists() and not (site / top).exists():
                (site / top).symlink_to(source)
    return folder / "bin"


def _required(names: set[str]) -> set[str]:
    """Distributions with all that they require here."""
    found: set[str] = set()
    while names:
        found |= names
        texts = [text for name in names for text in distribution(name).requires or []]
        required = [Requirement(text) for text in texts]
        names = {each.name for each in required if each.marker is None or each.marker.evaluate({"extra": ""})} - found
    return found


@pytest.mark.nightly
@pytest.mark.timeout(600)  # three minutes: each stage is a process that imports torch
def test_every_stage_runs_on_a_machine_with_torch_alone(tmp_path: Path, bare_python: Path) -> None:
    kit, out = tmp_path / "kit", tmp_path / "out"
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    subprocess.run([sys.executable, "-m", "tests.gpu.kit", "--python", python, "--out", kit], check=True)
    assert sum(path.stat().st_size for path in kit.rglob("*") if path.is_file()) < 10 * 2**20
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL_ENV"))}
    environment = clean | {
        "PATH": f"{bare_python}:/usr/bin:/bin", "OUT": str(out), "TMPDIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": "",
        "HTTPS_PROXY": "http://127.0.0.1:9", "HTTP_PROXY": "http://127.0.0.1:9", "OMP_NUM_THREADS": "1",
    }  # fmt: skip
    command = ["sh", kit / "run.sh", *runner.LIMITS]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True)
    lines = read(out / "figures.jsonl")
    failed = [line for line in lines if line["quantity"] in ("failed", "disagrees") or line["unit"] == "WRONG"]
    assert not failed and done.returncode == 0, (failed, (out / "log.txt").read_text()[-3000:])
    assert {path.name for path in out.iterdir()} == {"figures.jsonl", "log.txt"}
    assert {line["stage"] for line in lines} == set(runner.LIMITS)
    assert "single | cola | peak memory, planned" in done.stdout
