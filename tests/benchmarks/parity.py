"""Loss curves of one small CoLA job under every layout and norm: ``python -m tests.benchmarks.parity`` draws them.

The same arithmetic in another order of summation drifts apart as training goes on. How far is shown by a control that
shares nothing with tensor parallelism: the same job on one rank with another micro-batch size.
"""

import tempfile
from collections.abc import Sequence
from pathlib import Path

from boost_core.config import JobSpec
from tests.benchmarks.figures import FIGURES, draw_lines, write_table
from tests.distributed.recording import losses, train_and_record
from tests.jobs import tiny_job, write_corpus
from tests.ranks import Ranks

STEPS = 100
# From the values of seed 0 training comes to steps that magnify any difference, rounding too, a hundred times.
SEED = 1
NORMS = ("fused", "online_paper", "sync")
SIZES = (1, 2, 4)
Curve = list[float]


def curves(ranks: Ranks, folder: Path, sizes: Sequence[int] = SIZES) -> tuple[dict[str, Curve], dict[str, Curve]]:
    """Losses by step: of every layout and norm, the first on one rank with the default norm; and of the controls."""
    corpus = write_corpus(folder / "corpus")
    layouts = {
        f"tp {size}, {norm}": _curve(ranks, _job(corpus, folder, 8, {"tensor_parallel_size": size, "norm": norm}))
        for norm in NORMS
        for size in sizes
    }
    controls = {
        f"tp 1, micro-batch {sequences}": _curve(ranks, _job(corpus, folder, sequences, {"tensor_parallel_size": 1}))
        for sequences in (1, 2, 4)
    }
    return layouts, controls


def drift(curve: Curve, reference: Curve) -> Curve:
    """The largest relative difference so far, by step."""
    so_far, differences = 0.0, []
    for here, there in zip(curve, reference, strict=True):
        so_far = max(so_far, abs(here - there) / there)
        differences.append(so_far)
    return differences


def _job(corpus: Path, folder: Path, micro_batch_size: int, parallelism: dict[str, object]) -> JobSpec:
    training = {
        "steps": STEPS, "global_batch_size": 8, "micro_batch_size": micro_batch_size, "sequence_length": 32,
        "evaluate_every_steps": STEPS, "seed": SEED,
    }  # fmt: skip
    return tiny_job(
        corpus, tempfile.mkdtemp(dir=folder), parallelism=parallelism, training=training,
        checkpoint={"every_steps": STEPS},
    )  # fmt: skip


def _curve(ranks: Ranks, job: JobSpec) -> Curve:
    reports = ranks.run(job.parallelism.world_size, train_and_record, job)[0]
    return list(losses(reports).values())


def main() -> None:
    """Run all and write the figure and its numbers."""
    ranks = Ranks()
    with tempfile.TemporaryDirectory() as folder:
        layouts, controls = curves(ranks, Path(folder))
    ranks.close()
    reference, *_ = layouts.values()
    drifts = {name: drift(curve, reference) for name, curve in (layouts | controls).items()}
    draw_lines(
        FIGURES / "parity.svg",
        [("loss, nats a token", layouts, False), ("largest relative difference so far", drifts, True)],
        "optimizer step",
    )
    rows = [[name, f"{curve[-1]:.6f}", f"{drifts[name][-1]:.1e}"] for name, curve in (layouts | controls).items()]
    write_table(FIGURES / "parity.md", ["job", f"loss at step {STEPS}", "largest relative difference"], rows)


if __name__ == "__main__":
    main()
