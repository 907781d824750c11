"""What sparse attention learns and costs beside dense attention: ``python -m tests.benchmarks.sparse``.

Writes docs/figures/sparse.md. Two jobs on the default corpus, one rank of one thread each, one after the other: the
same model, batches and steps, and sequences of 8K tokens. Validation is dense for both. Takes half an hour or more.

With ``--recall`` it writes docs/figures/sparse_recall.md instead, from the sparse job alone: as it learns, the recall,
and the most that any mask with as many pairs for each sampled query could have kept of dense attention.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch.utils.flop_counter import FlopCounterMode

from boost_core.config import JobSpec
from boost_core.config.model import SparseAttentionConfig
from boost_core.context.sparse import Lines, SparseAttention, Tally, attention_of_rows, sampled_rows
from boost_core.messages import EvaluationReport, Report, StepReport
from boost_core.train.loop import train
from tests.benchmarks.figures import FIGURES, write_table

STEPS, LENGTH, LAST = 400, 8192, 50
SHAPE = {
    "family": "cola", "hidden_size": 64, "intermediate_size": 172, "num_hidden_layers": 2, "num_attention_heads": 2,
    "rank": 16,
}  # fmt: skip
ATTENTION = {"kind": "vertical_slash", "budget": 0.05, "from_length": LENGTH, "window": 64}


@dataclass(frozen=True)
class Learned:
    """A job's end: mean of its last steps' losses, validation; recall and density of these; the median step."""

    loss: float
    validation: float
    recall: float | None
    density: float | None
    seconds: float


class _Reports:
    def __init__(self) -> None:
        self.steps, self.evaluations = list[StepReport](), list[EvaluationReport]()

    def report(self, report: Report) -> None:
        if isinstance(report, StepReport):
            self.steps.append(report)
            if report.step % LAST == 0:
                recall = "" if report.attention_recall is None else f", recall {report.attention_recall:.3f}"
                print(f"step {report.step}: loss {report.loss:.4f}{recall}, {report.step_seconds:.2f} s", flush=True)  # noqa: T201
        elif isinstance(report, EvaluationReport):
            self.evaluations.append(report)


def learn(attention: dict[str, Any] | None) -> Learned:
    """Train on this rank."""
    with tempfile.TemporaryDirectory() as folder:
        spec = JobSpec.model_validate(
            {
                "name": "sparse",
                "model": SHAPE,
                "training": {
                    "steps": STEPS, "sequence_length": LENGTH, "global_batch_size": 1, "micro_batch_size": 1,
                    "evaluate_every_steps": STEPS, "evaluate_sequences": 16, "attention": attention,
                },
                "optimizer": {"learning_rate": 0.01, "warmup_steps": 40},
                "checkpoint": {"url": str(Path(folder)), "every_steps": STEPS},
            }
        )  # fmt: skip
        reports = _Reports()
        train(spec, reports)
    last, end = reports.steps[-LAST:], reports.evaluations[-1]
    recall, density = (
        None if attention is None else statistics.mean(getattr(step, name) for step in last)
        for name in ("attention_recall", "attention_density")
    )
    seconds = statistics.median(step.step_seconds for step in reports.steps)
    return Learned(statistics.mean(step.loss for step in last), end.loss, recall, density, seconds)


class Best:
    """The most that masks with as many pairs for each sampled query could keep, step by step, beside what is kept."""

    def __init__(self) -> None:
        self.kept, self.best = list[float](), list[float]()

    def watch(self, count: Callable[..., None]) -> Callable[..., None]:
        """Watch how a step's only document is counted."""

        def counted(tally: Tally, query_mhe: torch.Tensor, key_mje: torch.Tensor, lines: Sequence[Lines]) -> None:
            rows = sampled_rows(len(query_mhe), query_mhe.device)
            shares = []
            for head, of_head in enumerate(lines):
                dense_pm = attention_of_rows(query_mhe[rows, head], key_mje[:, head], rows)
                seen_pm = of_head.sees(rows)
                ordered_pm = dense_pm.sort(descending=True).values
                most = torch.arange(dense_pm.shape[1]) < seen_pm.sum(1, keepdim=True)
                shares.append([float((dense_pm * seen_pm).sum()), float((ordered_pm * most).sum())])
            kept, best = (sum(each) / len(rows) / len(lines) for each in zip(*shares, strict=True))
            self.kept.append(kept)
            self.best.append(best)
            count(tally, query_mhe, key_mje, lines)

        return counted


def recall_as_it_learns() -> list[list[str]]:
    """Rows of a table: means over a tenth of the steps each."""
    best = Best()
    with patch.object(Tally, "add", best.watch(Tally.add)):
        learn(ATTENTION)
    size = len(best.kept) // 10  # of each step there is one for each layer
    return [
        [f"{STEPS * (end - size) // len(best.kept) + 1}–{STEPS * end // len(best.kept)}"]
        + [f"{statistics.mean(each[end - size : end]):.3f}" for each in (best.kept, best.best)]
        for end in range(size, len(best.kept) + 1, size)
    ]


def arithmetic() -> float:
    """FLOPs of sparse attention forward and backward, choosing and sampling included, over those of dense attention."""
    heads, size = 2, 32
    query, key, value = (torch.randn(LENGTH, heads, size, requires_grad=True) for _ in range(3))
    attend = SparseAttention(SparseAttentionConfig.model_validate(ATTENTION), [LENGTH], torch.device("cpu"), Tally())
    with FlopCounterMode(display=False) as counted:
        attend.for_layer()(query, key, value).sum().backward()
    return counted.get_total_flops() / (14 * size * heads * LENGTH * (LENGTH + 1) // 2)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recall", action="store_true")
    only_recall = parser.parse_args().recall
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            if only_recall:
                header = ["steps", "recall", "best mask with as many pairs"]
                write_table(FIGURES / "sparse_recall.md", header, recall_as_it_learns())
                return
            sparse, dense = (learn(attention) for attention in (ATTENTION, None))
        finally:
            dist.destroy_process_group()
    header = [
        f"{LENGTH // 1024}K tokens, {STEPS} steps", f"loss, last {LAST} steps", "validation", "recall", "density",
        "attention's FLOPs", "step",
    ]  # fmt: skip
    rows = [
        ["dense", f"{dense.loss:.4f}", f"{dense.validation:.4f}", "1", "1", "1", f"{dense.seconds:.2f} s"],
        [
            "vertical_slash", f"{sparse.loss:.4f}", f"{sparse.validation:.4f}", f"{sparse.recall:.3f}",
            f"{sparse.density:.3f}", f"{arithmetic():.3f}", f"{sparse.seconds:.2f} s",
        ],
    ]  # fmt: skip
    write_table(FIGURES / "sparse.md", header, rows)


if __name__ == "__main__":
    main()
