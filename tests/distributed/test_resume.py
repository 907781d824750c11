"""The trainer under torchrun: killed with SIGKILL and started again, it continues bit for bit."""

import os
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from boost_core.__main__ import main
from boost_core.checkpoint.folder import CheckpointFolder
from boost_core.config import JobSpec
from tests.distributed.recording import losses, read_reports, train_and_record
from tests.jobs import tiny_job, write_corpus
from tests.ranks import Ranks

STEPS = {"steps": 40, "evaluate_every_steps": 1000}


def start(
    spec: JobSpec, folder: Path, name: str, processes: int = 2, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[str]:
    job = folder / f"{name}.json"
    job.write_text(spec.model_dump_json())
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes), "-m", "boost_core"]
    return subprocess.Popen(
        [*command, str(job), "--reports", str(folder / f"{name}.jsonl")],
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"} | dict(environment or {}),
    )  # fmt: skip


def kill_once_saved(process: subprocess.Popen[str], folder: CheckpointFolder, step: int) -> None:
    deadline = time.monotonic() + 60
    while step not in folder.steps():
        assert time.monotonic() < deadline and process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    kill(process)


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL for the launcher and all its ranks, which have sessions of their own."""
    launcher = psutil.Process(process.pid)
    for each in [*launcher.children(recursive=True), launcher]:
        with suppress(psutil.NoSuchProcess):
            each.kill()
    process.wait()


@pytest.mark.nightly
def test_interrupted_and_uninterrupted_runs_have_equal_losses(ranks: Ranks, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "corpus")
    whole, _ = ranks.run(2, train_and_record, tiny_job(corpus, tmp_path / "whole", training=STEPS))

    spec = tiny_job(corpus, tmp_path / "killed", training=STEPS)
    kill_once_saved(start(spec, tmp_path, "before"), CheckpointFolder(str(tmp_path / "killed")), 6)
    resumed = start(spec, tmp_path, "after")
    output, _ = resumed.communicate(timeout=120)
    assert resumed.returncode == 0, output

    expected = losses(whole)
    before = losses(read_reports(tmp_path / "before.jsonl"))
    after = read_reports(tmp_path / "after.jsonl")
    assert 6 <= after[0].step < 40
    assert max(before) < 40
    assert losses(after) == {step: loss for step, loss in expected.items() if step > after[0].step}
    assert before == {step: loss for step, loss in expected.items() if step <= max(before)}


@pytest.mark.parametrize(
    ("job", "message"),
    [
        ("name: x\n", "model: is missing; add it"),
        ("- a list\n", "must hold a mapping"),
        ("name: [\n", "is not YAML"),
    ],
)
def test_a_bad_job_file_is_one_readable_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], job: str, message: str
) -> None:
    path = tmp_path / "job.yaml"
    path.write_text(job)
    monkeypatch.setattr(sys, "argv", ["boost_core", str(path)])
    assert main() == 2
    said = capsys.readouterr().err
    assert message in said
    assert "Traceback" not in said


@pytest.mark.full
def test_without_torchrun_it_says_how_to_start(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(tiny_job(tmp_path, tmp_path).model_dump_json())
    done = subprocess.run([sys.executable, "-m", "boost_core", str(path)], capture_output=True, text=True)
    assert done.returncode == 2
    assert "torchrun --nproc-per-node 2" in done.stderr
