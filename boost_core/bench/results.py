"""What benchmarks measure: times of repeated calls, on what they were measured, and a table of them."""

import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from boost_core.terminal import table_lines

# Times of repeated calls.

_AHEAD_CYCLES = 2_000_000  # about a millisecond of a GPU's clock, in which the CPU enqueues the timed work
FLUSHED_BYTES = 256 << 20  # more than any GPU's last-level cache holds


def wall_seconds(
    call: Callable[[], object], device: torch.device, repeats: int, warm_calls: int = 1,
    before: Callable[[], object] = lambda: None,
) -> list[float]:  # fmt: skip
    """Return the wall time of each of ``repeats`` calls, the device's work included, after some warm-up calls.

    ``before`` precedes each call, and is not timed.
    """
    seconds = []
    for _ in range(warm_calls + repeats):
        before()
        synchronize(device)
        started = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    return seconds[warm_calls:]


def kernel_seconds(call: Callable[[], object], device: torch.device, repeats: int) -> list[float]:
    """Like ``wall_seconds``, but on a GPU without the time in which it waits for the CPU to enqueue work.

    The GPU is kept busy while the CPU enqueues a call, and its caches hold nothing of the previous call.
    """
    if device.type != "cuda":
        return wall_seconds(call, device, repeats)
    flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=device)
    marks = []
    call()
    for _ in range(repeats):
        torch.cuda._sleep(_AHEAD_CYCLES)  # type: ignore[no-untyped-call]
        flushed.zero_()
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        begin.record()
        call()
        end.record()
        marks.append((begin, end))
    synchronize(device)
    return [begin.elapsed_time(end) / 1000 for begin, end in marks]


def synchronize(device: torch.device) -> None:
    """Wait until the device has finished all enqueued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


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
        commit = _ARCHIVED.read_text().strip()
        if commit.startswith("$Format"):
            git, commit = ["git", "describe", "--always", "--dirty"], "unknown"
            with suppress(OSError):
                result = subprocess.run(git, capture_output=True, text=True, cwd=Path(__file__).parent)
                commit = result.stdout.strip() or commit
        triton = ""
        with suppress(PackageNotFoundError):
            triton = version("triton")
        return cls(commit, name, torch.__version__, triton)


@dataclass(frozen=True)
class Row:
    """One figure.

    Attributes:
        case: What was measured.
        quantity: Which figure of it; ``modelled …`` if it was not measured.
        unit: ``s``, ``bytes``, ``bytes/s``, ``share`` or ``count``.
        p20: A fifth of the measurements are below; the figure itself for a single number.
        p50: The median.
        p80: A fifth are above.
    """

    case: str
    quantity: str
    unit: str
    p20: float
    p50: float
    p80: float

    @classmethod
    def of(cls, case: str, quantity: str, unit: str, *values: float) -> "Row":
        """Make a row from one or more measurements; one is its own percentiles."""
        p20, _, _, p80 = statistics.quantiles(values, n=5, method="inclusive") if values[1:] else values * 4
        return cls(case, quantity, unit, p20, statistics.median(values), p80)


def table(rows: Sequence[Row], width: int) -> str:
    """Format a row per case and a column per quantity, in order of appearance, for a terminal of a width."""
    quantities = list(dict.fromkeys(row.quantity for row in rows))
    cells: dict[str, dict[str, str]] = {}
    for row in rows:
        scale, unit, digits = _READABLE[row.unit]
        text = f"{row.p50 * scale:,.{digits}f} {unit}".rstrip()
        if row.p20 != row.p80:
            text += f" ({row.p20 * scale:,.{digits}f} – {row.p80 * scale:,.{digits}f})"
        cells.setdefault(row.case, {})[row.quantity] = text
    body = [[case, *(figures.get(quantity, "–") for quantity in quantities)] for case, figures in cells.items()]
    headings, lines = table_lines(["", *quantities], body, width, numbers=True)
    return "\n".join([*headings, *lines])
