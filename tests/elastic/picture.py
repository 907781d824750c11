"""The picture of an elastic job's story."""

from pathlib import Path
from typing import TYPE_CHECKING

from tests.benchmarks.figures import plots

if TYPE_CHECKING:
    from tests.elastic.curve import Story


def draw(path: Path, story: "Story", steady: list[float]) -> None:
    """Loss with and without what happened, how far they are apart, and the replicas.

    Args:
        path: The file, SVG.
        story: What happened.
        steady: Losses of the uninterrupted run from step 1.
    """
    steps = list(story.losses)
    pyplot = plots()
    figure, (loss, apart, replicas) = pyplot.subplots(
        3, 1, figsize=(9, 7.2), sharex=True, height_ratios=[3, 1.4, 1], layout="constrained"
    )
    loss.plot(range(1, len(steady) + 1), steady, label="uninterrupted, dp 1", linewidth=2.4, color="#b8c4d6")
    loss.plot(steps, [story.losses[step] for step in steps], label="elastic", linewidth=0.9, color="#1f4e9c")
    loss.set_ylabel("loss (nats/token)")
    loss.legend(loc="upper right", fontsize=8)
    differences = [max(abs(story.losses[step] - steady[step - 1]), 1e-9) for step in steps]
    apart.semilogy(steps, differences, linewidth=0.7, color="#1f4e9c")
    apart.set_ylabel("|difference|")
    replicas.step(steps, [story.layouts[step].dp for step in steps], where="mid", color="#1f4e9c")
    replicas.set(ylabel="replicas", xlabel="step", yticks=[1, 2, 3], ylim=(0.5, 3.5))
    top = loss.get_ylim()[1]
    for step, what in story.happened:
        for axis in (loss, apart, replicas):
            axis.axvline(step, color="#c0392b", linewidth=0.8, linestyle=":")
        loss.text(step, top, f" {what}", rotation=90, fontsize=7, va="top", ha="right", color="#c0392b")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
