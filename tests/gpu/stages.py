"""The stages of a run on one GPU, each a process of its own with a time limit, in the order of their worth."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.jobs import write_corpus

STEPS = 60
# Device, precision, and whether steps are CUDA graphs: where they are to be, it is an error if they cannot be.
CURVES = {
    "CPU, fp32": ("cpu", "fp32", "off"),
    "CPU, bf16": ("cpu", "bf16", "off"),
    "GPU, bf16": ("cuda", "bf16", "on"),
    "GPU, bf16, not captured": ("cuda", "bf16", "off"),
}


@dataclass(frozen=True)
class Stage:
    """One of them.

    Attributes:
        name: What it is asked for by.
        limit_seconds: After which it is ended; what it has written until then stays.
        command: Arguments of Python; ``{out}`` is the folder of what comes out.
    """

    name: str
    limit_seconds: int
    command: tuple[str, ...]


@dataclass(frozen=True)
class StageEnd:
    """What has become of one.

    Attributes:
        name: The stage's.
        seconds: That it took.
        problem: Why it did not end well; empty if it did.
    """

    name: str
    seconds: float
    problem: str


_RESULTS = "--results", "{out}/results.csv"
_RANK, _KERNELS = ("-m", "boost_core.bench", "rank", *_RESULTS), ("-m", "boost_core.bench", "kernels", *_RESULTS)
_OPTIONS_7B = "--model 7b --tp 4 --micro-batch 4 1 --repeats 10 --interconnect nvlink-h200"
STAGES = (
    Stage(
        "tests", 300, ("-m", "pytest", "-p", "no:cacheprovider", "tests/kernels", "tests/unit/test_initial_values.py")
    ),
    Stage("losses", 180, ("-m", "tests.gpu", "{out}", "--curves")),
    Stage("fp8", 240, ("-m", "tests.benchmarks.fp8", "--out", "{out}")),
    Stage("rank-7b", 560, (*_RANK, *_OPTIONS_7B.split())),
    Stage("rank-1b", 200, (*_RANK, *["--model", "1b", "--tp", "1", "--micro-batch", "4", "--repeats", "10"])),
    Stage("kernels", 280, (*_KERNELS, "--repeats", "20")),
)


def run(stage: Stage, out: Path) -> StageEnd:
    """Run a stage; its output goes to a log of its name."""
    command = [sys.executable, *(argument.format(out=out) for argument in stage.command)]
    started = time.monotonic()
    with (out / f"{stage.name}.log").open("w") as log:
        try:
            status = subprocess.run(command, stdout=log, stderr=log, timeout=stage.limit_seconds).returncode
            problem = f"exit status {status}" if status else ""
        except subprocess.TimeoutExpired:
            problem = f"ended after {stage.limit_seconds} s"
    return StageEnd(stage.name, time.monotonic() - started, problem)


def write_curves(out: Path, cuda: bool) -> None:
    """Train a tiny CoLA for sixty steps in each way of ``CURVES``; the losses go to ``losses.json``.

    Args:
        out: Folder of what comes out.
        cuda: Whether there is a GPU; without one the CPU's curves are all.

    Raises:
        subprocess.CalledProcessError: A job failed.
    """
    corpus = write_corpus(out / "corpus")
    curves = {name: _losses(out, corpus, *how) for name, how in CURVES.items() if cuda or how[0] == "cpu"}
    (out / "losses.json").write_text(json.dumps(curves))


def _losses(out: Path, corpus: Path, device: str, precision: str, graphs: str) -> list[float]:
    folder = out / f"losses-{device}-{precision}-{graphs}"
    folder.mkdir()
    job, reports = folder / "job.json", folder / "reports.jsonl"
    job.write_text(json.dumps(_job(corpus, folder, device, precision, graphs)))
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1"]
    subprocess.run(
        [*launcher, "-m", "boost_core", str(job), "--reports", str(reports)], env=_environment(device), check=True
    )
    lines = map(json.loads, reports.read_text().splitlines())
    return [line["loss"] for line in lines if line["kind"] == "progress"]


def _job(corpus: Path, folder: Path, device: str, precision: str, graphs: str) -> dict[str, Any]:
    return {
        "name": folder.name,
        "model": {"preset": "tiny"},
        "data": {"source": {"kind": "text", "paths": [str(corpus)]}},
        "training": {
            "steps": STEPS, "sequence_length": 64, "global_batch_size": 4, "micro_batch_size": 4,
            "precision": precision, "cuda_graphs": graphs, "evaluate_every_steps": STEPS,
        },
        "optimizer": {"learning_rate": 0.006, "warmup_steps": 10},
        "resources": {"gpus_per_worker": 1 if device == "cuda" else 0},
        "checkpoint": {"url": str(folder / "checkpoints"), "every_steps": STEPS},
    }  # fmt: skip


def _environment(device: str) -> Mapping[str, str]:
    return os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {})
