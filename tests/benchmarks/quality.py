"""What each family learns of the default corpus in the same number of steps: ``python -m tests.benchmarks.quality``.

Dense, SVD, SVD under LORO, CoLA and LaX, at two sizes, one rank each, the same batches in the same order. The learning
rate is chosen at the smaller size, among the same few for all, by the loss on validation text. Takes most of an hour.
"""

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from boost_core.architecture import model_flops_per_token, parameter_count
from boost_core.config import JobSpec
from boost_core.messages import EvaluationReport, report_adapter
from tests.benchmarks.figures import FIGURES, draw_lines, write_table

STEPS, WARMUP = 400, 40
SEQUENCE_LENGTH, BATCH = 128, 16
LEARNING_RATES = (0.001, 0.003, 0.01)
SIZES: dict[str, dict[str, Any]] = {
    "small": {"hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4, "num_attention_heads": 4},
    "medium": {"hidden_size": 256, "intermediate_size": 688, "num_hidden_layers": 6, "num_attention_heads": 8},
}
FAMILIES: dict[str, dict[str, Any]] = {
    "dense": {"model": {"family": "dense"}},
    "svd": {"model": {"family": "svd"}},
    "svd, loro": {"model": {"family": "svd"}, "optimizer": {"kind": "loro", "loro": {"exact_every_steps": 100}}},
    "cola": {"model": {"family": "cola", "gate_activation": True}},
    "lax over cola": {"model": {"family": "lax", "gate_activation": True}},
}


@dataclass(frozen=True)
class Run:
    """One training run.

    Attributes:
        spec: The job.
        validation: Loss on validation text by step, nats a token.
        unigram_entropy: Of that text.
        peak_bytes: Most resident memory of the rank's process.
    """

    spec: JobSpec
    validation: dict[int, float]
    unigram_entropy: float
    peak_bytes: int

    @property
    def final(self) -> float:
        """Loss on validation text after the last step."""
        return list(self.validation.values())[-1]


def job(family: str, size: str, learning_rate: float) -> JobSpec:
    """The job of one cell of the table; the rank is a quarter of the hidden size."""
    choice, shape = FAMILIES[family], SIZES[size]
    rank = {} if family == "dense" else {"rank": shape["hidden_size"] // 4}
    return JobSpec.model_validate(
        {
            "name": f"quality-{size}",
            "model": shape | rank | choice["model"],
            "training": {
                "steps": STEPS, "sequence_length": SEQUENCE_LENGTH, "global_batch_size": BATCH,
                "micro_batch_size": BATCH, "evaluate_every_steps": 50, "evaluate_sequences": 256,
            },
            "optimizer": {"learning_rate": learning_rate, "warmup_steps": WARMUP} | choice.get("optimizer", {}),
            "checkpoint": {"every_steps": STEPS},
        }
    )  # fmt: skip


def run(spec: JobSpec) -> Run:
    """Train in a process of its own and read its reports."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        (home / "job.json").write_text(spec.model_dump_json())
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "1"]
        command += ["-m", "boost_core", str(home / "job.json"), "--reports", str(home / "reports")]
        process = subprocess.Popen(command, cwd=home, stdout=subprocess.DEVNULL)
        peak = Peak(process.pid)
        peak.start()
        if process.wait():
            raise SystemExit(f"{spec.name}: training failed")
        peak.join()
        reports = [report_adapter.validate_json(line) for line in (home / "reports").read_text().splitlines()]
    evaluations = [report for report in reports if isinstance(report, EvaluationReport)]
    validation = {report.step: report.loss for report in evaluations}
    return Run(spec, validation, evaluations[0].unigram_entropy, peak.bytes)


class Peak(threading.Thread):
    """Watches how large the rank of a torchrun gets."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self.launcher, self.bytes = psutil.Process(pid), 0

    def run(self) -> None:
        """Look four times a second until the process has ended."""
        while self.launcher.is_running() and self.launcher.status() != psutil.STATUS_ZOMBIE:
            try:
                for rank in self.launcher.children():
                    self.bytes = max(self.bytes, rank.memory_info().rss)
            except psutil.NoSuchProcess:
                return
            time.sleep(0.25)


def row(size: str, family: str, result: Run) -> list[str]:
    """One row of the table."""
    model = result.spec.model
    return [
        size,
        family,
        f"{parameter_count(model) / 1e6:.2f} M",
        f"{model_flops_per_token(model, SEQUENCE_LENGTH) / 1e6:.1f} M",
        f"{parameter_count(model) * 16 / 2**20:.1f} MiB",
        f"{result.peak_bytes / 2**20:.0f} MiB",
        f"{result.spec.optimizer.learning_rate:g}",
        f"{result.final:.3f}",
    ]


def best(runs: Sequence[Run]) -> Run:
    """The run with the lowest loss at its end."""
    return min(runs, key=lambda candidate: candidate.final)


def main() -> None:
    """Run all and write the figure and its table."""
    rows, panels = [], []
    chosen: dict[str, float] = {}
    for size in SIZES:
        lines = {}
        for family in FAMILIES:
            rates = (chosen[family],) if family in chosen else LEARNING_RATES
            result = best([run(job(family, size, rate)) for rate in rates])
            chosen[family] = result.spec.optimizer.learning_rate
            lines[family] = result.validation
            rows.append(row(size, family, result))
            print(json.dumps(rows[-1]), flush=True)  # noqa: T201
            entropy = result.unigram_entropy
        panels.append((f"{size}: validation loss, nats a token", lines, False))
    draw_lines(FIGURES / "quality.svg", panels, "optimizer step")
    header = [
        "size",
        "family",
        "parameters",
        "FLOPs per token",
        "state",
        "peak memory",
        "learning rate",
        "validation loss",
    ]
    write_table(FIGURES / "quality.md", header, [*rows, ["", "unigram entropy", "", "", "", "", "", f"{entropy:.3f}"]])


if __name__ == "__main__":
    main()
