"""Benchmark results: appended to a file, and printed as a table."""

import csv
import os
import platform
import subprocess
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from boost_core.bench.timing import Spread
from boost_core.terminal import table_lines

RESULTS = Path("tests/benchmarks/results.csv")
_ARCHIVED = Path(__file__).with_name("commit.txt")  # git writes the commit there when it creates an archive
NO_GPU = "No GPU here: these figures show that the benchmark runs, and say nothing about a GPU."

# How a unit is printed: its multiple, that multiple's name, and the number of decimals.
_READABLE = {
    "s": (1e3, "ms", 3),
    "bytes": (2**-30, "GiB", 2),
    "bytes/s": (1e-9, "GB/s", 1),
    "share": (100.0, "%", 1),
    "count": (1.0, "", 0),
}


@dataclass(frozen=True)
class Environment:
    """What was measured, and on what.

    Attributes:
        commit: The source's commit, with ``-dirty`` if it was changed; ``unknown`` in a copy that is neither a
            checkout nor an archive made by git.
        device: Name of the GPU, or the CPU and its cores.
        torch_version: Version of torch.
        triton_version: Version of Triton; empty if it is not installed.
    """

    commit: str
    device: str
    torch_version: str
    triton_version: str

    @classmethod
    def of(cls, device: torch.device) -> "Environment":
        """Return the present environment."""
        name = f"{os.cpu_count()} CPU cores ({platform.machine()}), no GPU"
        if device.type == "cuda":
            name = torch.cuda.get_device_name(device)
        return cls(_commit(), name, torch.__version__, _version_of("triton"))


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        benchmark: ``rank``, ``kernels`` or ``comm``.
        case: What was measured.
        quantity: Which figure of it; ``modelled …`` if it was not measured.
        unit: ``s``, ``bytes``, ``bytes/s``, ``share`` or ``count``.
        p20: A fifth of the measurements are below; the figure itself for a single number.
        p50: The median.
        p80: A fifth are above.
    """

    benchmark: str
    case: str
    quantity: str
    unit: str
    p20: float
    p50: float
    p80: float

    @classmethod
    def spread(cls, benchmark: str, case: str, quantity: str, unit: str, values: Spread) -> "Row":
        """Make a row from several measurements."""
        return cls(benchmark, case, quantity, unit, values.p20, values.p50, values.p80)

    @classmethod
    def single(cls, benchmark: str, case: str, quantity: str, unit: str, value: float) -> "Row":
        """Make a row from a single number."""
        return cls(benchmark, case, quantity, unit, value, value, value)


def append(path: Path, environment: Environment, rows: Iterable[Row]) -> None:
    """Append rows to a file of comma-separated values, with a header if it is new."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="", encoding="utf-8") as stream:
        names = [field.name for kind in (Environment, Row) for field in fields(kind)]
        writer = csv.DictWriter(stream, names, lineterminator="\n")
        if new:
            writer.writeheader()
        for row in rows:
            figures = {name: f"{value:.6g}" for name, value in asdict(row).items() if isinstance(value, float)}
            writer.writerow(asdict(environment) | asdict(row) | figures)


def table(rows: Sequence[Row], width: int) -> str:
    """Format a row per case and a column per quantity, in order of appearance, for a terminal of a width."""
    quantities = list(dict.fromkeys(row.quantity for row in rows))
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        cells.setdefault(row.case, {})[row.quantity] = _readable(row)
    body = [[case, *(figures.get(quantity, "–") for quantity in quantities)] for case, figures in cells.items()]
    headings, lines = table_lines(["", *quantities], body, width, numbers=True)
    return "\n".join([*headings, *lines])


def _readable(row: Row) -> str:
    scale, unit, digits = _READABLE[row.unit]
    text = f"{row.p50 * scale:,.{digits}f} {unit}".rstrip()
    if row.p20 == row.p80:
        return text
    return f"{text} ({row.p20 * scale:,.{digits}f} – {row.p80 * scale:,.{digits}f})"


def _commit() -> str:
    archived = _ARCHIVED.read_text().strip()
    if not archived.startswith("$Format"):
        return archived
    git = ["git", "describe", "--always", "--dirty"]
    try:
        done = subprocess.run(git, capture_output=True, text=True, cwd=Path(__file__).parent)
    except OSError:
        return "unknown"
    return done.stdout.strip() or "unknown"


def _version_of(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""
