"""What the benchmarks leave in docs/figures: pictures, and tables in Markdown with what they were measured on."""

import os
import platform
import statistics
import subprocess
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

FIGURES = Path(__file__).parents[2] / "docs" / "figures"

Panel = tuple[str, Mapping[str, Sequence[float] | Mapping[int, float]], bool]


def plots() -> Any:
    """Matplotlib's pyplot, for SVG. Imported here, as tables are written where it is not installed, too."""
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams["svg.hashsalt"] = "boost"  # the same picture gives the same file
    from matplotlib import pyplot

    return pyplot


def draw_lines(path: Path, panels: Sequence[Panel], x_label: str) -> None:
    """Panels side by side, each with its y label, its lines by name, and whether y is logarithmic.

    A line is a value for each step from 1, or values by step.
    """
    pyplot = plots()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure, axes = pyplot.subplots(1, len(panels), figsize=(5.2 * len(panels), 3.8), squeeze=False)
    for axis, (y_label, lines, logarithmic) in zip(axes[0], panels, strict=True):
        for name, line in lines.items():
            points = line if isinstance(line, Mapping) else dict(enumerate(line, start=1))
            axis.plot(list(points), list(points.values()), label=name, linewidth=1)
        axis.set(xlabel=x_label, ylabel=y_label, yscale="log" if logarithmic else "linear")
    axes[0][-1].legend(fontsize=8, loc="center left", bbox_to_anchor=(1.02, 0.5))
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def milliseconds(seconds: Sequence[float], *percentiles: int) -> list[str]:
    """Percentiles of some times, each as text, for example ``12 ms``."""
    cuts = statistics.quantiles(seconds, n=100)
    return [f"{1000 * cuts[percentile - 1]:.0f} ms" for percentile in percentiles]


def write_table(path: Path, header: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """A Markdown table, and under it the commit, the machine and the versions."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join([*table(header, rows), "", provenance(), ""]))


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a Markdown table."""
    return ["| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows)]


def provenance() -> str:
    """What was measured where."""
    git = ["git", "describe", "--always", "--dirty"]
    commit = subprocess.run(git, capture_output=True, text=True, cwd=FIGURES.parents[1]).stdout.strip()
    return (
        f"Measured at commit {commit} on {os.cpu_count()} CPU cores ({platform.machine()}), Python "
        f"{platform.python_version()}, torch {version('torch')}."
    )
