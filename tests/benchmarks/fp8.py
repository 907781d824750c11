"""How near 8-bit products come to bf16's: ``python -m tests.benchmarks.fp8``, which writes a figure and a table.

The same CoLA on the same batches for 400 steps in fp32, in bf16 and in fp8, on one rank. In emulation factors are
rounded to 8 bits as on a GPU, and products taken of those in fp32. Where a GPU has 8-bit products they are there, too,
and an error if they end up further from bf16 than twice what emulation does. Takes a few minutes.
"""

import argparse
import statistics
import tempfile
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from unittest.mock import patch

import torch
import torch.distributed as dist

from boost_core.config import JobSpec
from boost_core.kernels import fp8_product
from boost_core.kernels.launch import always
from boost_core.messages import EvaluationReport, Report, StepReport
from boost_core.train import train
from tests.benchmarks.figures import FIGURES, draw_lines, write_table

STEPS = 400
WINDOW = 20  # steps that a loss is averaged over
FACTOR = 2  # sums in another order go another way; a fault's is orders beyond
Curve = Sequence[float]


class Recorder:
    """Keeps what the trainer reports."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.validation = 0.0

    def report(self, report: Report) -> None:
        """Take a report."""
        if isinstance(report, StepReport):
            self.losses.append(report.loss)
        elif isinstance(report, EvaluationReport):
            self.validation = report.loss


def job(precision: str, steps: int, on_gpu: bool, folder: str) -> JobSpec:
    """The job, on the standard library's text, as that of ``quality`` but half as wide."""
    return JobSpec.model_validate(
        {
            "name": f"fp8-{precision}",
            "model": {
                "family": "cola", "gate_activation": True, "hidden_size": 64, "intermediate_size": 176,
                "num_hidden_layers": 4, "num_attention_heads": 4, "rank": 16,
            },
            "training": {
                "steps": steps, "sequence_length": 128, "global_batch_size": 8, "micro_batch_size": 8,
                "precision": precision, "evaluate_every_steps": steps, "evaluate_sequences": 256,
            },
            "optimizer": {"learning_rate": 0.003, "warmup_steps": steps // 10},
            "checkpoint": {"url": folder, "every_steps": steps},
            "resources": {"gpus_per_worker": int(on_gpu)},
        }
    )  # fmt: skip


def run(name: str, steps: int, device: torch.device) -> Recorder:
    """Train in this process."""
    precision, *emulated = name.split(", ")
    recorder, kernels = Recorder(), always("naive") if emulated else nullcontext()
    with tempfile.TemporaryDirectory() as folder, kernels, patch.object(fp8_product, "unavailable", lambda _: None):
        train(job(precision, steps, device.type == "cuda", folder), recorder)
    return recorder


def averaged(curve: Curve) -> list[float]:
    """Each step's loss with those of the steps before it."""
    return [statistics.fmean(curve[max(0, step - WINDOW + 1) : step + 1]) for step in range(len(curve))]


def off(curve: Curve, base: Curve) -> list[float]:
    """How far one is from the other after the first window, relative, step by step."""
    pairs = zip(averaged(curve)[WINDOW:], averaged(base)[WINDOW:], strict=True)
    return [abs(mine - other) / other for mine, other in pairs]


def row(name: str, recorder: Recorder, base: Curve) -> list[str]:
    """One row of the table."""
    far = off(recorder.losses, base)
    last, validation = averaged(recorder.losses)[-1], recorder.validation
    return [name, f"{last:.4f}", f"{validation:.4f}", f"{max(far):.2%}", f"{statistics.fmean(far):.2%}"]


def main() -> None:
    """Train in each precision and write the figure and its table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--out", type=Path, default=FIGURES, help="folder of the figure and the table")
    given = parser.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.set_num_threads(1)  # the matrices are small
    real = () if fp8_product.unavailable(device) else ("fp8",)
    with tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        runs = {name: run(name, given.steps, device) for name in ("fp32", "bf16", "fp8, emulated", *real)}
        dist.destroy_process_group()
    curves = {name: averaged(recorder.losses) for name, recorder in runs.items()}
    draw_lines(
        given.out / "fp8.svg", [(f"loss, nats a token, mean of {WINDOW} steps", curves, False)], "optimizer step"
    )
    header = ["precision", "final loss", "validation loss", "largest deviation from bf16", "mean deviation"]
    base = runs["bf16"].losses
    write_table(given.out / "fp8.md", header, [row(name, recorder, base) for name, recorder in runs.items()])
    emulated, *others = (max(off(recorder.losses, base)) for name, recorder in runs.items() if name.startswith("fp8"))
    if any(each > FACTOR * emulated for each in others):
        raise SystemExit(f"fp8 is {others[0]:.2%} from bf16, and emulated {emulated:.2%}")


if __name__ == "__main__":
    main()
